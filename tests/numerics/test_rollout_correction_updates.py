"""Rollout correction in an update, compared with plain torch, and its metrics.

Legend: B rows, T columns of a table, N tokens that are not masked, R response tokens of a row.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rljob_api.v1alpha1.algorithm import Algorithm
from rljob_api.v1alpha1.kl import Kl, KlPlacement
from rljob_api.v1alpha1.model import Lora
from rljob_api.v1alpha1.optimizer import Optimizer
from rljob_api.v1alpha1.rollout_correction import (
    OldLogprobs,
    RejectionLevel,
    RolloutCorrection,
    RolloutCorrectionType,
    RolloutRejection,
)
from rljob_testing import compare
from rljob_testing.golden import correction_cases
from rljob_testing.training import plain_grpo, recorders, replays
from rljob_testing.training.joined_workers import FinishedCall, JoinedActor
from rljob_testing.training.whole_rollouts import whole_rollout
from rljob_trainer.batch.proto import DataProto
from rljob_trainer.batch.ragged import RaggedColumn
from rljob_trainer.controller.prompt_batches import prompt_batch
from rljob_trainer.dispatch.worker import WorkerContext
from rljob_trainer.engines.rollout.base import SamplingSettings
from rljob_trainer.engines.rollout.hf_engine import HfEngine, HfSettings
from rljob_trainer.engines.train.token_model import NAME_PREFIX
from rljob_trainer.observability.metrics import (
    CORRECTION_BOUNDED,
    CORRECTION_MEAN,
    CORRECTION_SAMPLE_SIZE,
    GRADIENT_NORM,
    KL_LOSS,
    LOGPROB_DIFF_MAX,
    LOGPROB_DIFF_MEAN,
    LOGPROB_DIFF_SHARE,
    REJECTED_FRACTION,
    ROLLOUT_K3_KL,
    ROLLOUT_KL,
    STALENESS_MAX,
    STALENESS_MEAN,
    Metrics,
)
from rljob_trainer.workers.columns import (
    IS_TRAINED,
    KL_SUMS,
    OLD_LOGPROBS,
    POLICY_VERSIONS,
    REF_LOGPROBS,
    RESPONSE_MASK,
    ROLLOUT_LOGPROBS,
    SAMPLE_SEEDS,
)
from rljob_trainer.workers.hybrid import HybridWorker
from rljob_trainer.workers.rollout import RolloutWorker
from rljob_trainer.workers.rollout_mismatch import add_agreement, agreement_metrics, without_rejected
from rljob_trainer.workers.update_sums import UpdateSums

OPTIMIZER = Optimizer(learning_rate=1e-3, weight_decay=0.1, max_gradient_norm=0.5, epsilon=1e-6)
ALGORITHM = Algorithm(
    rollout_correction=RolloutCorrection(
        type=RolloutCorrectionType.TOKEN_TRUNCATED,
        max_ratio=2.0,
        rejection=RolloutRejection(level=RejectionLevel.TOKEN, max=20.0, min=0.01),
    )
)


def plain_gradient(
    replay: replays.Replay, rows: list[plain_grpo.Row], *, is_rejecting: bool
) -> tuple[dict[str, Tensor], Tensor]:
    """The gradient of the first update, clipped by its norm as the actor's is, and the log ratios of all tokens."""
    model, advantages = plain_grpo.initial_policy(), plain_grpo.group_advantages(rows, replay.group_size)
    old = [row.logprobs_N(model, 1.0) for row in rows]
    ratios = [(each.detach() - row.rollout_logprobs_N) for each, row in zip(old, rows, strict=True)]
    kept = [
        (each.exp() >= 0.01) & (each.exp() <= 20.0) if is_rejecting else torch.ones_like(each).bool() for each in ratios
    ]
    num_tokens = sum(int(each.sum()) for each in kept)
    for new_N, advantage, ratio_N, kept_N in zip(old, advantages, ratios, kept, strict=True):
        losses_N = plain_grpo.clipped_losses(new_N, new_N.detach(), advantage) * ratio_N.exp().clamp(max=2.0)
        torch.autograd.backward(losses_N[kept_N].sum() / num_tokens, retain_graph=True)
    gradient = {NAME_PREFIX + name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return gradient, torch.cat(ratios)


@pytest.mark.parametrize("is_rejecting", [False, True])
def test_losses_are_weighted_and_rejected_tokens_do_not_count(context: WorkerContext, is_rejecting: bool) -> None:
    """With rejection the old log-probabilities come from a pass of their own, otherwise from the update's."""
    algorithm = ALGORITHM
    if not is_rejecting:
        algorithm = Algorithm(rollout_correction=RolloutCorrection(type=RolloutCorrectionType.TOKEN_TRUNCATED))
    replay = replays.Replay(algorithm, OPTIMIZER, num_steps=1)
    rows = plain_grpo.rows_of_step(replay, 0)
    _, found = plain_grpo.first_update(replay, context)
    expected_gradients, log_ratios_N = plain_gradient(replay, rows, is_rejecting=is_rejecting)
    assert compare.relative_difference(found, expected_gradients) < compare.RELATIVE
    _, uncorrected = plain_grpo.first_update(replace(replay, algorithm=Algorithm()), context)
    assert compare.relative_difference(found, uncorrected) > 0.1
    metrics = replays.replayed_run(replay, context).step(0)
    ratios_N = log_ratios_N.exp()
    is_kept_N = (ratios_N >= 0.01) & (ratios_N <= 20.0) if is_rejecting else ratios_N >= 0
    weights_N = ratios_N[is_kept_N].clamp(max=2.0)
    expected = {
        # Rejected tokens are compared, too.
        LOGPROB_DIFF_MEAN: log_ratios_N.abs().mean(),
        LOGPROB_DIFF_MAX: log_ratios_N.abs().max(),
        LOGPROB_DIFF_SHARE: (log_ratios_N.abs() > 0.1).float().mean(),
        ROLLOUT_KL: -log_ratios_N.mean(),
        ROLLOUT_K3_KL: (ratios_N - 1 - log_ratios_N).mean(),
        CORRECTION_MEAN: weights_N.mean(),
        CORRECTION_SAMPLE_SIZE: weights_N.mean() ** 2 / weights_N.square().mean(),
        CORRECTION_BOUNDED: (weights_N == 2.0).float().mean(),
        STALENESS_MEAN: torch.tensor(0.0),
    }
    if is_rejecting:
        expected[REJECTED_FRACTION] = 1 - is_kept_N.float().mean()
        assert 0.05 < metrics[REJECTED_FRACTION] < 0.95
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(float(value), rel=1e-4), name


LARGEST_KL = 10.0
"""A token's KL counts for no more."""
FROM_ROLLOUT = Algorithm(rollout_correction=RolloutCorrection(old_logprobs=OldLogprobs.ROLLOUT))


@pytest.mark.parametrize("mini_batch_size", [4, 2])
def test_old_logprobs_of_the_rollout_engine_are_those_of_the_ratio(
    context: WorkerContext, mini_batch_size: int
) -> None:
    replay = replays.Replay(FROM_ROLLOUT, OPTIMIZER, num_steps=1, mini_batch_size=mini_batch_size)
    _, found = plain_grpo.first_update(replay, context)
    rows, model = plain_grpo.rows_of_step(replay, 0), plain_grpo.initial_policy()
    advantages = plain_grpo.group_advantages(rows, replay.group_size)
    first = rows[: mini_batch_size * replay.group_size]
    num_tokens, log_ratios = sum(len(row.rollout_logprobs_N) for row in first), []
    for row, advantage in zip(first, advantages, strict=False):
        new_N = row.logprobs_N(model, 1.0)
        losses_N = plain_grpo.clipped_losses(new_N, row.rollout_logprobs_N, advantage)
        torch.autograd.backward(losses_N.sum() / num_tokens)
        log_ratios.append(new_N.detach() - row.rollout_logprobs_N)
    expected = {NAME_PREFIX + name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    assert compare.relative_difference(found, expected) < compare.RELATIVE
    run = replays.replayed_run(replay, context)
    with recorders.recorded_passes(run.actor.engine) as passes:
        metrics = run.step(0)
    assert sum(each.num_rows for each in passes) == len(rows)
    # Of the first update's tokens, because later updates compute with other weights.
    log_ratios_N = torch.cat(log_ratios)
    assert metrics[LOGPROB_DIFF_MEAN] == pytest.approx(float(log_ratios_N.abs().mean()), rel=1e-4)
    assert metrics[LOGPROB_DIFF_MAX] == pytest.approx(float(log_ratios_N.abs().max()), rel=1e-4)


def test_the_first_update_with_tokens_computes_the_agreement(
    context: WorkerContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    replay = replays.Replay(FROM_ROLLOUT, OPTIMIZER, num_steps=1, mini_batch_size=2)
    num_excluded = 2 * replay.group_size

    def without_first(
        group: JoinedActor, batch: DataProto, step: int, kl_coefficient: float | None = None
    ) -> FinishedCall[Metrics]:
        is_trained_B = batch[IS_TRAINED].clone()
        is_trained_B[:num_excluded] = False
        rest = batch.without([IS_TRAINED]).with_columns({IS_TRAINED: is_trained_B})
        return FinishedCall(group.worker.update_policy(rest, step, kl_coefficient))

    monkeypatch.setattr(JoinedActor, "update_policy", without_first)
    metrics = replays.replayed_run(replay, context).step(0)
    rows, model = plain_grpo.rows_of_step(replay, 0)[num_excluded:], plain_grpo.initial_policy()
    with torch.no_grad():
        differences_N = torch.cat([(row.logprobs_N(model, 1.0) - row.rollout_logprobs_N).abs() for row in rows])
    assert metrics[LOGPROB_DIFF_MEAN] == pytest.approx(float(differences_N.mean()), rel=1e-4)


@pytest.mark.parametrize("old_logprobs", OldLogprobs)
def test_a_step_without_trained_tokens_measures_no_mismatch(
    context: WorkerContext, old_logprobs: OldLogprobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A value of 0 would mean perfect agreement."""
    update = JoinedActor.update_policy

    def of_nothing(
        group: JoinedActor, batch: DataProto, step: int, kl_coefficient: float | None = None
    ) -> FinishedCall[Metrics]:
        none_B = torch.zeros_like(batch[IS_TRAINED])
        return update(group, batch.without([IS_TRAINED]).with_columns({IS_TRAINED: none_B}), step, kl_coefficient)

    monkeypatch.setattr(JoinedActor, "update_policy", of_nothing)
    algorithm = Algorithm(rollout_correction=RolloutCorrection(old_logprobs=old_logprobs))
    metrics = replays.replayed_run(replays.Replay(algorithm, OPTIMIZER, num_steps=1), context).step(0)
    assert metrics[GRADIENT_NORM] == 0
    assert not [name for name in metrics if name.startswith(("rollout/logprob", "rollout/staleness", "rollout_corr/"))]


@pytest.mark.parametrize("old_logprobs", OldLogprobs)
def test_dropout_does_not_count_as_a_mismatch(context: WorkerContext, old_logprobs: OldLogprobs) -> None:
    algorithm = Algorithm(rollout_correction=RolloutCorrection(old_logprobs=old_logprobs))
    replay = replays.Replay(algorithm, OPTIMIZER, num_steps=1, lora=Lora(rank=2, dropout=0.5))
    metrics = replays.replayed_run(replay, context).step(0)
    # Without a pass before the updates, log-probabilities without dropout are never computed.
    assert (LOGPROB_DIFF_MEAN in metrics) is (old_logprobs is OldLogprobs.TRAINER)


def test_the_kl_in_the_reward_is_that_of_the_rollout_engines_logprobs(context: WorkerContext) -> None:
    """The reference is the initial policy, so with the trainer's log-probabilities this KL would be 0."""
    algorithm = FROM_ROLLOUT.model_copy(update={"kl": Kl(coefficient=0.1, placement=KlPlacement.REWARD)})
    replay = replays.Replay(algorithm, OPTIMIZER, num_steps=1)
    rows, model = plain_grpo.rows_of_step(replay, 0), plain_grpo.initial_policy()
    with torch.no_grad():
        log_ratios_N = torch.cat([row.logprobs_N(model, 1.0) - row.rollout_logprobs_N for row in rows])
    expected = (log_ratios_N.exp() - log_ratios_N - 1).clamp(max=LARGEST_KL).mean()
    metrics = replays.replayed_run(replay, context).step(0)
    assert metrics[KL_LOSS] == pytest.approx(float(expected), rel=1e-4)


def test_kl_sums_are_those_of_the_old_logprobs_of_trained_rows(context: WorkerContext) -> None:
    run = replays.replayed_run(replays.Replay(), context)
    seeds = torch.tensor([replays.SEED])
    batch = replays.ReplayedRollouts().run(replays.prompts_of(0, 1), 2, run.replay.plan(1).sampling, seeds).rows
    rollout = batch.ragged_column(ROLLOUT_LOGPROBS)
    reference = RaggedColumn(torch.full_like(rollout.values, -2.0), rollout.lengths)
    columns = {OLD_LOGPROBS: rollout, REF_LOGPROBS: reference, RESPONSE_MASK: batch.ragged_column(RESPONSE_MASK)}
    inputs = DataProto({IS_TRAINED: torch.tensor([True, False])}, ragged=columns)
    log_ratios_N = (-2.0 - rollout.row_tensors()[0])[columns[RESPONSE_MASK].row_tensors()[0]]
    expected = (log_ratios_N.exp() - log_ratios_N - 1).clamp(max=LARGEST_KL).sum()
    # The second row got no pass by the reference.
    assert run.actor.compute_kl_sums(inputs)[KL_SUMS].tolist() == pytest.approx([float(expected), 0.0], rel=1e-5)


def test_one_token_does_not_make_the_divergence_infinite(context: WorkerContext) -> None:
    engine = replays.replayed_run(replays.Replay(), context).actor.engine
    agreement = UpdateSums()
    add_agreement(agreement, torch.tensor([0.0, 200.0]))
    found = agreement_metrics(agreement, engine)
    assert found[ROLLOUT_K3_KL] == pytest.approx((math.exp(20) - 21) / 2)
    assert found[LOGPROB_DIFF_MAX] == 200.0


def test_untrained_responses_are_not_rejected(context: WorkerContext) -> None:
    run = replays.replayed_run(replays.Replay(), context)
    batch = (
        replays.ReplayedRollouts()
        .run(replays.prompts_of(0, 2), 2, run.replay.plan(1).sampling, torch.tensor([replays.SEED]))
        .rows
    )
    batch = batch.with_columns({IS_TRAINED: torch.zeros(4, dtype=torch.bool)})
    batch = batch.union(run.actor.compute_logprobs(batch))
    _, metrics = without_rejected(
        batch, correction_cases.REJECTIONS[next(iter(correction_cases.REJECTIONS))], run.actor.engine
    )
    # A share of no tokens does not exist.
    assert metrics == {}


def test_one_weight_sync_serves_several_steps(context: WorkerContext) -> None:
    replay = replays.Replay(optimizer=OPTIMIZER, num_steps=8)
    run = replays.replayed_run(replay, context)
    engine = HfEngine(HfSettings(replays.MODEL, torch.device("cpu"), torch.float32, 16))
    rollout_worker = RolloutWorker(context, lambda: engine, 1)
    hybrid = HybridWorker(context, run.actor, rollout_worker, torch.float32, replays.SEED, others=())
    sampling = SamplingSettings(1.0, 1.0, 0, 4, ())
    request = prompt_batch(replays.prompts_of(0, 2)).with_columns({SAMPLE_SEEDS: torch.arange(2) + replays.SEED})

    def generated(*, syncs: bool) -> tuple[int, Tensor]:
        """The version that the engine reports for the sampled tokens, and their log-probabilities."""
        rollout = whole_rollout(hybrid, request, sampling, syncs=syncs)
        mask_L = rollout.ragged_column(RESPONSE_MASK).values
        versions = rollout.ragged_column(POLICY_VERSIONS).values[mask_L]
        assert len(set(versions.tolist())) == 1
        return int(versions[0]), rollout.ragged_column(ROLLOUT_LOGPROBS).values[mask_L]

    # An engine without weights accepts them.
    found, ages = [generated(syncs=False)], []
    for step in range(4):
        # The replayed responses were generated with the weights of step 0.
        ages.append(run.step(step)[STALENESS_MAX])
        found.append(generated(syncs=step == 2))
    assert [version for version, _ in found] == [0, 0, 0, 3, 3]
    assert ages == [0, 1, 2, 3]
    for one, other in ((0, 1), (1, 2), (3, 4)):
        assert torch.equal(found[one][1], found[other][1])
    assert not torch.equal(found[2][1], found[3][1])
    # Another start of the actor, even at the same step.
    run.actor.engine.weight_version = run.actor.engine.weight_version.after_load()
    assert generated(syncs=False)[0] == 4
