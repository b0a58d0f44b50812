"""Calibration with runs of a simulated machine: the fit does not know its constants, and still predicts its steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rljob_planner.advice.calibration import CalibrationRun, calibrated, observations_of
from rljob_planner.advice.comparison import process_bytes
from rljob_planner.advice.run_facts import MetricsLine, facts_of, observed_workload, workload_for_memory
from rljob_planner.constants import Constants
from rljob_planner.errors import PlanError
from rljob_planner.gpus import Gpu
from rljob_planner.memory.phases import phases_of
from rljob_planner.model_shape import ModelShape
from rljob_planner.timing.step import step_time
from rljob_planner.workload import Placement, Role, TokenLengths, TrainModel, Workload
from rljob_testing.planner import samples

SMALL = ModelShape("small", 8, 256, 4, 2, 64, 1024, 8192, ties_head=True)
CPU = Gpu("cpu", 24 * samples.GIB, 100e9, 20e9, 2e9, is_cpu=True)
THERE = replace(
    Constants(),
    training_efficiency={"cpu": 0.6},
    forward_efficiency={"cpu": 0.7},
    decode_compute_efficiency=0.3,
    decode_step_seconds=9e-3,
    decode_sequence_seconds=8e-5,
    update_seconds=0.2,
    wake_seconds=0.05,
    step_seconds=0.03,
)


def job(batch_size: int, cap: int = 64) -> Workload:
    actor = TrainModel(SMALL, is_trained=True, compute_bytes=4)
    made = samples.workload(actor, batch_size=batch_size, mini_batch_size=batch_size, checkpoint_every_steps=None)
    rollout = replace(made.rollout, weight_bytes=4, max_model_length=cap + 16)
    lengths = TokenLengths(10.0, 16, cap / 2, cap)
    return replace(made, models={Role.ACTOR: actor}, rollout=rollout, lengths=lengths)


def here(made: Workload) -> Placement:
    return samples.placement(samples.one_pool(made, CPU, gpus_per_node=1))


def run_of(made: Workload, shares: tuple[float, ...] = (1.0, 1.0, 0.4, 0.8, 0.6, 1.0)) -> CalibrationRun:
    """The measurements of a run on that machine, whose steps train on different shares of their responses."""
    cap, lines = made.lengths.response_max, list[MetricsLine]()
    placement = here(made)
    for step, share in enumerate(shares, start=1):
        mean = cap * (0.4 + 0.02 * step)
        seen = {
            "prompt_length/mean": 10.0,
            "response_length/mean": mean,
            "response_length/max": float(cap),
            "response_length/clip_ratio": 0.05,
            "actor/trained_fraction": share,
        }
        line = {**seen, "step": float(step), "timing_s/step": 1.0}
        work = observed_workload(made, facts_of([line], made.batch_size))
        time = step_time(work, placement, THERE)
        for phase in time.phases:
            if phase.name != "other":
                line[f"timing_s/{phase.name}"] = phase.seconds.likely
        line["timing_s/step"] = time.total.likely
        lines.append(line)
    return CalibrationRun("runs/made-up", facts_of(lines, made.batch_size), made, placement)


def ratio(run: CalibrationRun, constants: Constants) -> float:
    time = step_time(observed_workload(run.workload, run.facts), run.placement, constants)
    return time.total.likely / run.facts.step.median


def test_other_batch_sizes_and_lengths_than_calibrated_are_predicted() -> None:
    run = run_of(job(16))
    assert not 0.7 < ratio(run, Constants()) < 1.4, "the defaults are not this machine"
    found = calibrated([run], Constants())
    assert ratio(run, found) == pytest.approx(1.0, abs=0.05)
    for other in (job(4), job(64), job(16, cap=16), job(16, cap=256)):
        assert ratio(run_of(other), found) == pytest.approx(1.0, abs=0.15), other.batch_size


def test_a_calibrated_gpu_type_does_not_change_other_types() -> None:
    found = calibrated([run_of(job(16))], Constants())
    assert set(found.training_efficiency) == {"cpu"}
    assert found.source == "runs/made-up"
    assert found.link_efficiency == Constants().link_efficiency
    assert found.spread < Constants().spread


def test_process_memory_is_what_tensors_do_not_explain() -> None:
    run = run_of(job(16))
    as_it_was = workload_for_memory(run.workload, run.facts)
    there = phases_of(run.placement.pools[0], as_it_was, replace(THERE, process_bytes=2 * samples.GIB))
    memory = {"process": process_bytes(there, as_it_was, run.placement.pools[0].rollout)}
    seen = replace(run, facts=replace(run.facts, memory=memory))
    assert calibrated([seen], Constants()).process_bytes == pytest.approx(2 * samples.GIB)
    assert calibrated([run], Constants()).process_bytes == Constants().process_bytes


def test_disturbed_steps_are_left_out() -> None:
    run = run_of(job(16))
    slow = replace(run.facts.steps[2], seconds=10 * run.facts.steps[2].seconds)
    disturbed = replace(run, facts=replace(run.facts, steps=(*run.facts.steps[:2], slow, *run.facts.steps[3:])))
    assert len(observations_of(run)) == 5
    assert len(observations_of(disturbed)) == 4


def test_a_run_with_too_few_steps_is_rejected() -> None:
    with pytest.raises(PlanError, match=r"^runs/made-up: too few steps .*seen 3"):
        calibrated([run_of(job(16), shares=(1.0, 1.0, 0.5))], Constants())


def test_runs_on_different_gpu_types_are_rejected() -> None:
    run = run_of(job(16))
    pool = replace(run.placement.pools[0], gpu=replace(CPU, name="other"))
    with pytest.raises(PlanError, match="different GPU types"):
        calibrated([run, replace(run, placement=Placement((pool,)))], Constants())
