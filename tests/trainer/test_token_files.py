"""The files in `tokens/`: their form, their size, and which of them a resumed run keeps."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from rljob_api.v1alpha1.dataset import Evaluation, scores_of
from rljob_testing.training.training_runs import RecordedTokens
from rljob_trainer.batch.proto import DataProto
from rljob_trainer.controller.controller import Controller
from rljob_trainer.controller.evaluations.evaluation import EvaluationResult
from rljob_trainer.controller.rollout import Rollout
from rljob_trainer.controller.run_output import RunOutput
from rljob_trainer.controller.step_rows import StepRows
from rljob_trainer.controller.token_recorder import chosen_ids, recorded_responses
from rljob_trainer.datasets.prompts import PromptRow
from rljob_trainer.observability.metrics import EVAL_SECONDS
from rljob_trainer.observability.samples import SampleKind
from rljob_trainer.observability.timeline import ProcessSpans, newest_timeline_file, write_timeline
from rljob_trainer.observability.timing import RecordingBudget
from rljob_trainer.observability.token_files import (
    EVALUATION_TOKENS,
    MAX_FILE_BYTES,
    TRAINING_TOKENS,
    Conversation,
    TokenValues,
    fair_limit,
    kept_tokens,
    token_file,
    write_token_file,
)
from rljob_trainer.trackers.trackers import Trackers
from rljob_trainer.workers.columns import NUM_ROWS, NUM_TOKENS, SAMPLE_IDS


def conversation(num_prompt_tokens: int, num_tokens: int, text: str = "word ") -> Conversation:
    sampled = [number >= num_prompt_tokens for number in range(num_tokens)]
    values = [-1.23457 if each else None for each in sampled]
    tokens = TokenValues(
        [f"{number}{text}" for number in range(num_tokens)],
        sampled,
        sampled,
        values,
        [None] * num_tokens,
        [2 if each else None for each in sampled],
        values,
    )
    return Conversation(SampleKind.TRAIN, 5, "p" * 2000, 0.5, "COMPLETED", num_prompt_tokens, num_tokens, 0, tokens)


def written(folder: Path, conversations: list[Conversation]) -> RecordedTokens:
    path = token_file(folder, TRAINING_TOKENS)
    write_token_file(path, 12, conversations)
    assert path.stat().st_size <= MAX_FILE_BYTES
    assert [each.name for each in path.parent.iterdir()] == ["training.json"]
    return cast(RecordedTokens, json.loads(path.read_text()))


def test_a_file_has_the_values_of_each_token_and_no_number_that_does_not_exist(tmp_path: Path) -> None:
    found = written(tmp_path, [conversation(1, 3), replace(conversation(0, 1), score=None)])
    first, second = found["conversations"]
    assert (found["version"], found["step"]) == (1, 12)
    assert first == {
        "kind": "train",
        "group": 5,
        "prompt": "p" * 1000,
        "score": 0.5,
        "outcome": "COMPLETED",
        "tokens": {
            "text": ["0word ", "1word ", "2word "],
            "isSampled": [False, True, True],
            "isTrained": [False, True, True],
            "rolloutLogprob": [None, -1.23457, -1.23457],
            "trainerLogprob": [None, None, None],
            "age": [None, 2, 2],
            "advantage": [None, -1.23457, -1.23457],
        },
        "omittedPromptTokens": 0,
        "omittedTokens": 0,
    }
    assert second["score"] is None


@pytest.mark.parametrize("text", ["w", "word ", "\x01\U0001f642"])
def test_long_conversations_are_cut_and_short_ones_are_whole(tmp_path: Path, text: str) -> None:
    """Some characters take many bytes in the file."""
    sizes = [(10, 100), (10, 40_000), (30_000, 40_000)]
    found = written(tmp_path, [conversation(*size, text) for size in sizes])["conversations"]
    # Not much smaller than allowed.
    assert token_file(tmp_path, TRAINING_TOKENS).stat().st_size > 0.8 * MAX_FILE_BYTES
    for (num_prompt, num_tokens), each in zip(sizes, found, strict=True):
        assert len(each["tokens"]["text"]) + each["omittedTokens"] == num_tokens
        first = each["omittedPromptTokens"]
        assert each["tokens"]["text"][0] == f"{first}{text}"
        assert each["tokens"]["isSampled"].index(True) == num_prompt - first
    short, long, long_prompt = found
    assert (short["omittedTokens"], long["omittedPromptTokens"]) == (0, 0)
    assert len(long["tokens"]["text"]) == len(long_prompt["tokens"]["text"])
    # The response has three quarters of the tokens that are left.
    assert sum(long_prompt["tokens"]["isSampled"]) == pytest.approx(0.75 * len(long_prompt["tokens"]["text"]), abs=2)


def test_the_tokens_that_are_kept() -> None:
    assert kept_tokens(10, 100, 100) == (0, 100)
    assert kept_tokens(10, 100, 60) == (0, 60)
    # At most a quarter is the prompt, unless the response is short.
    assert kept_tokens(50, 100, 40) == (40, 80)
    assert kept_tokens(90, 100, 40) == (60, 100)
    assert fair_limit([1.0, 1.0, 2.0], [3, 100, 100], 33.0) == 10


def test_samples_are_whole_groups_up_to_a_limit() -> None:
    def first(sizes: Sequence[int], limit: int) -> list[int]:
        groups_B = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
        return Rollout((), groups_B, DataProto(), DataProto(), {}).first_groups(8, limit).tolist()

    assert first([4, 4, 4], 64) == list(range(8))
    assert first([3, 3, 3, 3], 64) == list(range(9))
    assert first([16, 16], 64) == list(range(16))
    assert first([128, 128], 64) == list(range(64))
    assert first([2, 2], 64) == list(range(4))
    # The responses of a group need not follow each other.
    apart = Rollout((), torch.tensor([5, 2, 5, 2, 7]), DataProto(), DataProto(), {})
    assert apart.first_groups(1, 64).tolist() == [0, 2]


def rows_of_step(sizes: Sequence[int], used: Sequence[int], num_tokens: int = 10) -> StepRows:
    """The rows of a step with groups of these sizes, whose update uses these responses. Each has `num_tokens`."""
    groups_B = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    num_responses = len(groups_B)
    batch = DataProto({SAMPLE_IDS: torch.arange(num_responses), NUM_ROWS: torch.ones(num_responses, dtype=torch.int64)})
    rows = DataProto({NUM_TOKENS: torch.full((num_responses,), num_tokens)})
    prompt = PromptRow(0, "1>", "1>", (1,), "1", {})
    rollout = Rollout((prompt,) * num_responses, groups_B, batch, rows, {})
    is_trained_B = torch.zeros(num_responses, dtype=torch.bool)
    is_trained_B[list(used)] = True
    return cast(
        StepRows,
        SimpleNamespace(
            rollout=rollout, everything=None, drawn_B=torch.arange(num_responses), is_trained_B=is_trained_B
        ),
    )


@pytest.mark.parametrize(
    ("group_size", "num_tokens", "expected"), [(64, 1024, 64), (64, 2048, 32), (64, 8192, 8), (4, 50_000, 8)]
)
def test_a_step_with_long_responses_records_fewer_of_them(group_size: int, num_tokens: int, expected: int) -> None:
    rollout = rows_of_step([group_size] * 4, [], num_tokens).rollout
    assert recorded_responses(rollout).tolist() == list(range(expected))


def test_the_tokens_of_responses_that_the_update_uses_are_recorded() -> None:
    assert chosen_ids(rows_of_step([4, 4, 4], [1, 9])) == list(range(8))
    # Of large groups the first 32 responses are recorded, or 16 and first of all those that are used.
    assert chosen_ids(rows_of_step([64, 64], [3, 50])) == list(range(32))
    assert chosen_ids(rows_of_step([64, 64], [40, 41, 70])) == [*range(16), 40, 41, *range(16, 30)]
    assert chosen_ids(rows_of_step([128, 128], [100])) == [*range(16), 100, *range(16, 31)]
    assert chosen_ids(rows_of_step([64, 4, 4], [66])) == [*range(16), 66, 64, 65, 67]


def test_of_many_short_evaluations_some_and_the_last_one_are_recorded() -> None:
    now, recorded = [0.0], list[int]()

    def record(step: int, name: str, rollouts: object) -> None:
        del name, rollouts
        now[0] += 1.0
        recorded.append(step)

    hybrid = SimpleNamespace(take_metrics=dict)
    controller = SimpleNamespace(
        num_steps=250,
        evaluation_budget=RecordingBudget(lambda: now[0], max_share=0.01),
        evaluations=[
            SimpleNamespace(
                spec=SimpleNamespace(name="heldout"),
                is_due=lambda step, num_steps: step <= num_steps,
                run=lambda _: EvaluationResult("heldout", {}, [], {}),
            )
        ],
        recorder=SimpleNamespace(evaluated=record),
        timer=SimpleNamespace(take=lambda: {EVAL_SECONDS: 1.0}),
        run_parts=SimpleNamespace(workers=SimpleNamespace(hybrid=hybrid)),
        rollout=SimpleNamespace(sampler=SimpleNamespace(take_reward_metrics=lambda _: {})),
        output=SimpleNamespace(evaluated=lambda *_: None, scores=scores_of([Evaluation()])),
        reporter=SimpleNamespace(evaluated=lambda _: None),
        saves=SimpleNamespace(begin_if_best=lambda *_: None),
    )
    for step in range(251):
        now[0] += 1.0
        Controller._evaluate(cast(Controller, controller), step)
    assert recorded == [0, 98, 197, 250]


def test_a_resumed_run_removes_the_files_of_steps_that_it_repeats(tmp_path: Path) -> None:
    for name, step in ((TRAINING_TOKENS, 4), (EVALUATION_TOKENS, 3), ("evaluation-other", 4)):
        write_token_file(token_file(tmp_path, name), step, [])
    write_timeline(newest_timeline_file(tmp_path), 4, [ProcessSpans("controller", [])])
    RunOutput(tmp_path, [], resumed_from_step=3, num_steps=8, num_devices=1, trackers=Trackers()).close()
    left = {path.relative_to(tmp_path).as_posix() for path in tmp_path.glob("t*/*.json")}
    assert left == {"tokens/evaluation.json"}
    token_file(tmp_path, EVALUATION_TOKENS).write_text('{"step": ')
    RunOutput(tmp_path, [], resumed_from_step=3, num_steps=8, num_devices=1, trackers=Trackers()).close()
    assert not token_file(tmp_path, EVALUATION_TOKENS).exists()
