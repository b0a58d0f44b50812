"""Constants by what was measured: of one machine's own runs, or of published ones.

Each constant that is fitted is multiplied by a factor (or, where its default is 0, gets an amount), and the sum of
squares is made smallest of

    weight x ln(predicted / measured) / noise    for each phase and the whole step that was measured
    ln(factor) / width                           for each constant: how far from its default it is believed to be

so what the measurements say nothing about stays as it was. Beyond one noise a measurement's part grows evenly and not
as the square (Huber's loss): a step that went wrong, or a machine that is unlike the others, does not decide.
Gauss-Newton with slopes by differences; the step is halved while it makes nothing better.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from rljob_planner.constants import Constants
from rljob_planner.placement import Placement
from rljob_planner.timing.step import step_time
from rljob_planner.workload import Workload

STEP = "step"
"""The name of the whole step among measured phases."""
_DIFFERENCE = 1e-2
_MAX_ROUNDS = 20
_CLOSE_ENOUGH = 1e-6
_LEAST_SECONDS = 1e-3
_LARGEST = 3.0
"""Of the logarithm of a factor: what is further than 20 times from its default is not believed."""


@dataclass(frozen=True)
class Observation:
    """A step, or the mean of several of one run."""

    workload: Workload
    placement: Placement
    seconds: Mapping[str, float]
    """By the names of `timing_s/...`; the whole step is `step`."""


@dataclass(frozen=True)
class Adjustable:
    """A constant that a fit may change."""

    name: str
    width: float
    """Standard deviation of the logarithm of its factor, or of its amount as a multiple of `unit`, before anything is
    measured."""
    adjusted: Callable[[Constants, float, frozenset[str]], Constants]
    """By a factor, or an amount; the names are those of the kinds of GPU that occur."""
    unit: float = 0.0
    """Seconds, of a constant that gets an amount; 0 for one that gets a factor."""

    def applied(self, constants: Constants, value: float, kinds: frozenset[str]) -> Constants:
        """`value`: the logarithm of the factor, or the amount in units."""
        amount = max(0.0, value) * self.unit if self.unit else math.exp(value)
        return self.adjusted(constants, amount, kinds)


def _training(constants: Constants, factor: float, kinds: frozenset[str]) -> Constants:
    forward = {kind: constants.forward_efficiency_of(kind) for kind in kinds} | dict(constants.forward_efficiency)
    before = dict.fromkeys(kinds, constants.default_efficiency) | dict(constants.training_efficiency)
    training = {kind: min(1.0, factor * each) for kind, each in before.items()}
    return replace(constants, training_efficiency=training, forward_efficiency=forward)


def _forward(constants: Constants, factor: float, kinds: frozenset[str]) -> Constants:
    found = {kind: min(1.0, factor * constants.forward_efficiency_of(kind)) for kind in kinds}
    return replace(constants, forward_efficiency=dict(constants.forward_efficiency) | found)


def _passes(constants: Constants, factor: float, kinds: frozenset[str]) -> Constants:
    return _forward(_training(constants, factor, kinds), factor, kinds)


def _experts(constants: Constants, factor: float, kinds: frozenset[str]) -> Constants:
    del kinds
    return replace(constants, expert_efficiency_factor=factor * constants.expert_efficiency_factor)


def _decode_step(constants: Constants, factor: float, kinds: frozenset[str]) -> Constants:
    del kinds
    return replace(
        constants,
        decode_step_seconds=factor * constants.decode_step_seconds,
        expert_decode_step_seconds=factor * constants.expert_decode_step_seconds,
    )


def _decode_sequence(constants: Constants, factor: float, kinds: frozenset[str]) -> Constants:
    del kinds
    return replace(constants, decode_sequence_seconds=factor * constants.decode_sequence_seconds)


def _decode_bandwidth(constants: Constants, factor: float, kinds: frozenset[str]) -> Constants:
    del kinds
    reached = min(1.0, factor * constants.decode_bandwidth_efficiency)
    return replace(constants, decode_bandwidth_efficiency=reached)


def _per_step(constants: Constants, factor: float, kinds: frozenset[str]) -> Constants:
    del kinds
    return replace(constants, step_seconds=factor * constants.step_seconds)


def _per_pass(constants: Constants, amount: float, kinds: frozenset[str]) -> Constants:
    del kinds
    return replace(constants, pass_seconds=constants.pass_seconds + amount)


def _per_update(constants: Constants, amount: float, kinds: frozenset[str]) -> Constants:
    del kinds
    return replace(constants, update_seconds=constants.update_seconds + amount)


def _per_sync(constants: Constants, amount: float, kinds: frozenset[str]) -> Constants:
    del kinds
    return replace(constants, wake_seconds=constants.wake_seconds + amount)


TRAINING_EFFICIENCY = Adjustable("efficiency of updates", 0.5, _training)
FORWARD_EFFICIENCY = Adjustable("efficiency of passes", 0.5, _forward)
PASS_EFFICIENCY = Adjustable("efficiency of updates and passes together", 0.5, _passes)
EXPERT_EFFICIENCY = Adjustable("factor of experts", 0.5, _experts)
DECODE_STEP = Adjustable("seconds of a step of decoding", 0.7, _decode_step)
DECODE_SEQUENCE = Adjustable("seconds of a sequence in it", 0.7, _decode_sequence)
DECODE_BANDWIDTH = Adjustable("reached bandwidth in decoding", 0.2, _decode_bandwidth)
PER_STEP = Adjustable("fixed seconds of a step", 0.7, _per_step)
PER_PASS = Adjustable("fixed seconds of a pass", 1.0, _per_pass, unit=0.05)
PER_UPDATE = Adjustable("fixed seconds of an update", 1.0, _per_update, unit=0.1)
PER_SYNC = Adjustable("fixed seconds of a hand-over of weights", 1.0, _per_sync, unit=1.0)

OF_A_MACHINE = (
    TRAINING_EFFICIENCY,
    FORWARD_EFFICIENCY,
    DECODE_STEP,
    DECODE_BANDWIDTH,
    PER_STEP,
    PER_PASS,
    PER_UPDATE,
    PER_SYNC,
)
"""What the phases of runs on one machine tell apart."""


def fit(
    constants: Constants,
    observations: Sequence[Observation],
    adjustables: Sequence[Adjustable] = OF_A_MACHINE,
    noise: float = 0.05,
) -> Constants:
    """The constants nearest to these with which the observations are predicted best. `noise`: how far, as a share,
    measurements are from what a right model predicts. Their `spread` is twice the
    root mean square of what is left of the steps' (or, without, the phases') logarithms, between 0.1 and what it was.
    """
    if not observations:
        return constants
    problem = _Problem(constants, observations, tuple(adjustables), noise)
    values = [0.0] * len(adjustables)
    residuals = problem.residuals(values)
    for _ in range(_MAX_ROUNDS):
        found = _improved(problem, values, residuals)
        if found is None:
            break
        better = problem.loss(residuals) - problem.loss(found[1])
        values, residuals = found
        if better < _CLOSE_ENOUGH:
            break
    fitted = problem.constants_at(values)
    left = problem.relative_errors(fitted)
    rms = math.sqrt(sum(each * each for each in left) / len(left)) if left else constants.spread
    return replace(fitted, spread=min(constants.spread, max(0.1, 2 * rms)))


@dataclass(frozen=True)
class _Problem:
    constants: Constants
    observations: Sequence[Observation]
    adjustables: tuple[Adjustable, ...]
    noise: float

    @property
    def kinds(self) -> frozenset[str]:
        return frozenset(pool.gpu.name for each in self.observations for pool in each.placement.pools)

    def constants_at(self, values: Sequence[float]) -> Constants:
        found = self.constants
        for adjustable, value in zip(self.adjustables, values, strict=True):
            if value:
                found = adjustable.applied(found, value, self.kinds)
        return found

    def residuals(self, values: Sequence[float]) -> list[float]:
        """Weighted, those of the beliefs about constants last. Parts of a step count by their share of it."""
        constants = self.constants_at(values)
        found: list[float] = []
        for each in self.observations:
            whole = each.seconds.get(STEP, sum(each.seconds.values()))
            for name, error in _errors(each, constants).items():
                found.append(error / self.noise * math.sqrt(min(1.0, each.seconds[name] / whole)))
        return found + [value / each.width for each, value in zip(self.adjustables, values, strict=True)]

    def weights(self, residuals: Sequence[float]) -> list[float]:
        """With which squares are as steep as the loss is."""
        measured = len(residuals) - len(self.adjustables)
        return [1.0 if place >= measured else 1 / max(1.0, abs(each)) for place, each in enumerate(residuals)]

    def loss(self, residuals: Sequence[float]) -> float:
        """Huber's of what was measured, and the squares of the beliefs."""
        measured = len(residuals) - len(self.adjustables)
        of_measured = sum(each * each if abs(each) <= 1 else 2 * abs(each) - 1 for each in residuals[:measured])
        return of_measured + sum(each * each for each in residuals[measured:])

    def relative_errors(self, constants: Constants) -> list[float]:
        """Of steps; of phases where steps were not measured."""
        errors = [_errors(each, constants) for each in self.observations]
        of_steps = [each[STEP] for each in errors if STEP in each]
        return of_steps or [error for each in errors for error in each.values()]


def _errors(observation: Observation, constants: Constants) -> dict[str, float]:
    """ln(predicted / measured) of what was measured and is predicted."""
    time = step_time(observation.workload, observation.placement, constants)
    predicted = {each.name: (each.waited or each.seconds).likely for each in time.phases}
    predicted[STEP] = time.total.likely
    return {
        name: math.log(max(predicted[name], _LEAST_SECONDS) / max(seconds, _LEAST_SECONDS))
        for name, seconds in observation.seconds.items()
        if name in predicted and seconds > 0
    }


def _improved(problem: _Problem, values: list[float], residuals: list[float]) -> tuple[list[float], list[float]] | None:
    """The next values and their residuals; None where no step of Gauss-Newton makes the sum of squares smaller."""
    columns: list[list[float]] = []
    for place in range(len(values)):
        moved = list(values)
        moved[place] += _DIFFERENCE
        slope = [(b - a) / _DIFFERENCE for a, b in zip(residuals, problem.residuals(moved), strict=True)]
        columns.append(slope)
    roots = [math.sqrt(each) for each in problem.weights(residuals)]
    weighted = [[root * each for root, each in zip(roots, column, strict=True)] for column in columns]
    aims = [root * each for root, each in zip(roots, residuals, strict=True)]
    step = _step(weighted, aims, values, problem.adjustables)
    scale = 1.0
    for _ in range(8):
        tried = [
            _bounded(value + scale * each, adjustable)
            for value, each, adjustable in zip(values, step, problem.adjustables, strict=True)
        ]
        found = problem.residuals(tried)
        if problem.loss(found) < problem.loss(residuals):
            return tried, found
        scale /= 2
    return None


def _step(
    columns: list[list[float]], residuals: list[float], values: list[float], adjustables: Sequence[Adjustable]
) -> list[float]:
    """Of Gauss-Newton. Amounts that are 0 and would become less stay, and the others move as if they were not there."""
    free = list(range(len(columns)))
    while True:
        products = [[_dot(columns[left], columns[right]) for right in free] for left in free]
        found = _solved(products, [-_dot(columns[place], residuals) for place in free])
        falls = {
            place
            for place, each in zip(free, found, strict=True)
            if adjustables[place].unit and values[place] <= 0 and each < 0
        }
        if not falls:
            step = dict(zip(free, found, strict=True))
            return [step.get(place, 0.0) for place in range(len(columns))]
        free = [place for place in free if place not in falls]


def _bounded(value: float, adjustable: Adjustable) -> float:
    """An amount is not below 0."""
    return max(0.0, value) if adjustable.unit else min(_LARGEST, max(-_LARGEST, value))


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))


def _solved(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Gaussian elimination; the beliefs about constants keep the matrix positive definite, so nothing is swapped."""
    size = len(right)
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for place in range(size):
        for below in range(place + 1, size):
            factor = rows[below][place] / rows[place][place]
            rows[below] = [a - factor * b for a, b in zip(rows[below], rows[place], strict=True)]
    found = [0.0] * size
    for place in reversed(range(size)):
        known = sum(rows[place][other] * found[other] for other in range(place + 1, size))
        found[place] = (rows[place][size] - known) / rows[place][place]
    return found
