"""Constants by what was measured: of one machine's own runs, or of published ones.

Each constant that is fitted is multiplied by a factor (or, where its default is 0, gets an amount), and the sum of
squares is made smallest of

    weight x ln(predicted / measured) / noise    for each phase and the whole step that was measured
    ln(factor) / width                           for each constant: how far from its default it is believed to be

so what the measurements say nothing about stays as it was. Beyond one noise a measurement's part grows evenly and not
as the square (Huber's loss): a step that went wrong, or a machine that is unlike the others, does not decide. The
minimum is found by moving one constant after the other (a pattern search, which needs no derivatives).

Of a run each step is a measurement of its own, because steps differ in what they learn from, and that tells what a step
costs in any case from what each token costs.
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
from rljob_planner.job_memory import PROCESS_BYTES
from rljob_planner.memory.phases import phases_of
from rljob_planner.timing.step import OTHER, step_time
from rljob_planner.workload import Placement, Role, Workload

LEAST_STEPS = 3
"""Of a run beside the first one: with fewer the median says little."""
LARGEST_MISS = 1.5
"""How many times longer or shorter than a run's own step the fitted constants may find it; also how much longer than
the usual step one may be that is not left out as disturbed."""
_LARGEST_SHARE = 0.02
"""Of a step: what fixed seconds of a pass or an update are believed to be, at most."""
_FIRST_MOVE, _LAST_MOVE = 1.0, 1e-3
"""How far a value is moved at once, in its widths."""
_MAX_ROUNDS = 1000
"""Bound of the pattern search's time; each round computes the loss at most 2 n + 1 times for n values."""
_CLOSE_ENOUGH = 1e-5
"""Moves become smaller when they lower the loss by less than this share of it."""
_LEAST_SECONDS = 1e-3
_LARGEST = 3.0
"""Of the logarithm of a factor: what is further than 20 times from its default is not believed."""


@dataclass(frozen=True)
class Observation:
    """A step, or the mean of several of one run. Seconds by the names of `timing_s/...`; the whole step is `step`."""

    workload: Workload
    placement: Placement
    seconds: Mapping[str, float]


@dataclass(frozen=True)
class CalibrationRun:
    """A run, by the name of its folder, and the job that it is of, as its file says it."""

    name: str
    facts: RunFacts
    workload: Workload
    placement: Placement


@dataclass(frozen=True)
class Adjustable:
    """Constants that a fit may change together by a factor or, where there is a unit, by an amount in seconds."""

    width: float
    """Standard deviation of the logarithm of the factor, or of the amount as a multiple of `unit`, before anything is
    measured."""
    fields: tuple[str, ...]
    unit: float = 0.0

    def applied(self, constants: Constants, value: float) -> Constants:
        """`value`: the logarithm of the factor, or the amount in units."""

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
        """An amount is not below 0."""
        return max(0.0, value) if self.unit else min(_LARGEST, max(-_LARGEST, value))


FORWARD_EFFICIENCY = Adjustable(0.3, ("forward_efficiency",))
PASS_EFFICIENCY = Adjustable(0.5, ("training_efficiency", "forward_efficiency"))
"""Of updates and passes together."""
DECODE_STEP = Adjustable(0.7, ("decode_step_seconds", "expert_decode_step_seconds"))
DECODE_SEQUENCE = Adjustable(0.7, ("decode_sequence_seconds",))
DECODE_BANDWIDTH = Adjustable(0.2, ("decode_bandwidth_efficiency",))
DECODE_COMPUTE = Adjustable(0.5, ("decode_compute_efficiency",))
PER_STEP = Adjustable(0.7, ("step_seconds",))
PER_PASS = Adjustable(1.0, ("pass_seconds",), unit=0.05)
PER_UPDATE = Adjustable(1.0, ("update_seconds",), unit=0.1)
PER_SYNC = Adjustable(1.0, ("wake_seconds",), unit=1.0)


def cpu_constants() -> Constants:
    """Of workers on CPU cores before a run has shown more: nothing is launched there, and calls cost hundredths of a
    second. As seen on a machine of two cores."""
    return Constants(
        decode_step_seconds=2e-3, decode_sequence_seconds=5e-5, step_seconds=0.02, process_bytes=PROCESS_BYTES
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
    # A pass without backward that no step has is as efficient as an update is. On CPUs products bound decoding, too,
    # and sequences cost the host's time, which is the device's.
    fixed = _LARGEST_SHARE * min(run.facts.step.median for run in runs)
    small = [replace(each, unit=min(each.unit, fixed)) for each in (PER_PASS, PER_UPDATE)]
    adjustables = [PASS_EFFICIENCY, FORWARD_EFFICIENCY, DECODE_STEP, DECODE_BANDWIDTH, PER_STEP, *small, PER_SYNC]
    adjustables += [DECODE_SEQUENCE, DECODE_COMPUTE] if is_cpu else []
    fitted = fit(constants, [each for run in runs for each in observations_of(run)], adjustables)
    for run in runs:
        _check_fit(run, fitted)
    if is_cpu:
        fitted = replace(fitted, process_bytes=_process_bytes(runs, fitted))
    return replace(
        fitted,
        training_efficiency={kind: fitted.training_efficiency[kind] for kind in kinds},
        forward_efficiency={kind: fitted.forward_efficiency[kind] for kind in kinds},
        source=", ".join(run.name for run in runs),
    )


def observations_of(run: CalibrationRun) -> tuple[Observation, ...]:
    """One for each step. A step that took far longer than the others was disturbed, and is left out."""
    found = []
    for step in run.facts.steps:
        if step.seconds <= LARGEST_MISS * run.facts.step.median:
            seconds = {name: each for name, each in step.phases.items() if name != OTHER} | {STEP: step.seconds}
            found.append(Observation(observed_workload(run.workload, step), run.placement, seconds))
    return tuple(found)


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


def _process_bytes(runs: Sequence[CalibrationRun], constants: Constants) -> float:
    """What a worker's process has beyond what the model knows of: libraries, and what they keep."""
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
    """The constants nearest to these with which the observations are predicted best. `noise`: how far, as a share,
    measurements are from what a right model predicts. Their `spread` is twice the root mean square of what is left of
    the steps' (or, without, the phases') logarithms, between 0.1 and what it was."""
    if not observations:
        return constants
    kinds = {pool.gpu.name for each in observations for pool in each.placement.pools}
    training = {kind: constants.training_efficiency_of(kind) for kind in kinds}
    forward = {kind: constants.forward_efficiency_of(kind) for kind in kinds}
    own = replace(
        constants,
        training_efficiency=dict(constants.training_efficiency) | training,
        forward_efficiency=dict(constants.forward_efficiency) | forward,
    )
    problem = _Problem(own, observations, adjustables, noise)
    fitted = problem.constants_at(problem.least())
    errors = [_errors(each, fitted) for each in observations]
    left = [each[STEP] for each in errors if STEP in each] or [error for each in errors for error in each.values()]
    rms = math.sqrt(fmean(each * each for each in left)) if left else constants.spread
    return replace(fitted, spread=min(constants.spread, max(0.1, 2 * rms)))


@dataclass(frozen=True)
class _Problem:
    constants: Constants
    observations: Sequence[Observation]
    adjustables: Sequence[Adjustable]
    noise: float

    def constants_at(self, values: Sequence[float]) -> Constants:
        found = self.constants
        for adjustable, value in zip(self.adjustables, values, strict=True):
            found = adjustable.applied(found, value) if value else found
        return found

    def loss(self, values: Sequence[float]) -> float:
        """Squares of the beliefs, and Huber's loss of what was measured. Parts of a step count by their share of it."""
        constants = self.constants_at(values)
        found = sum((value / each.width) ** 2 for each, value in zip(self.adjustables, values, strict=True))
        for each in self.observations:
            whole = each.seconds.get(STEP, sum(each.seconds.values()))
            for name, error in _errors(each, constants).items():
                residual = abs(error) / self.noise * math.sqrt(min(1.0, each.seconds[name] / whole))
                found += residual * residual if residual <= 1 else 2 * residual - 1
        return found

    def least(self) -> list[float]:
        """The values with the least loss that a pattern search finds (Hooke and Jeeves 1961). Every value is moved up
        or down in turn. The next round begins ahead, where the same moves once more would lead, and from the values
        themselves when that does not help. When no move helps, moves become half as large."""
        values, size = [0.0] * len(self.adjustables), _FIRST_MOVE
        before, loss = values, self.loss(values)
        for _ in range(_MAX_ROUNDS):
            if size <= _LAST_MOVE:
                break
            places = zip(self.adjustables, values, before, strict=True)
            ahead = [each.bounded(2 * now - old) for each, now, old in places]
            tried, less = self.moved(ahead, self.loss(ahead), size)
            if less < (1 - _CLOSE_ENOUGH) * loss:
                before, values, loss = values, tried, less
            elif before != values:
                before = values
            else:
                size /= 2
        return values

    def moved(self, values: list[float], loss: float, size: float) -> tuple[list[float], float]:
        """With each value moved by `size` widths in the direction that lowers the loss, if one does."""
        for place, each in enumerate(self.adjustables):
            for move in (size * each.width, -size * each.width):
                tried = [*values[:place], each.bounded(values[place] + move), *values[place + 1 :]]
                if (less := self.loss(tried)) < loss:
                    values, loss = tried, less
                    break
        return values, loss


def _errors(observation: Observation, constants: Constants) -> dict[str, float]:
    """ln(predicted / measured) of what was measured and is predicted."""
    time = step_time(observation.workload, observation.placement, constants)
    predicted = {each.name: each.waited.likely for each in time.phases} | {STEP: time.total.likely}
    return {
        name: math.log(max(predicted[name], _LEAST_SECONDS) / max(seconds, _LEAST_SECONDS))
        for name, seconds in observation.seconds.items()
        if name in predicted and seconds > 0
    }
