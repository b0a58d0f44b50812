"""Conversations as columns of a batch, and the rewards that are computed from them."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rljob_api.v1alpha1.reward import ErrorPolicy, OverlongPenalty, Reward, RewardType
from rljob_testing.models import chat_models
from rljob_trainer.batch.proto import DataProto
from rljob_trainer.controller.outcomes import conversation_metrics
from rljob_trainer.dispatch.worker import WorkerContext
from rljob_trainer.engines.rollout.base import Outcome, SamplingSettings
from rljob_trainer.environments.episode import Counts, EnvironmentReward, FinishedEpisode
from rljob_trainer.environments.transcript import SampledTurn, TokenRow, Transcript
from rljob_trainer.errors import RewardError
from rljob_trainer.models.tokenizer import Tokenizer
from rljob_trainer.rewards.base import RewardStatus
from rljob_trainer.rewards.function import FunctionScorer
from rljob_trainer.rewards.math_answer import MathAnswerScorer
from rljob_trainer.rewards.reasoning_gym import ReasoningGymScorer
from rljob_trainer.workers.columns import (
    ANSWERS,
    DATASET_ROWS,
    ENVIRONMENT_RESULTS,
    ENVIRONMENT_SEEDS,
    IS_GREEDY,
    IS_LOST,
    IS_TRUNCATED,
    MESSAGES,
    NUM_TOKENS,
    NUM_TURNS,
    OUTCOME_LIST,
    OUTCOMES,
    PLAIN_RESPONSE_TEXTS,
    POLICY_VERSIONS,
    PROMPT_LENGTHS,
    PROMPT_MESSAGES,
    PROMPT_TEXTS,
    RESPONSE_LENGTHS,
    RESPONSE_MASK,
    RESPONSE_TEXTS,
    ROLLOUT_LOGPROBS,
    SAMPLE_IDS,
    SAMPLE_SEEDS,
    TOKENS,
    score_column,
    status_column,
)
from rljob_trainer.workers.conversations import conversation_columns, episode_requests
from rljob_trainer.workers.reward import EnvironmentRewardSettings, RewardSettings, RewardWorker, ScorerSettings
from rljob_trainer.workers.reward_model import conversations

USER, ANSWER, MORE = (
    {"role": role, "content": text} for role, text in [("user", "u"), ("assistant", "a"), ("user", "m")]
)
FIRST = TokenRow((1, 2, 3, 4), 2, (SampledTurn(2, (-0.5,), (7,)),))
SECOND = TokenRow((1, 2, 9, 5, 6), 3, (SampledTurn(3, (-0.25, -1.0), (7, 8)),))


def episode(number: int, *rows: TokenRow, **fields: object) -> FinishedEpisode:
    transcript = Transcript(rows or (FIRST,), (USER, ANSWER), "prompt", "answer", "last", 1)
    return replace(FinishedEpisode(number, Outcome.COMPLETED, transcript), **fields)  # type: ignore[arg-type]


LOST = episode(2, outcome=Outcome.INFRASTRUCTURE, transcript=None)


def rows_of(batch: DataProto, name: str) -> list[list[float]]:
    return [row.tolist() for row in batch.ragged_column(name).row_tensors()]


def test_the_rows_of_a_rollout_follow_each_other_and_have_its_values() -> None:
    counts = Counts(num_tool_calls=3, num_tool_errors=1, environment_seconds=0.5)
    several = episode(0, FIRST, SECOND, outcome=Outcome.MAX_TOKENS, counts=counts)
    batch = conversation_columns([several, LOST, episode(1)], [40, 50, 60])
    assert batch[SAMPLE_IDS].tolist() == [40, 40, 50, 60]
    assert batch[NUM_TOKENS].tolist() == [4, 5, 1, 4]
    # Sampled tokens of all rows, and the prompt of the first row.
    assert batch[RESPONSE_LENGTHS].tolist() == [3, 3, 0, 1]
    assert batch[PROMPT_LENGTHS].tolist() == [2, 2, 1, 2]
    assert rows_of(batch, TOKENS) == [[1, 2, 3, 4], [1, 2, 9, 5, 6], [0], [1, 2, 3, 4]]
    assert rows_of(batch, RESPONSE_MASK) == [[0, 0, 1, 0], [0, 0, 0, 1, 1], [0], [0, 0, 1, 0]]
    assert rows_of(batch, ROLLOUT_LOGPROBS)[1] == [0, 0, 0, -0.25, -1.0]
    assert rows_of(batch, POLICY_VERSIONS)[:2] == [[-1, -1, 7, -1], [-1, -1, -1, 7, 8]]
    assert [OUTCOME_LIST[each] for each in batch[OUTCOMES].tolist()] == [
        *(Outcome.MAX_TOKENS, Outcome.MAX_TOKENS, Outcome.INFRASTRUCTURE, Outcome.COMPLETED)
    ]
    assert batch[IS_TRUNCATED].tolist() == [True, True, False, False]
    assert batch[IS_LOST].tolist() == [False, False, True, False]
    assert batch[NUM_TURNS].tolist() == [1, 1, 0, 1]
    assert batch.object_column(RESPONSE_TEXTS) == ("answer", "answer", "", "answer")
    assert batch.object_column(MESSAGES)[2] == ()


def test_no_rollouts_have_the_same_columns() -> None:
    none, some = conversation_columns([], []), conversation_columns([episode(0)], [1])
    assert none.column_names() == some.column_names()
    assert len(DataProto.concat([none, some])) == 1


@pytest.mark.parametrize(
    ("messages", "num_turns", "prompt"),
    [
        ((USER, ANSWER), 1, (USER,)),
        ((USER, ANSWER, MORE, ANSWER), 2, (USER, ANSWER, MORE)),
        # The time was over before the policy answered.
        ((USER, ANSWER, MORE), 1, (USER,)),
        ((USER,), 0, (USER,)),
        # The prompt has an example of a turn.
        ((USER, ANSWER, MORE), 0, (USER, ANSWER, MORE)),
    ],
)
def test_a_reward_model_reads_the_last_turn_after_the_messages_before_it(
    tmp_path: Path, messages: tuple[dict[str, str], ...], num_turns: int, prompt: tuple[dict[str, str], ...]
) -> None:
    last = "a" if num_turns else ""
    transcript = Transcript((FIRST,), messages, "", "", last, num_turns)
    batch = conversation_columns([episode(0, transcript=transcript), LOST], [0, 1])
    assert batch.object_column(PROMPT_MESSAGES)[0] == prompt
    tokenizer = Tokenizer(chat_models.save(tmp_path, chat_models.TEMPLATES["ChatML"]))
    texts = map(batch.object_column, (PROMPT_TEXTS, PROMPT_MESSAGES, PLAIN_RESPONSE_TEXTS))
    read, of_lost = conversations(tokenizer, *texts, batch[IS_TRUNCATED].tolist())
    assert tokenizer.decode(read, skip_special_tokens=False) == tokenizer.render_conversation(
        [*prompt, {"role": "assistant", "content": last}]  # type: ignore[list-item]
    )
    # Its batches have all rows, and a text without tokens is refused.
    assert of_lost


def test_a_request_has_the_values_of_its_row() -> None:
    sampling = SamplingSettings(1.0, 0.9, 5, 20, ())
    batch = DataProto(
        {
            SAMPLE_SEEDS: torch.tensor([3, 4]),
            ENVIRONMENT_SEEDS: torch.tensor([8, 8]),
            IS_GREEDY: torch.tensor([False, True]),
        },
        {PROMPT_MESSAGES: ((USER,), None), DATASET_ROWS: ({"level": 1}, {})},
    )
    first, second = episode_requests(batch, sampling, iter([5, 6]))
    assert (first.number, first.messages, first.row, first.sampling) == (5, (USER,), {"level": 1}, sampling)
    assert (first.seed, first.environment_seed) == (3, 8)
    assert (second.number, second.messages, second.row) == (6, None, {})
    assert second.sampling == replace(sampling, temperature=0.0, top_p=1.0, top_k=0)


def of_environment(name: str = "environment", *others: str, **fields: object) -> EnvironmentRewardSettings:
    reward = Reward.model_validate({"name": name, "type": RewardType.ENVIRONMENT, **fields})
    return EnvironmentRewardSettings(reward, "spec.training.rewards[0]", frozenset(others))


NAMED = {"win": 1.0, "style": 0.25, "speed": 0.5}


@pytest.mark.parametrize(
    ("settings", "value", "score"),
    [
        (of_environment(), 0.75, 0.75),
        (of_environment("win"), 0.75, 0.75),
        (of_environment("win", "style"), 0.75, None),
        (of_environment(), NAMED, 1.75),
        (of_environment("environment", "win"), NAMED, 0.75),
        (of_environment("win", "environment"), NAMED, 1.0),
        (of_environment("luck"), NAMED, None),
        (of_environment(), {"environment": 1.0, "bonus": 2.0}, 3.0),
        (of_environment("environment", "win"), {"win": 1.0}, None),
    ],
)
def test_a_reward_is_the_number_of_its_name_or_the_sum_of_the_others(
    settings: EnvironmentRewardSettings, value: float | Mapping[str, float], score: float | None
) -> None:
    outcome = settings.outcome(("OK", value, ""))
    assert outcome.score == score
    assert outcome.status is (RewardStatus.ERROR if score is None else RewardStatus.OK)
    if score is None:
        assert f"returned no '{settings.reward.name}' (seen: " in outcome.detail


def scores_of(
    rewards: tuple[EnvironmentRewardSettings, ...], tmp_path: Path, *results: EnvironmentReward
) -> dict[str, list[float]]:
    penalty = Reward(name="brief", type=RewardType.OVERLONG, overlong=OverlongPenalty(buffer_tokens=4))
    worker = RewardWorker(
        WorkerContext(0, 1, 0, 0, "127.0.0.1", 0, "cpu", 1),
        RewardSettings((), (penalty,), 4, tmp_path, {}, of_environment=rewards),
    )
    episodes = [episode(number, FIRST, reward=result) for number, result in enumerate(results)]
    batch = conversation_columns(episodes, range(len(results)))
    of_row: tuple[object, ...] = ({},) * len(batch)
    worker.start_scoring(batch.with_columns(objects={ANSWERS: of_row, DATASET_ROWS: of_row}))
    assert sorted(worker.completed_ids(0.0)) == list(range(len(results)))
    found = worker.finish_scoring(DataProto({SAMPLE_IDS: torch.arange(len(results))}))
    return {name: tensor.tolist() for name, tensor in found.tensors.items()}


def test_rollouts_that_were_lost_count_in_no_mean() -> None:
    episodes = [
        episode(0, counts=Counts(num_tool_calls=3, num_tool_errors=1, environment_seconds=0.5, generation_seconds=2.0)),
        LOST,
        episode(1, transcript=Transcript((FIRST,), (USER, ANSWER), "prompt", "answer", "last", 3, is_rewritten=True)),
    ]
    assert conversation_metrics(conversation_columns(episodes, range(3))) == {
        "environment/turns/mean": 2.0,
        "environment/turns/max": 3.0,
        "environment/turns/min": 1.0,
        "environment/tool_calls_mean": 1.5,
        "environment/tool_error_rate": pytest.approx(1 / 3),
        "environment/rewritten_fraction": 0.5,
        "environment/call_seconds_mean": 0.25,
        "environment/generation_seconds_mean": 1.0,
    }
    assert conversation_metrics(conversation_columns([LOST], [0])) == {}


def test_other_rewards_search_the_last_turn_of_the_policy(tmp_path: Path) -> None:
    """What the environment wrote is no answer, nor is an earlier turn."""
    scorers = [
        FunctionScorer("rljob_trainer.rewards.exact_match:exact_match", "rewards[0]"),
        MathAnswerScorer("rewards[1]"),
        ReasoningGymScorer("basic_arithmetic", {}, "rewards[2]"),
    ]
    settings = RewardSettings(
        tuple(
            ScorerSettings(Reward(name=f"r{number}", type=RewardType.MATH_ANSWER), each.where, each, 1)
            for number, each in enumerate(scorers)
        ),
        (),
        4,
        tmp_path,
        dict(os.environ),
    )
    worker = RewardWorker(WorkerContext(0, 1, 0, 0, "127.0.0.1", 0, "cpu", 1), settings)
    chats = [
        (USER, {"role": "assistant", "content": "7"}, {"role": "user", "content": "#### 7"}, last)
        for last in ({"role": "assistant", "content": "42"}, {"role": "assistant", "content": "7"})
    ]
    texts = ["7<|im_end|>#### 7<|im_end|>42", "7<|im_end|>#### 7<|im_end|>7"]
    episodes = [
        episode(number, transcript=Transcript((FIRST,), chat, "prompt", text, "", 2))
        for number, (chat, text) in enumerate(zip(chats, texts, strict=True))
    ]
    batch = conversation_columns(episodes, range(2))
    with ExitStack() as stack:
        for pool in worker.pools:
            stack.callback(pool.close)
        worker.start_scoring(batch.with_columns(objects={ANSWERS: ("42",) * 2, DATASET_ROWS: ({"answer": "42"},) * 2}))
        found = worker.finish_scoring(DataProto({SAMPLE_IDS: torch.arange(2)}))
    assert [found[score_column(f"r{number}")].tolist() for number in range(3)] == [[1.0, 0.0]] * 3


RAISED = EnvironmentReward(RewardStatus.ERROR, None, "get_reward raised KeyError")
LATE = EnvironmentReward(RewardStatus.TIMEOUT, None, "respond took longer than 60 s")


@pytest.mark.parametrize(
    ("fields", "raised", "late"),
    [
        ({"onError": ErrorPolicy.EXCLUDE}, math.nan, math.nan),
        ({"onError": ErrorPolicy.SCORE, "errorScore": -1.0}, -1.0, math.nan),
        ({"onError": ErrorPolicy.EXCLUDE, "onTimeout": ErrorPolicy.SCORE, "errorScore": -1.0}, math.nan, -1.0),
    ],
)
def test_failures_follow_the_policies_of_the_reward(
    tmp_path: Path, fields: dict[str, object], raised: float, late: float
) -> None:
    settings = of_environment("win", **fields)
    found = scores_of((settings,), tmp_path, EnvironmentReward(value=NAMED), RAISED, LATE)
    assert found[score_column("win")] == pytest.approx([1.0, raised, late], nan_ok=True)
    assert found[status_column("win")] == [
        [*RewardStatus].index(each) for each in (RewardStatus.OK, RewardStatus.ERROR, RewardStatus.TIMEOUT)
    ]
    # Counts sampled tokens.
    assert found[score_column("brief")] == [-0.25] * 3


def test_a_failure_with_the_policy_fail_names_the_reward_and_the_conversation(tmp_path: Path) -> None:
    with pytest.raises(RewardError, match="get_reward raised KeyError") as raised:
        scores_of((of_environment("win", onError=ErrorPolicy.FAIL),), tmp_path, RAISED)
    for part in ("spec.training.rewards[0] (reward win): the environment", "prompt: 'prompt'", "onError: Exclude"):
        assert part in str(raised.value)


def test_an_error_of_an_environment_without_a_reward_fails_the_run(tmp_path: Path) -> None:
    with pytest.raises(RewardError, match=r"spec\.training\.environment: the environment get_reward raised"):
        scores_of((), tmp_path, RAISED)


def test_results_that_were_saved_as_json_are_read() -> None:
    """Finished groups of an earlier attempt have lists instead of tuples."""
    batch = conversation_columns([episode(0, reward=EnvironmentReward(value=NAMED))], [0])
    [result] = batch.object_column(ENVIRONMENT_RESULTS)
    assert isinstance(result, tuple)
    assert of_environment("win").outcome(list(result)).score == 1.0
