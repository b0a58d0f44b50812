"""Rollouts that the environment, the engine or the caller ends: errors reach the caller, and nothing is left open."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from rljob_testing.training.scripted_engine import NEVER, Prompt
from rljob_testing.training.scripted_rollouts import SECONDS, Start, request, say, wait_for
from rljob_trainer.engines.rollout.base import Outcome
from rljob_trainer.environments.episode import EpisodeRequest, FinishedEpisode
from rljob_trainer.errors import WorkerError
from rljob_trainer.rewards.base import RewardStatus


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
    assert running.host.num_open == 0


def test_take_returns_what_has_ended(start: Start) -> None:
    running = start(lambda prompt: say(prompt) if "quick" in prompt.text else NEVER)
    running.host.submit([request(0, "quick"), request(1, "slow")])
    end, found = time.monotonic() + SECONDS, list[FinishedEpisode]()
    while not found:
        assert time.monotonic() < end
        found = running.host.take(0.01)
    assert [each.number for each in found] == [0]
    assert running.host.num_open == 1
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
        wait_for(lambda: running.host.num_open == 0)
    running.host.abort()
    running.assert_nothing_is_open()
    assert running.host.take(0.0) == []
    assert [each.outcome for each in running.run(*(request(200 + n, "a", "b") for n in range(6)))] == [
        Outcome.COMPLETED
    ] * 6
    running.assert_nothing_is_open()
    assert len(running.host._processes.process_ids()) <= 4 // rollouts_per_process


def test_close_ends_open_rollouts(start: Start) -> None:
    running = start(lambda _: NEVER, rollouts_per_process=2)
    running.host.submit([request(number, "a") for number in range(20)])
    wait_for(lambda: len(running.engine.open) == 8)
    # The fixture closes the host, and looks for processes.


def test_a_message_that_the_template_rejects_is_an_error_of_the_environment(start: Start, folder: Path) -> None:
    template = Path(folder / "model" / "chat_template.jinja")
    before = template.read_text()
    template.write_text("{% if messages[-1].content == 'b' %}{{ raise_exception('no b') }}{% endif %}" + before)
    try:
        [episode] = start(say).run(request(0, "a", "b"))
    finally:
        template.write_text(before)
    assert (episode.outcome, episode.reward.status) == (Outcome.ERROR, RewardStatus.ERROR)
    assert "roles user" in episode.reward.detail
    assert "no b" in episode.reward.detail


def test_many_rollouts_wait_for_few_places(start: Start) -> None:
    """All begin as coroutines at once, but only as many as have a place use a process or the engine."""
    most_open = 0

    def script(prompt: Prompt) -> str:
        nonlocal most_open
        most_open = max(most_open, len(running.engine.open) + 1)
        return say(prompt)

    running = start(script, max_open=8, rollouts_per_process=4)
    episodes = running.run(*(request(number, "a", "b") for number in range(300)))
    assert {each.outcome for each in episodes} == {Outcome.COMPLETED}
    assert 4 < most_open <= 8
    assert len(running.host._processes.process_ids()) <= 2
    running.assert_nothing_is_open()
