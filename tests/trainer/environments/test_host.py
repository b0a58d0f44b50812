"""Rollouts with real environment processes and an engine whose responses the test chooses: how each rollout ends, what
is asked again, and that nothing is left open."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace

import pytest

from rljob_testing.training.scripted_engine import BROKEN, NEVER, Prompt, Script
from rljob_testing.training.scripted_rollouts import (
    CALL,
    END,
    SAMPLING,
    SECONDS,
    Running,
    Start,
    check_rows,
    request,
    say,
    turns,
)
from rljob_trainer.engines.rollout.base import Outcome, SamplingSettings
from rljob_trainer.environments.episode import turn_seed
from rljob_trainer.errors import DatasetError
from rljob_trainer.models.tokenizer import ChatMessage
from rljob_trainer.rewards.base import RewardStatus


@pytest.mark.parametrize(
    ("limits", "outcome", "num_turns", "num_seen"),
    [
        ({}, Outcome.COMPLETED, 3, 3),
        ({"max_turns": 2}, Outcome.MAX_TURNS, 2, 2),
        ({"max_turns": 3}, Outcome.COMPLETED, 3, 3),
        ({"max_turn_tokens": 3}, Outcome.MAX_TOKENS, 1, 0),
        # Prompt, turn and message have 20, 7 and 21 tokens, together 20 + 7 + 21 + 7 + 21 = 76 before the third turn.
        ({"max_context_tokens": 76}, Outcome.CONTEXT_FULL, 2, 2),
        ({"max_context_tokens": 78}, Outcome.CONTEXT_FULL, 3, 2),
        ({"max_context_tokens": 83}, Outcome.COMPLETED, 3, 3),
        ({"max_new_tokens": 14}, Outcome.MAX_TOKENS, 2, 2),
        ({"max_new_tokens": 20}, Outcome.MAX_TOKENS, 3, 2),
        ({"max_new_tokens": 21}, Outcome.COMPLETED, 3, 3),
    ],
)
def test_how_a_rollout_ends(
    start: Start, limits: dict[str, int], outcome: Outcome, num_turns: int, num_seen: int
) -> None:
    """`num_seen`: turns that the environment has seen. A turn that was cut off is not shown to it."""
    sampling = replace(SAMPLING, max_new_tokens=limits.pop("max_new_tokens", 400))
    running = start(say, **limits)
    asked = request(0, "a", "b", "c", sampling=sampling)
    [episode] = running.run(asked)
    assert episode.transcript is not None
    assert (episode.outcome, episode.transcript.num_turns) == (outcome, num_turns)
    assert isinstance(episode.reward.value, Mapping)
    assert episode.reward.value["turns"] == num_seen
    check_rows(running, asked, episode)
    [row] = episode.transcript.rows
    assert row.num_trained_tokens <= sampling.max_new_tokens
    assert len(row.token_ids) <= limits.get("max_context_tokens", len(row.token_ids))
    running.assert_nothing_is_open()


def test_the_conversation_is_complete(start: Start) -> None:
    running = start(say)
    messages: list[ChatMessage] = [{"role": "system", "content": "Play."}, {"role": "user", "content": "Now: "}]
    [episode] = running.run(request(0, "a", "b", messages=messages))
    assert episode.transcript is not None
    assert list(episode.transcript.messages) == [
        {"role": "system", "content": "Play."},
        {"role": "user", "content": "Now: a"},
        {"role": "assistant", "content": "turn 0"},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "turn 1"},
    ]
    row, decode = episode.transcript.rows[0], running.engine.tokenizer.decode
    text = decode(row.token_ids, skip_special_tokens=False)
    assert episode.transcript.prompt_text + episode.transcript.response_text + END == text
    assert episode.transcript.last_turn == "turn 1"
    assert messages[1]["content"] == "Now: "


def test_tools_are_called_and_wrong_calls_come_back_as_text(start: Start) -> None:
    script = turns(
        CALL.format("add", '{"a": 1, "b": 2}').removesuffix(END),
        CALL.format("subtract", "{}").removesuffix(END),
        CALL.format("fail", "{}").removesuffix(END),
        "<tool_call>\n{nothing}\n</tool_call>",
        CALL.format("add", '{"a": 3}').removesuffix(END),
        "The sum is 3.",
    )
    running = start(script, "Calculator")
    asked = request(0)
    [episode] = running.run(asked)
    assert episode.transcript is not None
    assert (episode.outcome, episode.reward.value) == (Outcome.COMPLETED, 1)
    answers = [
        (each["role"], str(each["content"])) for each in episode.transcript.messages if each["role"] != "assistant"
    ]
    roles, texts = zip(*answers, strict=True)
    assert roles == ("user", "tool", "tool", "tool", "user", "tool")
    assert texts[1] == "3"
    for text, part in zip(texts[2:], ("subtract not found", "lost", "cannot be read", "'b'"), strict=True):
        assert part in text
    assert (episode.counts.num_tool_calls, episode.counts.num_tool_errors) == (5, 4)
    check_rows(running, asked, episode)


def test_a_broken_call_in_the_last_turn_is_a_parse_error(start: Start) -> None:
    running = start(turns("<tool_call>{", "<tool_call>{"), "Calculator", max_turns=2)
    [episode] = running.run(request(0))
    assert (episode.outcome, episode.reward.value) == (Outcome.PARSE_ERROR, 0)
    assert (episode.counts.num_tool_calls, episode.counts.num_tool_errors) == (2, 2)


class Late:
    """A script with one turn that never ends: each time it is asked for, the clock of the rollouts moves by 100
    seconds."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self.running: Running | None = None

    def __call__(self, prompt: Prompt) -> str:
        text = self._script(prompt)
        if text == NEVER:
            assert self.running is not None
            loop = self.running.host._asyncio_loop
            loop.call_soon_threadsafe(self._move, loop)
        return text

    def _move(self, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time
        loop.time = lambda: now() + 100  # type: ignore[method-assign]


def test_a_rollout_without_a_first_turn_in_time_has_no_reward(start: Start) -> None:
    """The policy has done nothing that could be scored."""
    script = Late(lambda _: NEVER)
    running = script.running = start(script, max_seconds=60.0, retries=1)
    [episode] = running.run(request(0, "a", "b"))
    assert (episode.outcome, episode.transcript) == (Outcome.INFRASTRUCTURE, None)
    assert episode.reward.value is None
    assert running.engine.aborted == ["0/0", "0/0"]
    running.assert_nothing_is_open()


def test_a_turn_that_is_generated_too_long_is_dropped(start: Start) -> None:
    """The environment still gives a reward for what came before."""
    turn = 1
    script = Late(turns("first", NEVER))
    running = script.running = start(script, max_seconds=60.0)
    asked = request(0, "a", "b")
    [episode] = running.run(asked)
    assert (episode.outcome, episode.reward.status) == (Outcome.TIME_LIMIT, RewardStatus.OK)
    assert isinstance(episode.reward.value, Mapping)
    assert episode.reward.value["turns"] == turn
    assert episode.transcript is not None
    assert episode.transcript.num_turns == turn
    assert running.engine.aborted == [f"0/{turn}"]
    check_rows(running, asked, episode)
    running.assert_nothing_is_open()


@pytest.mark.parametrize("plan", [("a", "hang"), ("a", "b", "hang")])
def test_a_call_of_the_environment_that_hangs_gives_no_reward(start: Start, plan: tuple[str, ...]) -> None:
    running = start(say, timeout_seconds=0.5)
    asked = request(0, *plan)
    [episode] = running.run(asked)
    assert (episode.outcome, episode.reward.status) == (Outcome.TIME_LIMIT, RewardStatus.TIMEOUT)
    assert episode.reward.value is None
    assert "respond took longer than 0.5 s" in episode.reward.detail
    check_rows(running, asked, episode)
    running.assert_nothing_is_open()


def test_a_reward_that_hangs_is_missing(start: Start) -> None:
    running = start(say, timeout_seconds=0.5)
    [episode] = running.run(request(0, "a", reward="hang"))
    assert (episode.outcome, episode.reward.status) == (Outcome.COMPLETED, RewardStatus.TIMEOUT)
    assert "get_reward took longer" in episode.reward.detail


@pytest.mark.parametrize(
    ("row", "method", "outcome"),
    [
        ({"plan": ["raise"]}, "reset", Outcome.INFRASTRUCTURE),
        ({"plan": [7]}, "reset", Outcome.INFRASTRUCTURE),
        ({"plan": [[]]}, "reset", Outcome.INFRASTRUCTURE),
        ({"plan": [[{"role": "assistant", "content": "mine"}]]}, "reset", Outcome.INFRASTRUCTURE),
        ({"plan": ["a", "raise"]}, "respond", Outcome.ERROR),
        ({"plan": ["a", 7.5]}, "respond", Outcome.ERROR),
        ({"plan": ["a", [{"role": "assistant", "content": "mine"}]]}, "respond", Outcome.ERROR),
        ({"plan": ["a"], "reward": "raise"}, "get_reward", Outcome.COMPLETED),
        ({"plan": ["a"], "reward": "garbage"}, "get_reward", Outcome.COMPLETED),
        ({"plan": ["a"], "reward": float("nan")}, "get_reward", Outcome.COMPLETED),
    ],
)
def test_an_environment_that_raises_or_returns_garbage_gives_no_reward(
    start: Start, row: dict[str, object], method: str, outcome: Outcome
) -> None:
    running = start(say)
    [episode] = running.run(replace(request(0), row=row))
    assert (episode.outcome, episode.reward.status, episode.reward.value) == (outcome, RewardStatus.ERROR, None)
    assert episode.reward.detail.startswith(method), episode.reward.detail
    assert (episode.transcript is None) is (outcome is Outcome.INFRASTRUCTURE)
    running.assert_nothing_is_open()


def test_a_process_that_dies_is_replaced_and_the_rollout_begins_again(start: Start) -> None:
    running = start(say)
    asked = request(0, "a", "b", "die once")
    [episode] = running.run(asked)
    assert (episode.outcome, episode.reward.status) == (Outcome.COMPLETED, RewardStatus.OK)
    assert [each.request_id for each in running.engine.requests] == ["0/0", "0/1", "0/0", "0/1", "0/2"]
    first, second = running.engine.requests[:2], running.engine.requests[2:4]
    assert first == second
    check_rows(running, asked, episode)


@pytest.mark.parametrize("retries", [0, 2])
def test_a_rollout_whose_process_always_dies_has_no_reward(start: Start, retries: int) -> None:
    """With what the policy wrote, its process has died twice: that is held to be the cause, as with rewards."""
    running = start(say, retries=retries)
    died, well = running.run(request(0, "a", "die"), request(1, "a"))
    assert died.reward.value is None
    if retries:
        assert (died.outcome, died.reward.status) == (Outcome.ERROR, RewardStatus.DIED)
        assert "the environment's respond ended its process (exit code 7)" in died.reward.detail
    else:
        assert (died.outcome, died.transcript) == (Outcome.INFRASTRUCTURE, None)
    assert well.outcome is Outcome.COMPLETED
    assert sum(each.request_id == "0/0" for each in running.engine.requests) == 1 + bool(retries)
    running.assert_nothing_is_open()


@pytest.mark.parametrize(("what", "outcome"), [("hang", Outcome.TIME_LIMIT), ("die", Outcome.ERROR)])
def test_rollouts_do_not_use_up_their_attempts_for_faults_of_others(start: Start, what: str, outcome: Outcome) -> None:
    running = start(say, max_open=6, rollouts_per_process=6, timeout_seconds=0.5, retries=1)
    guilty = [request(number, "a", what) for number in range(3)]
    found = running.run(*guilty, *(request(number, *"abcdef") for number in range(3, 6)))
    assert [each.outcome for each in found] == [outcome] * 3 + [Outcome.COMPLETED] * 3
    running.assert_nothing_is_open()


def test_a_rollout_of_a_class_without_a_reward_whose_process_always_dies_is_lost(start: Start) -> None:
    """Other rewards of the job would score it like any other rollout."""
    running = start(say, "Chat", retries=2)
    [episode] = running.run(request(0, "a", "die"))
    assert (episode.outcome, episode.transcript) == (Outcome.INFRASTRUCTURE, None)
    assert len(running.engine.requests) == 3
    running.assert_nothing_is_open()


def test_a_process_that_dies_before_the_first_turn_is_lost(start: Start) -> None:
    running = start(say, retries=2)
    [episode] = running.run(request(0, "die"))
    assert (episode.outcome, episode.transcript) == (Outcome.INFRASTRUCTURE, None)
    running.assert_nothing_is_open()


def test_a_reset_that_hangs_is_tried_again(start: Start) -> None:
    running = start(say, timeout_seconds=0.5, retries=1)
    [episode] = running.run(request(0, "hang"))
    assert (episode.outcome, episode.transcript) == (Outcome.INFRASTRUCTURE, None)
    running.assert_nothing_is_open()


def test_a_turn_that_the_engine_cannot_complete_begins_the_rollout_again(start: Start) -> None:
    """With the same seeds and a fresh environment."""
    failures = iter([BROKEN])
    running = start(lambda prompt: next(failures, say(prompt)) if prompt.turn == 1 else say(prompt))
    asked = request(0, "a", "b")
    [episode] = running.run(asked)
    assert episode.outcome is Outcome.COMPLETED
    assert [each.request_id for each in running.engine.requests] == ["0/0", "0/1", "0/0", "0/1"]
    assert running.engine.requests[:2] == running.engine.requests[2:]
    [other] = start(say).run(asked)
    assert (other.transcript, other.reward) == (episode.transcript, episode.reward)
    check_rows(running, asked, episode)


def test_turns_have_different_seeds_and_a_group_has_one_environment(start: Start) -> None:
    running = start(say)
    first, second, other = running.run(
        request(0, "a", "b", "c"), request(1, "a", "b", "c"), request(2, "a", "b", "c", environment_seed=6)
    )
    seeds = {each.request_id: each.seed for each in running.engine.requests}
    assert [seeds[f"{number}/0"] for number in range(3)] == [100, 101, 102]
    assert len(set(seeds.values())) == 9
    assert seeds["1/2"] == turn_seed(101, 2)
    seen = [each.reward.value["seen"] for each in (first, second, other) if isinstance(each.reward.value, Mapping)]
    assert seen[0] == seen[1] != seen[2]


def test_all_turns_have_the_settings_of_the_request(start: Start) -> None:
    running = start(say, max_turn_tokens=50)
    greedy = SamplingSettings(0.0, 1.0, 0, 60, ("stop",))
    running.run(request(0, "a", "b", sampling=greedy))
    assert [each.sampling for each in running.engine.requests] == [
        replace(greedy, max_new_tokens=50),
        replace(greedy, max_new_tokens=50),
    ]


def test_the_row_chooses_the_class(start: Start) -> None:
    running = start(say, "Game", "Calculator")
    game, calculator = running.run(
        request(0, "a", "b", environment="Game"), request(1, environment="Calculator", plan="is not read")
    )
    assert isinstance(game.reward.value, Mapping)
    assert calculator.reward.value == 0
    # The order of the two depends on their processes.
    prompts = {each.request_id: each.prompt_token_ids for each in running.engine.requests}
    has_tools = {name: "Adds two numbers" in running.engine.tokenizer.decode(row) for name, row in prompts.items()}
    assert has_tools == {"0/0": False, "0/1": False, "1/0": True}


@pytest.mark.parametrize("name", ["Chess", None, 7])
def test_a_row_without_a_known_class_fails_the_run(start: Start, name: object) -> None:
    running = start(say, "Game", "Calculator")
    running.host.submit([request(0, environment=name)])
    with pytest.raises(DatasetError, match="the column 'environment' of a row must name one of Game, Calculator"):
        running.host.take(SECONDS)
