"""The runs that `test_lora` compares, and a program that makes all of them on one rank."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from rljob_api.v1alpha1.algorithm import Algorithm
from rljob_api.v1alpha1.kl import Kl, KlPlacement
from rljob_api.v1alpha1.model import Lora
from rljob_api.v1alpha1.optimizer import Optimizer
from rljob_testing.training import gloo_ranks, replays, step_cases
from rljob_trainer.batch.proto import DataProto
from rljob_trainer.dispatch.worker import WorkerContext
from rljob_trainer.engines.train.engine import TrainEngine
from rljob_trainer.engines.train.lora import AdapterSettings
from rljob_trainer.weights.sync import merged_tensors, whole_adapters
from rljob_trainer.workers.columns import IS_TRAINED, OLD_LOGPROBS, REF_LOGPROBS, token_batch
from rljob_trainer.workers.reference import ReferenceWorker

ALGORITHM = Algorithm(entropy_coefficient=0.01, kl=Kl(coefficient=0.1, placement=KlPlacement.LOSS))
LORA = Lora(rank=3, alpha=6.0)
"""The rows of A do not divide over any number of ranks; the scale alpha / rank is 2."""
REPLAY = replays.Replay(ALGORITHM, Optimizer(learning_rate=1e-2), mini_batch_size=2, lora=LORA)
MICRO = replace(REPLAY, max_tokens_per_micro_batch=19)
DROPOUT = replace(REPLAY, lora=Lora(rank=3, alpha=6.0, dropout=0.5))
EARLIER_STEPS, SAVED_STEP, NUM_STEPS = 1, 1, 2
"""Steps before the compared one, so that B is no longer zero; the step at which the run is saved; its number of
steps."""
CASES = {
    "one": step_cases.Case(REPLAY, step=EARLIER_STEPS),
    "first": step_cases.Case(REPLAY),
    "all weights": step_cases.Case(replace(REPLAY, lora=None)),
    "micro-batches, checkpointing": step_cases.Case(replace(MICRO, gradient_checkpointing=True), step=EARLIER_STEPS),
    "two workers": step_cases.Case(MICRO, 2, step=EARLIER_STEPS),
    "two replicas": step_cases.Case(replace(MICRO, shard_size=1), 2, step=EARLIER_STEPS),
    "two sequence ranks": step_cases.Case(replace(MICRO, sequence_parallel=2), 2, step=EARLIER_STEPS),
    "bfloat16": step_cases.Case(replace(REPLAY, compute_dtype=torch.bfloat16), step=EARLIER_STEPS),
    "dropout": step_cases.Case(DROPOUT),
    "one update": step_cases.Case(replace(REPLAY, mini_batch_size=4), step=1),
    "one update, dropout": step_cases.Case(replace(DROPOUT, mini_batch_size=4), step=1),
}
SAME_AS_ONE = ("micro-batches, checkpointing", "two workers", "two replicas", "two sequence ranks")


@dataclass(frozen=True)
class Trained:
    """A run of NUM_STEPS steps."""

    first: dict[str, torch.Tensor]
    """Trained tensors before the first step."""
    saved: dict[str, torch.Tensor]
    """Trained tensors and optimizer state after SAVED_STEP steps."""
    last: dict[str, torch.Tensor]
    """Trained tensors and optimizer state at the end."""
    optimizer_names: list[str]
    trainable: int
    """Number of trained elements, over all ranks."""
    stored: int
    """Number of elements in a checkpoint."""
    base: dict[str, torch.Tensor]
    adapters: dict[str, torch.Tensor]
    merged: dict[str, torch.Tensor]
    base_after: dict[str, torch.Tensor]
    """Base weights after the merged export, which must not change them."""
    reference_logprobs: torch.Tensor
    base_logprobs: torch.Tensor
    """Log-probabilities of a separate frozen base model."""
    policy_logprobs: torch.Tensor


@dataclass(frozen=True)
class RankResults:
    """All results of one rank."""

    steps: dict[str, step_cases.Outcome]
    trained: Trained
    resumed: dict[str, torch.Tensor]
    """State after NUM_STEPS steps, resumed from the checkpoint of two ranks."""
    dropout_logprobs: list[torch.Tensor]
    """Log-probabilities of two equal passes with adapter dropout of 0.5."""


def all_runs(root: Path) -> dict[int, list[RankResults]]:
    """Results by number of ranks. Two ranks run first, because the others load their checkpoint from `root`."""
    counts = (2, 1)
    program = partial(all_runs_of_rank, root)
    found = gloo_ranks.run_on_ranks([gloo_ranks.RankedRun(program, num_ranks) for num_ranks in counts])
    return {
        num_ranks: [each for each in of_ranks if isinstance(each, RankResults)]
        for num_ranks, of_ranks in zip(counts, found, strict=True)
    }


def all_runs_of_rank(root: Path, context: WorkerContext) -> RankResults:
    steps = {
        name: step_cases.one_step(case, context) for name, case in CASES.items() if case.num_ranks == context.world_size
    }
    run = replays.replayed_run(MICRO, context)
    trained = train(run, root if context.world_size == 2 else None)
    [folder] = root.glob("step-*")
    again = replays.replayed_run(MICRO, context)
    again.group.load_checkpoint(folder, SAVED_STEP)
    again.steps(SAVED_STEP, NUM_STEPS)
    return RankResults(steps, trained, again.state(), dropout_logprobs(context))


def train(run: replays.ReplayedRun, root: Path | None) -> Trained:
    engine, context = run.actor.engine, run.actor.context
    first = run.weights()
    run.steps(0, SAVED_STEP)
    saved = run.state()
    if root is not None:
        run.save(root, SAVED_STEP)
    run.steps(SAVED_STEP, NUM_STEPS)
    base = replays.whole_copies(engine.named_shards())
    merged = merged_of(engine)
    batch = rollout(run)
    frozen = TrainEngine(run.replay.engine_settings(context.world_size, is_trained=False))
    reference = ReferenceWorker(context, engine, run.replay.temperature)
    alone = ReferenceWorker(context, frozen, run.replay.temperature)
    return Trained(
        first=first,
        saved=saved,
        last=run.state(),
        optimizer_names=[name for name, _ in engine.named_optimizer_state()],
        trainable=sum(each.numel() for each in engine.model.parameters() if each.requires_grad),
        stored=sum(each.local.numel() for each in run.actor._shards()),
        base=base,
        adapters=whole_adapters(engine),
        merged=merged,
        base_after=replays.whole_copies(engine.named_shards()),
        reference_logprobs=reference.compute_ref_logprobs(batch).ragged_column(REF_LOGPROBS).values,
        base_logprobs=alone.compute_ref_logprobs(batch).ragged_column(REF_LOGPROBS).values,
        policy_logprobs=run.actor.compute_logprobs(batch).ragged_column(OLD_LOGPROBS).values,
    )


def merged_of(engine: TrainEngine) -> dict[str, torch.Tensor]:
    adapters = engine.settings.adapters
    assert isinstance(adapters, AdapterSettings)
    found = merged_tensors(engine, adapters, torch.float32, frozenset())
    return {name: tensor.clone() for name, tensor in found}


def dropout_logprobs(context: WorkerContext) -> list[torch.Tensor]:
    run = replays.replayed_run(DROPOUT, context)
    run.steps(0, 1)
    tokens = token_batch(rollout(run))
    return [run.actor.engine.forward(tokens, 1.0).logprobs_N for _ in range(2)]


def rollout(run: replays.ReplayedRun) -> DataProto:
    """The same rollout on all ranks."""
    batch = (
        replays.ReplayedRollouts().run(replays.prompts_of(0, 2), 4, run.replay.plan(1).sampling, torch.tensor([3])).rows
    )
    return batch.with_columns({IS_TRAINED: torch.ones(len(batch), dtype=torch.bool)})
