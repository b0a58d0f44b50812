"""The planner's phases against what the trainer itself notes of a step at each boundary (docs/memory.md)."""

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
    run = replays.replayed_run(
        replace(offload_runs.REPLAY, algorithm=algorithm, critic=Critic(), offloads=offloads), context
    )
    settings = HfSettings(replays.MODEL, context.device, torch.float32, 16)
    hybrid = HybridWorker(
        context, run.actor, RolloutWorker(context, lambda: HfEngine(settings), 1), torch.float32, seed=0
    )
    prompts = RaggedColumn.from_rows([torch.tensor([5, 6, 7])] * 4)
    batch = DataProto({SAMPLE_SEEDS: torch.arange(4)}, ragged={PROMPT_TOKEN_IDS: prompts})
    SPANS.take()
    hybrid.generate_sequences(batch, offload_runs.SAMPLING, True)
    first = _marks()
    run.step(0)
    SPANS.take()
    hybrid.generate_sequences(batch, offload_runs.SAMPLING, True)
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


CASES = ((1, False), (2, True))
"""Ranks that hold a copy together, and whether all is offloaded that can be."""
# Nothing is there that the trainer does not count: its engine is transformers', which does not sleep.
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
def noted(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, bool], NotedStep]:
    """By number of ranks, and whether all is offloaded; of the first rank, which has the most."""
    root = tmp_path_factory.mktemp("steps")
    runs = [gloo_ranks.RankedRun(partial(noted_step, root / str(ranks), offloads), ranks) for ranks, offloads in CASES]
    first = [each[0] for each in gloo_ranks.run_on_ranks(runs)]
    return {case: step for case, step in zip(CASES, first, strict=True) if isinstance(step, NotedStep)}


def shape() -> ModelShape:
    return shape_of_config(json.loads((replays.MODEL / "config.json").read_text()), "sort digits")


def planned(ranks: int, *, offloads: bool) -> dict[Phase, PhaseMemory]:
    """As on GPUs: what is offloaded is elsewhere."""
    offload = ModelOffload(parameters=offloads, gradients=offloads, optimizer=offloads)
    model = TrainModel(shape(), is_trained=True, compute_bytes=4, offload=offload)
    workload = Workload(
        name="noted",
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
    pool = PlacedPool("pool", 1, ranks, device, layouts, RolloutLayout(ranks))
    return {phase.phase: phase for phase in phases_of(pool, workload, CONSTANTS)}


def by_owner(phase: PhaseMemory) -> dict[str, float]:
    """Under the names of the trainer, without what is there in passes alone."""
    return {
        owner: sum(part.num_bytes for part in phase.parts if part.owner in parts) for owner, parts in OWNERS.items()
    }


def after(marks: list[Mark], boundary: str) -> dict[str, int]:
    """Where it comes twice, at the last: the actor's updates come after the critic's."""
    [*_, found] = [mark.owners for mark in marks if mark.boundary == boundary]
    return {owner: found[owner] for owner in OWNERS}


def same(phase: PhaseMemory, mark: dict[str, int]) -> bool:
    """To the byte, but for the engine's tables of positions, which no formula has."""
    return by_owner(phase) == pytest.approx(mark, abs=1024)


Noted = dict[tuple[int, bool], NotedStep]


@pytest.mark.parametrize(("ranks", "offloads"), CASES)
def test_what_stays_is_that_of_the_trainer_to_the_byte(noted: Noted, ranks: int, offloads: bool) -> None:
    step, plan = noted[ranks, offloads], planned(ranks, offloads=offloads)
    assert same(plan[Phase.ENGINE_START], after(step.first_rollout, "generate"))
    assert same(plan[Phase.GENERATION], after(step.step, "generate"))
    assert same(plan[Phase.SYNC], after(step.step, "wake_weights"))


@pytest.mark.parametrize(("ranks", "offloads"), CASES)
def test_an_update_has_gradients_and_then_moments(noted: Noted, ranks: int, offloads: bool) -> None:
    step, plan = noted[ranks, offloads], planned(ranks, offloads=offloads)[Phase.UPDATE]
    in_passes, in_optimizer = after(step.step, "forward_backward"), after(step.step, "optimizer_step")
    assert in_passes["gradients"] > 0
    assert in_optimizer["optimizer"] == 2 * in_optimizer["gradients"]
    found = by_owner(plan)
    expected = in_optimizer if found["optimizer"] else in_passes
    if offloads and not found["gradients"]:
        # Sums of micro-batches before are away while a layer is computed: that is where its peak is.
        expected["gradients"] = 0
    assert found == pytest.approx(expected, abs=1024)
    assert plan.total >= max(mark.peak for mark in step.step if mark.boundary in ("forward_backward", "optimizer_step"))


@pytest.mark.parametrize(("ranks", "offloads"), CASES)
def test_passes_and_saves_have_what_they_need_and_no_more(noted: Noted, ranks: int, offloads: bool) -> None:
    step, plan = noted[ranks, offloads], planned(ranks, offloads=offloads)
    saves = [sum(mark.owners[owner] for owner in OWNERS) for mark in step.step if mark.boundary == "save"]
    assert plan[Phase.CHECKPOINT].total == pytest.approx(max(saves), abs=1024)
    peaks = {mark.boundary: mark.peak for mark in step.step}
    scoring = max(peaks[name] for name in ("old_logprobs", "ref_logprobs", "values"))
    assert plan[Phase.LOGPROBS].total >= scoring
    assert plan[Phase.CRITIC_UPDATE].total >= peaks["update_critic"]


def test_the_actors_embedding_stays_whole_after_a_pass(noted: Noted) -> None:
    for (ranks, offloads), step in noted.items():
        phase = planned(ranks, offloads=offloads)[Phase.CRITIC_UPDATE]
        [gathered] = [part.num_bytes for part in phase.parts if part.owner == "actor gathered parameters"]
        [other, *_] = [mark.owners["other"] for mark in step.step if mark.boundary == "old_logprobs"]
        assert gathered == other
