"""The planner's phases against what the trainer itself notes of a step at each boundary (docs/memory.md)."""

from __future__ import annotations

import json
from functools import partial

import pytest

from rljob_planner.constants import Constants
from rljob_planner.gpus import Gpu
from rljob_planner.memory.phases import phases_of
from rljob_planner.model_config import shape_of_config
from rljob_planner.model_shape import ModelShape
from rljob_planner.plan_types import Phase, PhaseMemory
from rljob_planner.workload import (
    EngineKind,
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
from rljob_testing.offload_runs import REPLAY
from rljob_testing.planner_hybrid import Mark, NotedStep, noted_step
from rljob_testing.ranks import RankedRun, run_on_ranks
from rljob_testing.replayed_steps import LONGEST_PROMPT, LONGEST_RESPONSE, MODEL

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
    runs = [RankedRun(partial(noted_step, root / str(ranks), offloads), ranks) for ranks, offloads in CASES]
    first = [each[0] for each in run_on_ranks(runs)]
    return {case: step for case, step in zip(CASES, first, strict=True) if isinstance(step, NotedStep)}


def shape() -> ModelShape:
    return shape_of_config(json.loads((MODEL / "config.json").read_text()), "sort digits")


def planned(ranks: int, *, offloads: bool) -> dict[Phase, PhaseMemory]:
    """As on GPUs: what is offloaded is elsewhere."""
    offload = ModelOffload(parameters=offloads, gradients=offloads, optimizer=offloads)
    model = TrainModel(shape(), is_trained=True, compute_bytes=4, offload=offload)
    workload = Workload(
        name="noted",
        batch_size=REPLAY.batch_size,
        group_size=REPLAY.group_size,
        mini_batch_size=REPLAY.mini_batch_size,
        num_epochs_per_batch=1,
        num_steps=REPLAY.num_steps,
        max_tokens_per_micro_batch=REPLAY.max_tokens_per_micro_batch,
        lengths=TokenLengths(5.0, LONGEST_PROMPT, 6.0, LONGEST_RESPONSE),
        models={
            Role.ACTOR: model,
            Role.REF: TrainModel(shape(), is_trained=False, compute_bytes=4, offload=ModelOffload(offloads)),
            Role.CRITIC: TrainModel(shape(), True, Head.VALUE, compute_bytes=4, offload=offload),
        },
        rollout=RolloutWork(shape(), weight_bytes=4, engine=EngineKind.HUGGING_FACE),
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
