"""Fits the planner's constants to measurements: of runs on one machine, or of published runs.

The fit multiplies a constant by a factor. If the default of the constant is 0, the fit adds an amount instead. It
minimizes the sum of the squares of

    weight x ln(predicted / measured) / noise    for each measured phase, and for the whole step
    ln(factor) / width                           for each constant; a larger width allows a larger change

So a constant that does not affect the measured times keeps its default. Errors that are larger than the noise count
linearly instead of squared (Huber's loss), so that a disturbed step or an unusual machine does not dominate. The
minimum is found by a pattern search, which needs no derivatives.

Each step of a run is a separate measurement. Because steps train on different numbers of tokens, the fit can
distinguish the fixed cost of a step from the cost per token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from rljob_planner.advice.comparison import STEP, process_bytes
from rljob_planner.advice.run_facts import RunFacts, observed_workload, workload_for_memory
from rljob_planner.constants import Constants
from rljob_planner.errors import PlanError
from rljob_planner.memory.host_state import PROCESS_BYTES
from rljob_planner.memory.phases import phases_of
from rljob_planner.timing.step import OTHER, step_time
from rljob_planner.workload import Placement, Role, Workload

LEAST_STEPS = 3
"""The smallest number of steps that a run must have after its first one. A median of fewer steps is not reliable."""
LARGEST_MISS = 1.5
"""The largest accepted ratio of predicted to measured seconds of a step, and of measured to predicted ones. Steps that
take more than this many times as long as the median step count as disturbed and are left out."""
_LARGEST_SHARE = 0.02
"""The largest plausible fixed time of a pass or an update, as a share of a step."""
_FIRST_MOVE, _LAST_MOVE = 1.0, 1e-3
"""Sizes of the first and the last move of a value, in widths."""
_MAX_ROUNDS = 1000
"""The largest number of rounds of the search. A round computes the loss at most 2n + 1 times for n values."""
_CLOSE_ENOUGH = 1e-5
"""If a round lowers the loss by less than this share, the moves become smaller."""
_LEAST_SECONDS = 1e-3
"""Shorter times count as this long, because logarithms of tiny times would dominate."""
_LARGEST_LOGARITHM = 3.0
"""The largest logarithm of a factor: a constant changes at most by a factor of 20."""


@dataclass(frozen=True)
class Observation:
    """Measured seconds of the phases of a step, or means over several steps. Keys are those of the metrics
    `timing_s/...`; `step` is the whole step."""

    workload: Workload
    placement: Placement
    seconds: Mapping[str, float]


@dataclass(frozen=True)
class CalibrationRun:
    """A run for a calibration: the name of its folder, its measurements, and its job."""

    name: str
    facts: RunFacts
    workload: Workload
    placement: Placement


@dataclass(frozen=True)
class Adjustable:
    """Constants that a fit changes together: by the same factor or, if `unit` is set, by the same amount in seconds."""

    width: float
    """Standard deviation of the change that is assumed before the fit: of the logarithm of the factor, or of the amount
    divided by `unit`."""
    fields: tuple[str, ...]
    unit: float = 0.0

    def applied(self, constants: Constants, value: float) -> Constants:
        """The constants with this change. `value`: logarithm of the factor, or amount in units."""

        def changed(each: float, limit: float) -> float:
            return each + max(0.0, value) * self.unit if self.unit else min(limit, each * math.exp(value))

        found = vars(constants).copy()
        for name in self.fields:
            now, limit = found[name], 1.0 if "efficiency" in name else math.inf
            is_by_kind = isinstance(now, dict)
            found[name] = (
                {kind: changed(each, limit) for kind, each in now.items()} if is_by_kind else changed(now, limit)
            )
        return Constants(**found)

    def bounded(self, value: float) -> float:
        """The value within its bounds; an amount is not negative."""
        return max(0.0, value) if self.unit else min(_LARGEST_LOGARITHM, max(-_LARGEST_LOGARITHM, value))


FORWARD_EFFICIENCY = Adjustable(0.3, ("forward_efficiency",))
PASS_EFFICIENCY = Adjustable(0.5, ("training_efficiency", "forward_efficiency"))
"""Changes the efficiency of updates and that of passes without backward by the same factor."""
DECODE_STEP = Adjustable(0.7, ("decode_step_seconds", "expert_decode_step_seconds"))
DECODE_SEQUENCE = Adjustable(0.7, ("decode_sequence_seconds",))
DECODE_BANDWIDTH = Adjustable(0.2, ("decode_bandwidth_efficiency",))
DECODE_COMPUTE = Adjustable(0.5, ("decode_compute_efficiency",))
PER_STEP = Adjustable(0.7, ("step_seconds",))
PER_PASS = Adjustable(1.0, ("pass_seconds",), unit=0.05)
PER_UPDATE = Adjustable(1.0, ("update_seconds",), unit=0.1)
PER_WAKE_UP = Adjustable(1.0, ("wake_seconds",), unit=1.0)


def cpu_constants() -> Constants:
    """Default constants for workers on CPU cores. There are no kernel launches, and calls take hundredths of a second.
    Measured on a machine with two cores."""
    return Constants(
        decode_step_seconds=2e-3, decode_sequence_seconds=5e-5, step_seconds=0.02, process_bytes=PROCESS_BYTES
    )


def calibrated(runs: Sequence[CalibrationRun], constants: Constants) -> Constants:
    """The constants, fitted to these runs of one machine or cluster.

    Raises:
        PlanError: a run has too few steps, the runs are on different GPU types, or the fitted constants do not predict
            the steps of these runs.
    """
    kinds = {pool.gpu.name for run in runs for pool in run.placement.pools}
    if len(kinds) != 1:
        raise PlanError(
            f"--calibrate: the runs are on different GPU types ({', '.join(sorted(kinds))}); calibrate each type"
            " separately"
        )
    for run in runs:
        if len(run.facts.steps) < LEAST_STEPS:
            raise PlanError(
                f"{run.name}: too few steps to calibrate (seen {run.facts.num_steps}, with the first); use a run of"
                f" at least {LEAST_STEPS + 1} steps"
            )
    is_cpu = any(pool.gpu.is_cpu for run in runs for pool in run.placement.pools)
    # PASS_EFFICIENCY also changes the efficiency of passes without backward, for runs that have no such passes. On
    # CPUs, decoding is limited by compute, and the work per sequence runs on the same cores.
    largest_fixed = _LARGEST_SHARE * min(run.facts.step.median for run in runs)
    small = [replace(each, unit=min(each.unit, largest_fixed)) for each in (PER_PASS, PER_UPDATE)]
    adjustables = [PASS_EFFICIENCY, FORWARD_EFFICIENCY, DECODE_STEP, DECODE_BANDWIDTH, PER_STEP, *small, PER_WAKE_UP]
    adjustables += [DECODE_SEQUENCE, DECODE_COMPUTE] if is_cpu else []
    fitted = fit(constants, [each for run in runs for each in observations_of(run)], adjustables)
    for run in runs:
        _check_fit(run, fitted)
    if is_cpu:
        fitted = replace(fitted, process_bytes=_unexplained_bytes(runs, fitted))
    return replace(
        fitted,
        training_efficiency={kind: fitted.training_efficiency[kind] for kind in kinds},
        forward_efficiency={kind: fitted.forward_efficiency[kind] for kind in kinds},
        source=", ".join(run.name for run in runs),
    )


def observations_of(run: CalibrationRun) -> tuple[Observation, ...]:
    """One observation per step. Steps that took far longer than the median step are left out."""
    found = []
    for step in run.facts.steps:
        if step.seconds <= LARGEST_MISS * run.facts.step.median:
            seconds = {name: each for name, each in step.phases.items() if name != OTHER} | {STEP: step.seconds}
            found.append(Observation(observed_workload(run.workload, step), run.placement, seconds))
    return tuple(found)


def _check_fit(run: CalibrationRun, fitted: Constants) -> None:
    """Raises PlanError if the fitted constants do not predict the measured step. Constants are bounded, so implausible
    times cannot be fitted."""
    predicted = step_time(observed_workload(run.workload, run.facts), run.placement, fitted).total.likely
    measured = run.facts.step.median
    if not measured / LARGEST_MISS <= predicted <= measured * LARGEST_MISS:
        raise PlanError(
            f"{run.name}: no plausible constants explain the time of its steps (measured {measured:.3g} s per step, the"
            f" best fit predicts {predicted:.3g} s); check timing_s/step in its metrics and the GPU type, or leave out"
            " the run"
        )


def _unexplained_bytes(runs: Sequence[CalibrationRun], constants: Constants) -> float:
    """The measured memory of a worker process that the planner's formulas do not explain, as a mean over the runs: the
    memory of libraries, including buffers that they keep. The constant as it is if no run has measured the process."""
    bare, found = replace(constants, process_bytes=0.0), []
    for run in (run for run in runs if "process" in run.facts.memory):
        workload, pool = workload_for_memory(run.workload, run.facts), run.placement.pool_of(Role.ACTOR)
        explained = process_bytes(phases_of(pool, workload, bare), workload, pool.rollout)
        found.append(run.facts.memory["process"] - explained)
    return max(0.0, fmean(found)) if found else constants.process_bytes


def fit(
    constants: Constants,
    observations: Sequence[Observation],
    adjustables: Sequence[Adjustable],
    noise: float = 0.05,
) -> Constants:
    """The constants, changed as little as necessary to predict the observations well.

    `noise`: the relative error of a measurement that even a correct model would have. The new `spread` is twice the
    root mean square of the remaining errors of steps (or of phases, if no step was measured), between 0.1 and the old
    value.
    """
    if not observations:
        return constants
    kinds = {pool.gpu.name for each in observations for pool in each.placement.pools}
    training = {kind: constants.training_efficiency_of(kind) for kind in kinds}
    forward = {kind: constants.forward_efficiency_of(kind) for kind in kinds}
    with_all_kinds = replace(
        constants,
        training_efficiency=dict(constants.training_efficiency) | training,
        forward_efficiency=dict(constants.forward_efficiency) | forward,
    )
    problem = _Problem(with_all_kinds, observations, adjustables, noise)
    fitted = problem.constants_at(problem.least())
    errors = [_errors(each, fitted) for each in observations]
    remaining = [each[STEP] for each in errors if STEP in each] or [error for each in errors for error in each.values()]
    rms = math.sqrt(fmean(each * each for each in remaining)) if remaining else constants.spread
    return replace(fitted, spread=min(constants.spread, max(0.1, 2 * rms)))


@dataclass(frozen=True)
class _Problem:
    """The loss function of a fit, and the search for its minimum."""

    constants: Constants
    observations: Sequence[Observation]
    adjustables: Sequence[Adjustable]
    noise: float

    def constants_at(self, values: Sequence[float]) -> Constants:
        """The constants with these values of `Adjustable.applied`, one for each adjustable."""
        found = self.constants
        for adjustable, value in zip(self.adjustables, values, strict=True):
            found = adjustable.applied(found, value) if value else found
        return found

    def loss(self, values: Sequence[float]) -> float:
        """The squared changes of the constants, plus the Huber losses of the measurements. A measurement is weighted by
        its share of a step."""
        constants = self.constants_at(values)
        found = sum((value / each.width) ** 2 for each, value in zip(self.adjustables, values, strict=True))
        for each in self.observations:
            whole = each.seconds.get(STEP, sum(each.seconds.values()))
            for name, error in _errors(each, constants).items():
                residual = abs(error) / self.noise * math.sqrt(min(1.0, each.seconds[name] / whole))
                found += residual * residual if residual <= 1 else 2 * residual - 1
        return found

    def least(self) -> list[float]:
        """The values with the smallest loss that a pattern search finds (Hooke and Jeeves 1961).

        A round moves each value up or down. The next round starts at the point that would be reached by making the same
        moves again. If this point is not better, it starts at the values themselves. If no move lowers the loss, moves
        become half as large.
        """
        values, size = [0.0] * len(self.adjustables), _FIRST_MOVE
        before, loss = values, self.loss(values)
        for _ in range(_MAX_ROUNDS):
            if size <= _LAST_MOVE:
                break
            moves = zip(self.adjustables, values, before, strict=True)
            ahead = [each.bounded(2 * now - old) for each, now, old in moves]
            tried, less = self.moved(ahead, self.loss(ahead), size)
            if less < (1 - _CLOSE_ENOUGH) * loss:
                before, values, loss = values, tried, less
            elif before != values:
                before = values
            else:
                size /= 2
        return values

    def moved(self, values: list[float], loss: float, size: float) -> tuple[list[float], float]:
        """The values after one round, and their loss. Each value is moved by `size` widths in the direction that lowers
        the loss. It stays if neither direction does."""
        for index, each in enumerate(self.adjustables):
            for move in (size * each.width, -size * each.width):
                tried = [*values[:index], each.bounded(values[index] + move), *values[index + 1 :]]
                if (less := self.loss(tried)) < loss:
                    values, loss = tried, less
                    break
        return values, loss


def _errors(observation: Observation, constants: Constants) -> dict[str, float]:
    """ln(predicted / measured) of each phase that was predicted and measured."""
    time = step_time(observation.workload, observation.placement, constants)
    predicted = {each.name: each.waited.likely for each in time.phases} | {STEP: time.total.likely}
    return {
        name: math.log(max(predicted[name], _LEAST_SECONDS) / max(seconds, _LEAST_SECONDS))
        for name, seconds in observation.seconds.items()
        if name in predicted and seconds > 0
    }
