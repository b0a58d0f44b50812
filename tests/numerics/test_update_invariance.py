"""The actor's update depends neither on the number of workers nor on the micro-batches.

A rollout is replayed on one worker, on one with tiny micro-batches, and on two; the gradients, the metrics and the
weights after the update are compared. The two workers have different amounts of tokens, so a mean of means would show.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from pathlib import Path

import pytest
import torch

from rljob_api.v1alpha1.algorithm import Algorithm, Kl, KlPlacement, LossAggregation
from rljob_api.v1alpha1.optimizer import Optimizer
from rljob_api.v1alpha1.recipes import resolve_algorithm
from rljob_testing.ranks import RankedRun, run_on_ranks
from rljob_trainer.batch.proto import DataProto
from rljob_trainer.batch.ragged import RaggedColumn
from rljob_trainer.dispatch.worker import WorkerContext
from rljob_trainer.engines.train.engine import TrainEngineSettings
from rljob_trainer.weights.buckets import whole_tensors
from rljob_trainer.workers.actor import ActorSettings, ActorWorker
from rljob_trainer.workers.columns import (
    ADVANTAGES,
    IS_LEARNED,
    OLD_LOGPROBS,
    REF_LOGPROBS,
    RESPONSE_MASK,
    ROLLOUT_LOGPROBS,
    TOKENS,
)

NUM_ROWS, WIDTH = 8, 14


@dataclass(frozen=True)
class Result:
    """What one rank reports of one update."""

    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]
    metrics: dict[str, float]


def replayed_rollout() -> DataProto:
    """Rows of growing length, so that the second half has far more tokens than the first."""
    generator = torch.Generator().manual_seed(0)
    tokens_BT = torch.randint(3, 13, (NUM_ROWS, WIDTH), generator=generator)
    positions_T = torch.arange(WIDTH)
    ends_B = torch.tensor([5, 5, 6, 6, 9, 12, 13, 14])
    mask_BT = (positions_T >= 4) & (positions_T < ends_B[:, None])
    noise_BT = torch.rand((NUM_ROWS, WIDTH), generator=generator)
    advantages_B = torch.tensor([1.0, -1.0, 0.5, -0.5, 2.0, -2.0, 0.3, -0.3])
    columns_BT = {
        TOKENS: tokens_BT,
        RESPONSE_MASK: mask_BT,
        ROLLOUT_LOGPROBS: -noise_BT * mask_BT,
        OLD_LOGPROBS: (-2.5 - noise_BT) * mask_BT,
        REF_LOGPROBS: (-2.0 - noise_BT) * mask_BT,
    }
    return DataProto(
        {ADVANTAGES: advantages_B, IS_LEARNED: torch.ones(NUM_ROWS, dtype=torch.bool)},
        ragged={name: RaggedColumn.unpadded(column, ends_B) for name, column in columns_BT.items()},
    )


def update(aggregation: LossAggregation, max_tokens: int, context: WorkerContext) -> Result:
    optimizer = Optimizer(learning_rate=1e-3, max_gradient_norm=1e6)
    engine = TrainEngineSettings(
        model_folder=Path(str(files("rljob_trainer"))) / "assets/sort_digits/model",
        device=torch.device("cpu"),
        compute_dtype=torch.float32,
        gradient_checkpointing=False,
        max_tokens_per_micro_batch=max_tokens,
        optimizer=optimizer,
    )
    algorithm = Algorithm(
        aggregation=aggregation, entropy_coefficient=0.01, kl=Kl(coefficient=0.1, placement=KlPlacement.LOSS)
    )
    settings = ActorSettings(
        engine=engine,
        algorithm=resolve_algorithm(algorithm),
        optimizer=optimizer,
        temperature=1.0,
        max_new_tokens=10,
        group_size=2,
        samples_all_tokens=True,
        num_steps=10,
        num_epochs_per_batch=1,
        mini_batch_rows=NUM_ROWS // context.world_size,
    )
    actor = ActorWorker(context, settings)
    gradients: dict[str, torch.Tensor] = {}
    apply_update = actor.engine.optimizer_step

    def keep_gradients(rate: float) -> float:
        shards = ((name, parameter.grad) for name, parameter in actor.engine.model.named_parameters())
        named = [(name, gradient) for name, gradient in shards if gradient is not None]
        gradients.update({name: tensor.clone() for name, tensor in whole_tensors(named, torch.float32)})
        return apply_update(rate)

    actor.engine.optimizer_step = keep_gradients  # type: ignore[method-assign]
    share = replayed_rollout().chunk(context.world_size)[context.rank]
    metrics = dict(actor.update_policy(share, 0))
    weights = {name: tensor.clone() for name, tensor in whole_tensors(actor.engine.named_shards(), torch.float32)}
    return Result(gradients, weights, metrics)


def largest_difference(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    assert first.keys() == second.keys()
    assert first, "nothing to compare"
    return max(float((first[name] - second[name]).abs().max()) for name in first)


@pytest.fixture(scope="module")
def results() -> dict[tuple[LossAggregation, str], list[Result]]:
    runs = {
        (aggregation, name): RankedRun(partial(update, aggregation, max_tokens), num_ranks)
        for aggregation in LossAggregation
        for name, max_tokens, num_ranks in (("one", 4096, 1), ("micro", 14, 1), ("two", 30, 2))
    }
    outcomes = run_on_ranks(list(runs.values()))
    return {key: [_result(value) for value in ranks] for key, ranks in zip(runs, outcomes, strict=True)}


def _result(value: object) -> Result:
    assert isinstance(value, Result)
    return value


@pytest.mark.parametrize("aggregation", list(LossAggregation))
@pytest.mark.parametrize("other", ["micro", "two"])
def test_gradients_weights_and_metrics_are_those_of_one_worker(
    results: dict[tuple[LossAggregation, str], list[Result]], aggregation: LossAggregation, other: str
) -> None:
    one = results[aggregation, "one"][0]
    scale = max(float(gradient.abs().max()) for gradient in one.gradients.values())
    assert scale > 1e-3
    for result in results[aggregation, other]:
        assert largest_difference(one.gradients, result.gradients) < 2e-6 * max(1.0, scale)
        assert largest_difference(one.weights, result.weights) < 5e-5
        assert result.metrics == pytest.approx(one.metrics, rel=1e-4, abs=1e-6)


def test_aggregations_differ(results: dict[tuple[LossAggregation, str], list[Result]]) -> None:
    losses = {results[aggregation, "one"][0].metrics["actor/pg_loss"] for aggregation in LossAggregation}
    assert len(losses) == len(LossAggregation)


def test_the_metrics_of_the_replayed_rollout(results: dict[tuple[LossAggregation, str], list[Result]]) -> None:
    batch = replayed_rollout()
    old, rollout, mask = (batch.ragged_column(name).values for name in (OLD_LOGPROBS, ROLLOUT_LOGPROBS, RESPONSE_MASK))
    difference_N = (old - rollout).abs()[mask]
    metrics = results[LossAggregation.TOKEN_MEAN, "two"][0].metrics
    assert metrics["rollout/logprob_diff_max"] == pytest.approx(float(difference_N.max()))
    assert metrics["rollout/logprob_diff_mean"] == pytest.approx(float(difference_N.mean()))
