"""The planner's memory of each phase equals what the trainer itself measures at each boundary (docs/memory.md)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
import torch

from rljob_api.v1alpha1.algorithm import Algorithm, AlgorithmType
from rljob_api.v1alpha1.kl import Kl, KlPlacement
from rljob_api.v1alpha1.model import Critic
from rljob_planner.constants import Constants
from rljob_planner.gpus import Gpu
from rljob_planner.memory.host_state import host_parts
from rljob_planner.memory.phases import phases_of
from rljob_planner.model_config import shape_of_config
from rljob_planner.model_shape import ModelShape
from rljob_planner.plan_types import Phase, PhaseMemory
from rljob_planner.workload import (
    Head,
    ModelOffload,
    PlacedPool,
    Role,
    RolloutLayout,
    RolloutWork,
    TokenLengths,
    TrainLayout,
    TrainModel,
    Workload,
)
from rljob_testing.training import gloo_ranks, offload_runs, replays
from rljob_testing.training.whole_rollouts import whole_rollout
from rljob_trainer.batch.proto import DataProto
from rljob_trainer.batch.ragged import RaggedColumn
from rljob_trainer.dispatch.worker import WorkerContext
from rljob_trainer.engines.host_ledger import HOST_LEDGER
from rljob_trainer.engines.rollout.hf_engine import HfEngine, HfSettings
from rljob_trainer.observability.memory import MEBIBYTE
from rljob_trainer.observability.spans import SPANS, Counts
from rljob_trainer.observability.timeline import MEMORY_PEAK_TRACK, MEMORY_TRACK
from rljob_trainer.workers.columns import PROMPT_TOKEN_IDS, SAMPLE_SEEDS
from rljob_trainer.workers.hybrid import HybridWorker
from rljob_trainer.workers.rollout import RolloutWorker


@dataclass(frozen=True)
class Boundary:
    """A boundary of a step: bytes by owner."""

    name: str
    owners: Mapping[str, int]
    peak: int
    """Peak of all owners since the boundary before."""


@dataclass(frozen=True)
class MeasuredStep:
    """What one rank has measured."""

    first_rollout: list[Boundary]
    """A rollout before the first update."""
    step: list[Boundary]
    """A later rollout, a training step and a checkpoint."""
    host: Mapping[str, int]
    """Host memory by its owner, as checked before the first step."""


def measured_step(root: Path, offloads: bool, context: WorkerContext) -> MeasuredStep:
    """`offloads`: whether everything that can be offloaded is, for all models."""
    # The engines of earlier runs in this process, as far as they exist, do not count.
    HOST_LEDGER._counts.clear()
    algorithm = Algorithm(type=AlgorithmType.PPO, kl=Kl(coefficient=0.1, placement=KlPlacement.LOSS))
    run = replays.replayed_run(
        replace(offload_runs.REPLAY, algorithm=algorithm, critic=Critic(), offloads=offloads), context
    )
    settings = HfSettings(replays.MODEL, context.device, torch.float32, 16)
    assert run.reference is not None
    assert run.critic is not None
    others = [run.reference.engine, run.critic.engine]
    rollout = RolloutWorker(context, lambda: HfEngine(settings), 1)
    hybrid = HybridWorker(context, run.actor, rollout, torch.float32, 0, others)
    host = {use.owner: use.num_bytes for use in HOST_LEDGER.account().uses}
    prompts = RaggedColumn.from_rows([torch.tensor([5, 6, 7])] * 4)
    batch = DataProto({SAMPLE_SEEDS: torch.arange(4)}, ragged={PROMPT_TOKEN_IDS: prompts})
    SPANS.take()
    whole_rollout(hybrid, batch, offload_runs.SAMPLING)
    first = _boundaries()
    run.step(0)
    SPANS.take()
    whole_rollout(hybrid, batch, offload_runs.SAMPLING)
    run.step(1)
    run.save(root / f"offloads-{offloads}", 2)
    return MeasuredStep(first, _boundaries(), host)


def _boundaries() -> list[Boundary]:
    counts = [each for each in SPANS.take() if isinstance(each, Counts)]
    owners = [each for each in counts if each.track == MEMORY_TRACK]
    peaks = [each for each in counts if each.track == MEMORY_PEAK_TRACK]
    return [
        Boundary(
            each.after,
            {owner: round(mebibytes * MEBIBYTE) for owner, mebibytes in each.values.items()},
            round(sum(peak.values.values()) * MEBIBYTE),
        )
        for each, peak in zip(owners, peaks, strict=True)
    ]


CASES = ((1, False), (2, True))
"""Ranks that hold one copy together, and whether everything that can be offloaded is."""
# transformers generates, which does not sleep, so the trainer counts all memory.
CONSTANTS = Constants(allocator_factor=1.0)
OWNERS = {
    "parameters": ("actor parameters",),
    "optimizer": ("actor moments",),
    "gradients": ("actor gradients",),
    "reference": ("ref parameters",),
    "critic": ("critic parameters", "critic moments", "critic gradients"),
    "rollout_weights": ("rollout weights",),
}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, bool], MeasuredStep]:
    """The first rank's measurements, by the number of ranks and whether everything is offloaded. It has most memory."""
    root = tmp_path_factory.mktemp("steps")
    runs = [
        gloo_ranks.RankedRun(partial(measured_step, root / str(ranks), offloads), ranks) for ranks, offloads in CASES
    ]
    first = [each[0] for each in gloo_ranks.run_on_ranks(runs)]
    return {case: step for case, step in zip(CASES, first, strict=True) if isinstance(step, MeasuredStep)}


def shape() -> ModelShape:
    return shape_of_config(json.loads((replays.MODEL / "config.json").read_text()), "sort digits")


def placed_job(ranks: int, *, offloads: bool) -> tuple[PlacedPool, Workload]:
    """The measured job on GPUs."""
    offload = ModelOffload(parameters=offloads, gradients=offloads, optimizer=offloads)
    model = TrainModel(shape(), is_trained=True, compute_bytes=4, offload=offload)
    workload = Workload(
        name="measured",
        batch_size=offload_runs.REPLAY.batch_size,
        group_size=offload_runs.REPLAY.group_size,
        mini_batch_size=offload_runs.REPLAY.mini_batch_size,
        num_epochs_per_batch=1,
        num_steps=offload_runs.REPLAY.num_steps,
        max_tokens_per_micro_batch=offload_runs.REPLAY.max_tokens_per_micro_batch,
        lengths=TokenLengths(5.0, replays.LONGEST_PROMPT, 6.0, replays.LONGEST_RESPONSE),
        models={
            Role.ACTOR: model,
            Role.REF: TrainModel(shape(), is_trained=False, compute_bytes=4, offload=ModelOffload(offloads)),
            Role.CRITIC: TrainModel(shape(), True, Head.VALUE, compute_bytes=4, offload=offload),
        },
        rollout=RolloutWork(shape(), weight_bytes=4, is_vllm=False),
        needs_old_logprobs=True,
    )
    layouts = {role: TrainLayout(ranks, ranks) for role in workload.models}
    device = Gpu("device", 2**30, 1e12, 1e11, 1e10)
    return PlacedPool("pool", 1, ranks, device, layouts, RolloutLayout(ranks)), workload


def planned(ranks: int, *, offloads: bool) -> dict[Phase, PhaseMemory]:
    """The plan for GPUs, where offloaded state is in other memory."""
    pool, workload = placed_job(ranks, offloads=offloads)
    return {phase.phase: phase for phase in phases_of(pool, workload, CONSTANTS)}


def by_owner(phase: PhaseMemory) -> dict[str, float]:
    """Bytes by the trainer's names of owners, without what exists in passes only."""
    return {
        owner: sum(part.num_bytes for part in phase.parts if part.owner in parts) for owner, parts in OWNERS.items()
    }


def after(boundaries: list[Boundary], name: str) -> dict[str, int]:
    """The last one of this name: the actor's updates come after the critic's."""
    [*_, found] = [each.owners for each in boundaries if each.name == name]
    return {owner: found[owner] for owner in OWNERS}


def same(phase: PhaseMemory, measured: dict[str, int]) -> bool:
    """Equal to the byte, except for the engine's table of positions, which no formula has."""
    return by_owner(phase) == pytest.approx(measured, abs=1024)


Measurements = dict[tuple[int, bool], MeasuredStep]


@pytest.mark.parametrize(("ranks", "offloads"), CASES)
def test_state_equals_the_trainers_to_the_byte(measured: Measurements, ranks: int, offloads: bool) -> None:
    step, plan = measured[ranks, offloads], planned(ranks, offloads=offloads)
    assert same(plan[Phase.ENGINE_START], after(step.first_rollout, "generate"))
    assert same(plan[Phase.GENERATION], after(step.step, "generate"))
    assert same(plan[Phase.SYNC], after(step.step, "wake_weights"))


@pytest.mark.parametrize(("ranks", "offloads"), CASES)
def test_an_update_adds_gradients_and_then_moments(measured: Measurements, ranks: int, offloads: bool) -> None:
    step, plan = measured[ranks, offloads], planned(ranks, offloads=offloads)[Phase.UPDATE]
    in_passes, in_optimizer = after(step.step, "forward_backward"), after(step.step, "optimizer_step")
    assert in_passes["gradients"] > 0
    assert in_optimizer["optimizer"] == 2 * in_optimizer["gradients"]
    found = by_owner(plan)
    expected = in_optimizer if found["optimizer"] else in_passes
    if offloads and not found["gradients"]:
        # Offloaded sums of earlier micro-batches are in host memory while a layer is computed, which is the peak.
        expected["gradients"] = 0
    assert found == pytest.approx(expected, abs=1024)
    assert plan.total >= max(
        boundary.peak for boundary in step.step if boundary.name in ("forward_backward", "optimizer_step")
    )


@pytest.mark.parametrize(("ranks", "offloads"), CASES)
def test_passes_and_checkpoints_load_only_what_they_need(measured: Measurements, ranks: int, offloads: bool) -> None:
    step, plan = measured[ranks, offloads], planned(ranks, offloads=offloads)
    saves = [sum(boundary.owners[owner] for owner in OWNERS) for boundary in step.step if boundary.name == "save"]
    assert plan[Phase.CHECKPOINT].total == pytest.approx(max(saves), abs=1024)
    peaks = {boundary.name: boundary.peak for boundary in step.step}
    scoring = max(peaks[name] for name in ("old_logprobs", "ref_logprobs", "values"))
    assert plan[Phase.LOGPROBS].total >= scoring
    assert plan[Phase.CRITIC_UPDATE].total >= peaks["update_critic"]


@pytest.mark.parametrize(("ranks", "offloads"), CASES)
def test_host_memory_is_that_of_the_check_before_the_first_step(
    measured: Measurements, ranks: int, offloads: bool
) -> None:
    pool, workload = placed_job(ranks, offloads=offloads)
    on_cpus = replace(pool, gpu=replace(pool.gpu, is_cpu=True))
    parts = {part.owner: part.num_bytes / ranks for part in host_parts(on_cpus, workload, CONSTANTS)}
    parts.pop("libraries")
    assert parts == {owner.replace("'s ", " "): size for owner, size in measured[ranks, offloads].host.items()}


def test_the_actors_embedding_stays_whole_after_a_pass(measured: Measurements) -> None:
    for (ranks, offloads), step in measured.items():
        phase = planned(ranks, offloads=offloads)[Phase.CRITIC_UPDATE]
        [gathered] = [part.num_bytes for part in phase.parts if part.owner == "actor gathered parameters"]
        [other, *_] = [boundary.owners["other"] for boundary in step.step if boundary.name == "old_logprobs"]
        assert gathered == other
