"""Comparison of a run with its plan: each phase, owner and boundary with its own measurement."""

from __future__ import annotations

import pytest

from rljob_planner.advice.comparison import compared_memory, compared_times
from rljob_planner.advice.run_facts import facts_of
from rljob_planner.constants import Constants
from rljob_planner.memory.phases import phases_of
from rljob_planner.plan_types import PhaseTime, Seconds, StepTime
from rljob_testing.planner import samples


def seconds(likely: float) -> Seconds:
    return Seconds(likely / 2, likely, likely * 2)


def test_each_phase_has_its_row_and_the_step_comes_last() -> None:
    """If pools run at the same time, the metric is the remaining wait, and so is the prediction."""
    phases = (
        PhaseTime("generate", "main", seconds(8), "compute", "", "", waited=seconds(8)),
        PhaseTime("ref", "other", seconds(5), "compute", "", "", waited=seconds(1)),
        PhaseTime("other", "host", seconds(1), "calls", "", "", waited=seconds(1)),
    )
    row = {"step": 2.0, "timing_s/step": 12.0, "timing_s/generate": 4.0, "timing_s/ref": 2.0, "timing_s/reward": 3.0}
    rows = compared_times(StepTime(phases, seconds(10), "generate"), facts_of([{**row, "step": 1.0}, row], 8))
    assert [each.name for each in rows] == ["generate", "ref", "reward", "other", "step"]
    by_name = {each.name: each for each in rows}
    assert by_name["generate"].ratio == 2.0
    assert by_name["ref"].ratio == 0.5
    assert by_name["other"].ratio == pytest.approx(1 / 3)
    assert by_name["reward"].predicted is None
    assert by_name["reward"].ratio is None
    assert by_name["step"].ratio == pytest.approx(10 / 12)


def memory_row(step: int, **owners: float) -> dict[str, float]:
    row = {"step": float(step), "timing_s/step": 1.0}
    return row | {f"memory/{name}_bytes_max": value for name, value in owners.items()}


def test_owners_and_boundaries_are_compared_with_their_counters() -> None:
    job = samples.workload()
    phases = phases_of(samples.one_pool(job), job, Constants())
    shards, moments = 4 * job.rollout.shape.num_parameters / 8, 8 * job.rollout.shape.num_parameters / 8
    first = memory_row(1, other=1, after_wake_kv_cache=41 * samples.GIB)
    later = memory_row(2, other=1, parameters=shards, optimizer=2 * moments, after_wake_kv_cache=50 * samples.GIB)
    rows = {each.name: each for each in compared_memory(phases, facts_of([first, later], 64), 0.0)}
    assert set(rows) == {"actor parameters", "actor moments", "first wake-up", "later wake-ups"}
    assert rows["actor parameters"].ratio == pytest.approx(1.0, rel=1e-3)
    assert rows["actor moments"].ratio == pytest.approx(0.5, rel=1e-3)
    assert rows["first wake-up"].measured == 41 * samples.GIB
    assert rows["later wake-ups"].predicted - rows["first wake-up"].predicted == pytest.approx(moments, rel=1e-3)


def test_on_cpus_no_counter_has_activations() -> None:
    """The counters have tensors of owners only (trainer, observability/memory.py)."""
    job = samples.workload()
    constants = Constants(process_bytes=7.0 * samples.GIB)
    phases = phases_of(samples.one_pool(job, samples.gpu(2000, is_cpu=True)), job, constants)
    update = next(phase for phase in phases if phase.phase.value == "update")
    row = memory_row(2, during_forward_backward=1.0, process=100 * samples.GIB)
    facts = facts_of([row, {**row, "step": 3.0}], 64)
    rows = {each.name: each for each in compared_memory(phases, facts, 90.0 * samples.GIB)}
    # All but the sleeping cache: parameters, moments and gradients of one of eight ranks, and weights.
    num = job.rollout.shape.num_parameters
    assert rows["update"].predicted == pytest.approx((4 + 8 + 4) * num / 8 + 2 * num + 2 * num / 8, rel=0.01)
    assert rows["update"].predicted < update.total - 7 * samples.GIB
    assert rows["process"].ratio == pytest.approx(0.9)
