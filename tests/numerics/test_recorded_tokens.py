"""The tokens of a step in `tokens/training.json`, compared with the step's metrics and with plain torch.

The steps have 8 responses, all of which are recorded.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import cast

import pytest
import torch

from rljob_api.v1alpha1.algorithm import Algorithm
from rljob_api.v1alpha1.optimizer import Optimizer
from rljob_api.v1alpha1.rollout_correction import OldLogprobs, RejectionLevel, RolloutCorrection, RolloutRejection
from rljob_testing.messages import Mentions
from rljob_testing.training import cut_rollouts, plain_grpo, replays, stub_step, training_runs
from rljob_trainer.batch.proto import DataProto
from rljob_trainer.controller.rollout import Rollout
from rljob_trainer.controller.step_rows import filtered_rows
from rljob_trainer.controller.token_recorder import TokenRecorder
from rljob_trainer.dispatch.worker import WorkerContext
from rljob_trainer.models.tokenizer import Tokenizer
from rljob_trainer.observability.metrics import LOGPROB_DIFF_MAX, LOGPROB_DIFF_MEAN, REJECTED_FRACTION
from rljob_trainer.observability.token_files import write_token_file
from rljob_trainer.workers import recorded_tokens
from rljob_trainer.workers.columns import NUM_ROWS, NUM_TOKENS, SCORES, score_column
from rljob_trainer.workers.protocols import HybridGroup
from rljob_trainer.workers.recorded_tokens import conversations_of

NUM_RESPONSES = 8
REJECTION = RolloutRejection(level=RejectionLevel.TOKEN, max=20.0, min=0.01)


@dataclass
class Recorded:
    """A step with its metrics and the file of its tokens."""

    run: replays.ReplayedRun
    metrics: dict[str, float]
    rollout: Rollout
    conversations: list[training_runs.RecordedConversation]

    @property
    def tokens(self) -> list[training_runs.TokenLists]:
        """Of each conversation."""
        return [each["tokens"] for each in self.conversations]

    def differences(self) -> list[float]:
        """The absolute differences between the log-probabilities of trainer and rollout engine."""
        pairs = chain.from_iterable(
            zip(each["trainerLogprob"], each["rolloutLogprob"], strict=True) for each in self.tokens
        )
        return [abs(ours - theirs) for ours, theirs in pairs if ours is not None and theirs is not None]


class Writer:
    """The only method of a HybridGroup that a recorder needs."""

    def record_tokens(self, path: Path, step: int, version: int, rows: DataProto, updated: DataProto) -> str | None:
        write_token_file(path, step, conversations_of(rows, updated, version, Tokenizer(replays.MODEL)))
        return None


class OnlyLastGroup(replays.ReplayedRollouts):
    """Only the responses of the last group have different scores."""

    def scored(self, rollout: Rollout) -> Rollout:
        """See ReplayedRollouts."""
        found = super().scored(rollout)
        scores_B = torch.arange(len(found.prompts)) == len(found.prompts) - 1
        columns = {SCORES: scores_B.double(), score_column("score"): scores_B.double()}
        return replace(found, batch=found.batch.with_columns(columns))


def recorded(
    folder: Path,
    context: WorkerContext,
    replay: replays.Replay,
    rollouts: replays.ReplayedRollouts | None = None,
    step: int = 0,
    num_prompts: int = 2,
) -> Recorded:
    mini_batch_size = min(num_prompts, replay.mini_batch_size)
    replay = replace(replay, batch_size=num_prompts, mini_batch_size=mini_batch_size)
    run = replays.replayed_run(replay, context, rollout=rollouts)
    run.training_step.recorder = TokenRecorder(folder, run.group, cast(HybridGroup, Writer()))
    run.training_step.recorder.begin_step(is_recorded=True)
    prompts = stub_step.drawn(replays.prompts_of(step, replay.batch_size))
    rollout, metrics = run.training_step.run(prompts, step)
    run.training_step.recorder.step_done(step + 1, rollout)
    document = json.loads((folder / "tokens" / "training.json").read_text())
    assert (document["version"], document["step"]) == (1, step + 1)
    return Recorded(run, metrics, rollout, document["conversations"])


@pytest.mark.parametrize(
    "replay",
    [
        replays.Replay(),
        replays.Replay(mini_batch_size=1),
        replays.Replay(max_tokens_per_micro_batch=24),
        replays.Replay(Algorithm(rollout_correction=RolloutCorrection(rejection=REJECTION))),
        replays.Replay(
            Algorithm(rollout_correction=RolloutCorrection(old_logprobs=OldLogprobs.ROLLOUT)), mini_batch_size=1
        ),
    ],
    ids=["one update", "two updates", "small micro-batches", "rejected tokens", "first of two updates"],
)
def test_the_logprob_differences_are_those_of_the_metrics(
    tmp_path: Path, context: WorkerContext, replay: replays.Replay
) -> None:
    found = recorded(tmp_path, context, replay)
    assert len(found.conversations) == NUM_RESPONSES
    differences = found.differences()
    assert sum(differences) / len(differences) == pytest.approx(found.metrics[LOGPROB_DIFF_MEAN], rel=1e-4)
    assert max(differences) == pytest.approx(found.metrics[LOGPROB_DIFF_MAX], rel=1e-4)
    # Of the tokens that the rollout engine has sampled, only rejected ones are not trained on.
    num_sampled = sum(sum(each["isSampled"]) for each in found.tokens)
    num_trained = sum(sum(each["isTrained"]) for each in found.tokens)
    assert 1 - num_trained / num_sampled == pytest.approx(found.metrics.get(REJECTED_FRACTION, 0.0))
    is_from_first_update = replay.resolved.rollout_correction.old_logprobs is OldLogprobs.ROLLOUT
    assert (len(differences) < num_sampled) is is_from_first_update


def test_each_token_has_its_advantage_age_and_text(tmp_path: Path, context: WorkerContext) -> None:
    replay = replays.Replay(batch_size=2)
    found = recorded(tmp_path, context, replay, step=3)
    rows = plain_grpo.rows_of_step(replay, 3)
    advantages = plain_grpo.group_advantages(rows, replay.group_size)
    tokenizer = Tokenizer(replays.MODEL)
    assert [each["group"] for each in found.conversations] == [0] * 4 + [1] * 4
    assert [each["score"] for each in found.conversations] == [1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0]
    for conversation, row, advantage in zip(found.conversations, rows, advantages, strict=True):
        tokens = conversation["tokens"]
        num_prompt, num_response = len(row.tokens_T) - len(row.rollout_logprobs_N), len(row.rollout_logprobs_N)
        assert tokens["isSampled"] == tokens["isTrained"] == [False] * num_prompt + [True] * num_response
        assert tokens["advantage"] == [None] * num_prompt + [pytest.approx(float(advantage), abs=1e-5)] * num_response
        # All responses are as if generated with the weights of step 0.
        assert tokens["age"] == [None] * num_prompt + [3] * num_response
        expected = [None] * num_prompt + [pytest.approx(each, abs=1e-5) for each in row.rollout_logprobs_N.tolist()]
        assert tokens["rolloutLogprob"] == expected
        whole = tokenizer.decode(row.tokens_T.tolist(), skip_special_tokens=False)
        assert "".join(map(str, tokens["text"])) == whole


@pytest.mark.parametrize("replay", [replays.Replay(top_p=0.9), replays.Replay(top_k=5)])
def test_logprobs_that_cannot_be_compared_are_left_out(
    tmp_path: Path, context: WorkerContext, replay: replays.Replay
) -> None:
    found = recorded(tmp_path, context, replay)
    assert LOGPROB_DIFF_MEAN not in found.metrics
    assert all(set(each["trainerLogprob"]) == {None} for each in found.tokens)
    assert all(any(each["isTrained"]) for each in found.tokens)


def test_of_a_response_with_several_rows_the_longest_is_recorded(tmp_path: Path, context: WorkerContext) -> None:
    found = recorded(tmp_path, context, replays.Replay(), cut_rollouts.CutTurns())
    assert set(found.rollout.batch[NUM_ROWS].tolist()) == {1, 2, 3}
    rows = torch.split_with_sizes(found.rollout.rows[NUM_TOKENS], found.rollout.batch[NUM_ROWS].tolist())
    assert [len(each["text"]) for each in found.tokens] == [int(lengths.max()) for lengths in rows]
    for each in found.tokens:
        assert each["isTrained"] == each["isSampled"] == [logprob is not None for logprob in each["trainerLogprob"]]


def test_responses_that_policy_filtration_has_not_drawn_are_not_trained(tmp_path: Path, context: WorkerContext) -> None:
    replay = replays.Replay(Algorithm.from_wire({"policyFiltration": {"type": "MaxRandom"}}), batch_size=2)
    found = recorded(tmp_path, context, replay)
    scores_B, groups_B = found.rollout.batch[SCORES], found.rollout.groups_B
    how, everything_B = replay.resolved.policy_filtration, torch.ones(NUM_RESPONSES, dtype=torch.bool)
    drawn = set(filtered_rows(how, scores_B, groups_B, everything_B, replays.SEED, 0).tolist())
    assert 0 < len(drawn) < NUM_RESPONSES
    assert {number for number, each in enumerate(found.tokens) if any(each["isTrained"])} == drawn
    assert {number for number, each in enumerate(found.tokens) if set(each["trainerLogprob"]) != {None}} == drawn


def test_if_the_first_groups_are_not_trained_on_others_are_recorded_too(tmp_path: Path, context: WorkerContext) -> None:
    """The first two groups have 8 responses, which are enough for the samples. Only the last group has different
    scores."""
    replay = replays.Replay(Algorithm(drop_zero_variance_groups=True))
    found = recorded(tmp_path, context, replay, OnlyLastGroup(), num_prompts=4)
    assert [each["group"] for each in found.conversations] == [0] * 4 + [1] * 4 + [3] * 4
    trained = [any(each["isTrained"]) for each in found.tokens]
    assert trained == [False] * 8 + [True] * 4


@pytest.mark.parametrize("is_in_update", [False, True])
def test_an_error_is_logged_once_and_does_not_fail_the_step(
    tmp_path: Path,
    context: WorkerContext,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    is_in_update: bool,
) -> None:
    """In the update, or when the file is written."""
    if is_in_update:
        monkeypatch.setattr(recorded_tokens, "per_token", None)
    else:
        (tmp_path / "tokens").write_text("not a folder")
    replay = replays.Replay(batch_size=2, mini_batch_size=2)
    run = replays.replayed_run(replay, context)
    recorder = run.training_step.recorder = TokenRecorder(tmp_path, run.group, cast(HybridGroup, Writer()))
    for step in range(2):
        recorder.begin_step(is_recorded=True)
        rollout, _ = run.training_step.run(stub_step.drawn(replays.prompts_of(step, 2)), step)
        recorder.step_done(step + 1, rollout)
    [warning] = [each.message for each in caplog.records if each.name.endswith("token_recorder")]
    assert Mentions("tokens", "the training continues") == warning


def test_recording_changes_no_bit_of_the_training(tmp_path: Path, context: WorkerContext) -> None:
    optimizer = Optimizer(learning_rate=1e-3)
    replay = replays.Replay(optimizer=optimizer, batch_size=2, mini_batch_size=2)
    plain = replays.replayed_run(replay, context)
    metrics = plain.step(0)
    found = recorded(tmp_path, context, replay)
    assert {name: value for name, value in metrics.items() if not math.isnan(value)} == {
        name: value for name, value in found.metrics.items() if not math.isnan(value)
    }
    ours, theirs = found.run.state(), plain.state()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(each, theirs[name]) for name, each in ours.items())
