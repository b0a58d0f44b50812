"""A machine by its own runs: the constants with which the model predicts what was measured there.

Each step of a run is an observation of its own, because steps differ in what they learn from, and that tells what a
step costs in any case from what each token costs. What a run cannot tell stays as it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from rljob_planner.advice.process_memory import process_bytes
from rljob_planner.advice.run_facts import (
    OTHER,
    RunFacts,
    observed_workload,
    workload_for_memory,
    workload_of_step,
)
from rljob_planner.calibration import (
    DECODE_BANDWIDTH,
    DECODE_SEQUENCE,
    DECODE_STEP,
    FORWARD_EFFICIENCY,
    PASS_EFFICIENCY,
    PER_PASS,
    PER_STEP,
    PER_SYNC,
    PER_UPDATE,
    STEP,
    Adjustable,
    Observation,
    fit,
)
from rljob_planner.constants import Constants
from rljob_planner.errors import PlanError
from rljob_planner.memory.host import PROCESS_BYTES
from rljob_planner.memory.phases import phases_of
from rljob_planner.placement import Placement
from rljob_planner.timing.step import step_time
from rljob_planner.workload import Role, Workload

LEAST_STEPS = 3
"""Beside the first one: with fewer the median says little."""
LARGEST_MISS = 1.5
"""How many times longer or shorter than a run's own step the fitted constants may find it."""


@dataclass(frozen=True)
class CalibrationRun:
    """A run, and the job that it is of."""

    name: str
    """For people: its folder."""
    facts: RunFacts
    workload: Workload
    """As the job says it."""
    placement: Placement


def cpu_constants() -> Constants:
    """Of workers on CPU cores before a run has shown more: nothing is launched there, and calls cost hundredths of a
    second. As seen on a machine of two cores."""
    return replace(
        Constants(),
        decode_step_seconds=2e-3,
        decode_sequence_seconds=5e-5,
        step_seconds=0.02,
        process_bytes=PROCESS_BYTES,
    )


def calibrated(runs: Sequence[CalibrationRun], constants: Constants) -> Constants:
    """`constants` fitted to these runs, of one machine or cluster.

    Raises PlanError for a run with too few steps, for runs on different kinds of devices, and where the fitted
    constants do not predict the step that they were fitted to."""
    kinds = {pool.gpu.name for run in runs for pool in run.placement.pools}
    if len(kinds) != 1:
        raise PlanError(
            f"--calibrate: the runs are on different kinds of GPU ({', '.join(sorted(kinds))}); give one kind"
        )
    for run in runs:
        if len(run.facts.steps) < LEAST_STEPS:
            raise PlanError(
                f"{run.name}: has too few steps to calibrate by ({run.facts.num_steps}, the first counted); let it do"
                f" {LEAST_STEPS + 1} or more"
            )
    is_cpu = any(pool.gpu.is_cpu for run in runs for pool in run.placement.pools)
    observations = [each for run in runs for each in observations_of(run)]
    step_seconds = min(run.facts.step.median for run in runs)
    fitted = fit(constants, observations, _adjustables(step_seconds, is_cpu=is_cpu))
    for run in runs:
        _check_fit(run, fitted)
    if is_cpu:
        fitted = replace(fitted, process_bytes=_process_bytes(runs, fitted))
    # What other kinds reach was not seen.
    return replace(
        fitted,
        training_efficiency={kind: fitted.training_efficiency_of(kind) for kind in kinds},
        forward_efficiency={kind: fitted.forward_efficiency_of(kind) for kind in kinds},
        source=", ".join(run.name for run in runs),
    )


def _check_fit(run: CalibrationRun, fitted: Constants) -> None:
    """A constant moves so far from its default and no further, so a fit to seconds that cannot be is no fit."""
    predicted = step_time(observed_workload(run.workload, run.facts), run.placement, fitted).total.likely
    measured = run.facts.step.median
    if not measured / LARGEST_MISS <= predicted <= measured * LARGEST_MISS:
        raise PlanError(
            f"{run.name}: no believable constants explain its steps (a step takes {predicted:.3g} s by the nearest"
            f" ones, and took {measured:.3g} s); check timing_s/step in its metrics and the kind of GPU, or leave the"
            " run out"
        )


def observations_of(run: CalibrationRun) -> tuple[Observation, ...]:
    """One for each step. A step that took far longer than the others was disturbed, and is left out."""
    usual = run.facts.step.median
    found = []
    for step in run.facts.steps:
        if step.seconds <= _MOST_OVER_USUAL * usual:
            seconds = {name: each for name, each in step.phases.items() if name != OTHER}
            seconds[STEP] = step.seconds
            found.append(Observation(workload_of_step(run.workload, step), run.placement, seconds))
    return tuple(found)


_MOST_OVER_USUAL = 1.5
_LARGEST_SHARE = 0.02
"""Of a step: what fixed seconds of a pass or an update are believed to be, at most."""


def _decode_compute(constants: Constants, factor: float, kinds: frozenset[str]) -> Constants:
    del kinds
    return replace(constants, decode_compute_efficiency=min(1.0, factor * constants.decode_compute_efficiency))


def _adjustables(step_seconds: float, *, is_cpu: bool) -> tuple[Adjustable, ...]:
    """What the steps of a run tell apart. A pass without backward that no step has is as efficient as an update is. On
    CPUs products bound decoding, too, and sequences cost the host's time, which is the device's."""
    fixed = _LARGEST_SHARE * step_seconds
    found = (
        PASS_EFFICIENCY,
        replace(FORWARD_EFFICIENCY, width=0.3),
        DECODE_STEP,
        DECODE_BANDWIDTH,
        PER_STEP,
        replace(PER_PASS, unit=min(PER_PASS.unit, fixed)),
        replace(PER_UPDATE, unit=min(PER_UPDATE.unit, fixed)),
        PER_SYNC,
    )
    if not is_cpu:
        return found
    return (*found, DECODE_SEQUENCE, Adjustable("reached speed of products in decoding", 0.5, _decode_compute))


def _process_bytes(runs: Sequence[CalibrationRun], constants: Constants) -> float:
    """What a worker's process has beyond what the model knows of: libraries, and what they keep."""
    bare = replace(constants, process_bytes=0.0)
    found = []
    for run in runs:
        if "process" in run.facts.memory:
            workload = workload_for_memory(run.workload, run.facts)
            pool = run.placement.pool_of(Role.ACTOR)
            explained = process_bytes(phases_of(pool, workload, bare), workload, pool.rollout)
            found.append(run.facts.memory["process"] - explained)
    return max(0.0, fmean(found)) if found else constants.process_bytes
