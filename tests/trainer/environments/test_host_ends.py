"""Rollouts that the environment, the engine or the caller ends: errors reach the caller, and nothing is left open."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from rljob_testing.environments import process_ids
from rljob_testing.training.scripted_engine import NEVER, Prompt
from rljob_testing.training.scripted_rollouts import CALL, END, SECONDS, Start, request, say, turns, wait_for
from rljob_trainer.engines.rollout.base import Outcome
from rljob_trainer.environments import engine_client
from rljob_trainer.environments.episode import EpisodeRequest, FinishedEpisode
from rljob_trainer.errors import WorkerError
from rljob_trainer.processes.child_process import ChildProcess
from rljob_trainer.rewards.base import RewardStatus

TWO_CALLS = [("fail", "{}"), ("add", '{"a": 1, "b": 2}')]


@contextmanager
def template_that_begins(folder: Path, text: str) -> Iterator[None]:
    template = folder / "model" / "chat_template.jinja"
    before = template.read_text()
    template.write_text(text + before)
    try:
        yield
    finally:
        template.write_text(before)


@pytest.mark.parametrize(
    ("asked", "limits", "status", "text"),
    [
        (replace(request(0), row={"plan": [None]}), {}, RewardStatus.ERROR, "the row has no prompt"),
        (request(0, "a" * 100), {"max_context_tokens": 100}, RewardStatus.OK, ""),
    ],
)
def test_a_rollout_that_cannot_begin_is_excluded(
    start: Start, asked: EpisodeRequest, limits: dict[str, object], status: RewardStatus, text: str
) -> None:
    """A prompt of the environment that is too long now and then does not end the run; an exception is an error of the
    reward. The first rollout with each class was tried before the run."""
    running = start(say, **limits)
    [episode] = running.run(asked)
    assert (episode.outcome, episode.transcript) == (Outcome.INFRASTRUCTURE, None)
    assert (episode.reward.status, episode.reward.value) == (status, None)
    assert text in episode.reward.detail
    assert not running.engine.requests
    running.assert_nothing_is_open()


def test_an_error_of_the_engine_ends_the_wait(start: Start) -> None:
    running = start(lambda _: NEVER)
    running.host.submit([request(0, "a"), request(1, "a")])
    assert running.engine.has_request.wait(SECONDS)
    running.engine.step_error = ValueError("out of paper")
    with pytest.raises(WorkerError, match="out of paper"):
        running.host.take(SECONDS)
    running.host.abort()
    assert running.num_open == 0


def test_take_returns_what_has_ended(start: Start) -> None:
    running = start(lambda prompt: say(prompt) if "quick" in prompt.text else NEVER)
    running.host.submit([request(0, "quick"), request(1, "slow")])
    end, found = time.monotonic() + SECONDS, list[FinishedEpisode]()
    while not found:
        assert time.monotonic() < end
        found = running.host.take(0.01)
    assert [each.number for each in found] == [0]
    assert running.num_open == 1
    running.host.abort()
    assert running.host.take(SECONDS) == []


@pytest.mark.parametrize("state", ["not begun", "loading", "generating", "in reset", "in respond", "ended"])
@pytest.mark.parametrize("rollouts_per_process", [1, 4])
def test_abort_leaves_nothing_open(start: Start, folder: Path, state: str, rollouts_per_process: int) -> None:
    """And the processes can be used again."""
    running = start(
        lambda prompt: NEVER if "never" in prompt.text else say(prompt),
        max_open=4,
        rollouts_per_process=rollouts_per_process,
    )
    if state != "loading":
        running.run(request(100, "a"))
    plan = {"generating": ("never",), "in reset": ("hang",), "in respond": ("a", "hang")}.get(state, ("a", "b"))
    # More than have a place.
    running.host.submit([request(number, *plan) for number in range(6)])
    if state.startswith("in "):
        wait_for((folder / "hangs").exists)
    elif state == "generating":
        wait_for(lambda: len(running.engine.open) == 4)
    elif state == "ended":
        wait_for(lambda: running.num_open == 0)
    running.host.abort()
    running.assert_nothing_is_open()
    assert running.host.take(0.0) == []
    assert [each.outcome for each in running.run(*(request(200 + n, "a", "b") for n in range(6)))] == [
        Outcome.COMPLETED
    ] * 6
    running.assert_nothing_is_open()
    assert len(process_ids(running.host._processes)) <= 4 // rollouts_per_process


def test_close_ends_open_rollouts(start: Start) -> None:
    running = start(lambda _: NEVER, rollouts_per_process=2)
    running.host.submit([request(number, "a") for number in range(20)])
    wait_for(lambda: len(running.engine.open) == 8)
    # The fixture closes the host, and looks for processes.


def test_close_waits_for_a_process_that_is_being_killed(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    kill, delays = ChildProcess.kill, iter([1.0])

    def kill_slowly(self: ChildProcess) -> None:
        time.sleep(next(delays, 0.0))
        kill(self)

    monkeypatch.setattr(ChildProcess, "kill", kill_slowly)
    # The second rollout gets a new process.
    hanging, other = start(say, max_open=1, timeout_seconds=0.5).run(request(0, "a", "hang"), request(1, "a"))
    assert (hanging.outcome, other.outcome) == (Outcome.TIME_LIMIT, Outcome.COMPLETED)
    # The fixture closes the host, and looks for tasks that have not ended.


def test_a_message_that_the_template_rejects_is_an_error_of_the_environment(start: Start, folder: Path) -> None:
    with template_that_begins(folder, "{% if messages[-1].content == 'b' %}{{ raise_exception('no b') }}{% endif %}"):
        [episode] = start(say).run(request(0, "a", "b"))
    assert (episode.outcome, episode.reward.status) == (Outcome.ERROR, RewardStatus.ERROR)
    assert "roles user" in episode.reward.detail
    assert "no b" in episode.reward.detail


@pytest.mark.parametrize(
    ("plan", "outcome", "number"),
    [
        (["a", [{"role": "user", "content": "b"}, {"role": "system", "content": "hint"}]], Outcome.ERROR, 2),
        ([[{"role": "system", "content": "hint"}, {"role": "user", "content": "a"}]], Outcome.INFRASTRUCTURE, 1),
        (["a", {"role": "system", "content": " "}], Outcome.COMPLETED, None),
    ],
)
def test_a_message_that_the_template_leaves_out_is_an_error_of_the_environment(
    start: Start, folder: Path, plan: list[object], outcome: Outcome, number: int | None
) -> None:
    with template_that_begins(folder, "{% set messages = messages | rejectattr('role', 'eq', 'system') | list %}"):
        [episode] = start(say).run(replace(request(0), row={"plan": plan}))
    assert episode.outcome is outcome
    seen = f"ignores message {number} (role 'system': 'hint'); use a role that it writes there" if number else ""
    assert seen in episode.reward.detail
    assert episode.reward.status is (RewardStatus.ERROR if number else RewardStatus.OK)


def test_calls_that_the_template_rejects_are_counted_as_one_error_each(start: Start, folder: Path) -> None:
    """Also if the tools have failed, too."""
    calls = "\n".join(CALL.format(name, arguments).removesuffix(END) for name, arguments in TWO_CALLS)
    reject = (
        "{% for m in messages %}{% if m.tool_calls and m.tool_calls|length > 1 %}{{ raise_exception('only one') }}"
        "{% endif %}{% endfor %}"
    )
    with template_that_begins(folder, reject):
        [episode] = start(turns(calls, "done"), "Calculator").run(request(0))
    assert (episode.outcome, episode.counts.num_tool_calls, episode.counts.num_tool_errors) == (Outcome.COMPLETED, 2, 2)


def test_rollouts_without_a_place_do_not_delay_an_idle_engine(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_client, "PAUSE_SECONDS", 10 * SECONDS)
    monkeypatch.setattr(engine_client, "LONGEST_WAIT_SECONDS", 10 * SECONDS)
    # One turn each, so that two always wait for the engine together.
    episodes = start(say, max_open=2).run(*(request(number, "a") for number in range(4)))
    assert {each.outcome for each in episodes} == {Outcome.COMPLETED}


def test_many_rollouts_wait_for_few_places(start: Start) -> None:
    """All begin as coroutines at once, but only as many as have a place use a process or the engine."""
    most_open = 0

    def script(prompt: Prompt) -> str:
        nonlocal most_open
        most_open = max(most_open, len(running.engine.open) + 1)
        return say(prompt)

    # Six is no multiple of four.
    running = start(script, max_open=6, rollouts_per_process=4)
    episodes = running.run(*(request(number, "a", "b") for number in range(300)))
    assert {each.outcome for each in episodes} == {Outcome.COMPLETED}
    assert 4 < most_open <= 6
    assert len(process_ids(running.host._processes)) <= 2
    running.assert_nothing_is_open()
