"""Steps of a hybrid worker with a reference and a critic on one rank, and what was in memory at each boundary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from rljob_api.v1alpha1.algorithm import Algorithm, AlgorithmType
from rljob_api.v1alpha1.kl import Kl, KlPlacement
from rljob_api.v1alpha1.model import Critic
from rljob_testing.offload_runs import REPLAY, SAMPLING
from rljob_testing.replayed_steps import MODEL, replayed_run
from rljob_trainer.batch.proto import DataProto
from rljob_trainer.batch.ragged import RaggedColumn
from rljob_trainer.dispatch.worker import WorkerContext
from rljob_trainer.engines.rollout.hf_engine import HfEngine, HfSettings
from rljob_trainer.observability.memory import MEBIBYTE
from rljob_trainer.observability.spans import SPANS, Counts
from rljob_trainer.observability.timeline import MEMORY_PEAK_TRACK, MEMORY_TRACK
from rljob_trainer.workers.columns import PROMPT_TOKEN_IDS, SAMPLE_SEEDS
from rljob_trainer.workers.hybrid import HybridWorker
from rljob_trainer.workers.rollout import RolloutWorker


@dataclass(frozen=True)
class Mark:
    """A boundary: bytes by owner."""

    boundary: str
    owners: Mapping[str, int]
    peak: int
    """Of all owners, since the boundary before."""


@dataclass(frozen=True)
class NotedStep:
    """What one rank has noted."""

    first_rollout: list[Mark]
    """Of a process before its first update."""
    step: list[Mark]
    """A rollout, a training step and a save after others."""


def noted_step(root: Path, offloads: bool, context: WorkerContext) -> NotedStep:
    """`offloads`: all that can be, of all models."""
    algorithm = Algorithm(type=AlgorithmType.PPO, kl=Kl(coefficient=0.1, placement=KlPlacement.LOSS))
    run = replayed_run(replace(REPLAY, algorithm=algorithm, critic=Critic(), offloads=offloads), context)
    settings = HfSettings(MODEL, context.device, torch.float32, 16)
    hybrid = HybridWorker(
        context, run.actor, RolloutWorker(context, lambda: HfEngine(settings), 1), torch.float32, seed=0
    )
    prompts = RaggedColumn.from_rows([torch.tensor([5, 6, 7])] * 4)
    batch = DataProto({SAMPLE_SEEDS: torch.arange(4)}, ragged={PROMPT_TOKEN_IDS: prompts})
    SPANS.take()
    hybrid.generate_sequences(batch, SAMPLING, True)
    first = _marks()
    run.step(0)
    SPANS.take()
    hybrid.generate_sequences(batch, SAMPLING, True)
    run.step(1)
    run.save(root / f"offloads-{offloads}", 2)
    return NotedStep(first, _marks())


def _marks() -> list[Mark]:
    counts = [each for each in SPANS.take() if isinstance(each, Counts)]
    owners = [each for each in counts if each.track == MEMORY_TRACK]
    peaks = [each for each in counts if each.track == MEMORY_PEAK_TRACK]
    return [
        Mark(
            each.after,
            {owner: round(mebibytes * MEBIBYTE) for owner, mebibytes in each.values.items()},
            round(sum(peak.values.values()) * MEBIBYTE),
        )
        for each, peak in zip(owners, peaks, strict=True)
    ]
