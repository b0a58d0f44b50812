"""The distribution of response lengths: log-normal, truncated at the job's limit.

A coefficient of variation of 0.6 to 1 fits the logs of three verl runs; 0.35 fits models whose long reasoning comes
near the limit. Rollout engines stop at the limit, so a response that would be longer has the limit as its length. The
share of such responses is `clipped_share`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from statistics import NormalDist

from rljob_planner.workload import TokenLengths

_NORMAL = NormalDist()
_NUM_MOMENT_POINTS = 512
"""Number of points, all with the same weight, from which the mean of the squares is computed."""


@dataclass(frozen=True)
class Lengths:
    """The distribution of response lengths in tokens. `cap`: the limit. `location` and `scale`: mean and standard
    deviation of the natural logarithm of the length, before truncation. With scale 0, all responses have the same
    length."""

    cap: int
    location: float = 0.0
    scale: float = 0.0

    def quantile(self, share: float) -> float:
        """The length that is not exceeded by this share (between 0 and 1) of the responses."""
        deviation = self.scale * _NORMAL.inv_cdf(share) if self.scale else 0.0
        return min(float(self.cap), math.exp(self.location + deviation))

    @cached_property
    def mean(self) -> float:
        """Mean length after truncation."""
        return _clipped_mean(self.location, self.scale, self.cap)

    @cached_property
    def mean_square(self) -> float:
        """Mean of the squared lengths; the cost of attention depends on it."""
        return sum(each * each for each in self.spread_over(_NUM_MOMENT_POINTS)) / _NUM_MOMENT_POINTS

    @property
    def clipped_share(self) -> float:
        """Share of truncated responses."""
        if self.scale == 0:
            return 1.0 if math.exp(self.location) >= self.cap else 0.0
        return 1.0 - _NORMAL.cdf((math.log(self.cap) - self.location) / self.scale)

    def longest_of(self, count: int) -> float:
        """The expected length of the longest of `count` responses (approximately its median)."""
        return self.quantile(1 - 0.5 / max(1, count))

    def spread_over(self, count: int) -> tuple[float, ...]:
        """`count` lengths that represent the distribution, in ascending order. The responses are divided into `count`
        equal shares; each length is the middle of a share."""
        return tuple(self.quantile((index + 0.5) / count) for index in range(count))


@lru_cache(maxsize=256)
def lengths_of(lengths: TokenLengths, mean: float | None = None) -> Lengths:
    """The distribution of a job's response lengths. If `mean` is given, it is used instead of the job's mean, and the
    spread is that of `response_cv`."""
    cap = lengths.response_max
    wanted = lengths.response_mean if mean is None else mean
    if wanted >= cap:
        return Lengths(cap, location=math.log(cap))
    scale = math.sqrt(math.log1p(lengths.response_cv**2))
    clipped = lengths.clipped_share
    if clipped is not None and mean is None and 0 < clipped < 1:

        def excess_share(tried_scale: float) -> float:
            return Lengths(cap, _location(wanted, tried_scale, cap), tried_scale).clipped_share - clipped

        scale = _bisected(excess_share, 1e-3, 2.5)
    return Lengths(cap, _location(wanted, scale, cap), scale)


def _clipped_mean(location: float, scale: float, cap: float) -> float:
    """Mean of min(X, cap) for a log-normal X: exp(m + s^2 / 2) F((ln cap - m - s^2) / s) + cap (1 - F((ln cap - m) /
    s)), with location m, scale s and the standard normal distribution function F."""
    if scale == 0:
        return min(cap, math.exp(location))
    edge = (math.log(cap) - location) / scale
    below = math.exp(location + scale * scale / 2) * _NORMAL.cdf(edge - scale)
    return below + cap * (1 - _NORMAL.cdf(edge))


def _location(mean: float, scale: float, cap: float) -> float:
    """The location for which the mean after truncation is `mean`. The search by bisection ends at a location at which
    nearly all responses are truncated."""
    if scale == 0:
        return math.log(max(mean, 1e-9))
    return _bisected(lambda each: _clipped_mean(each, scale, cap) - mean, math.log(mean) - 10, math.log(cap) + 10)


def _bisected(rising: Callable[[float], float], low: float, high: float) -> float:
    """The argument, between `low` and `high`, at which an increasing function is zero."""
    for _ in range(60):
        middle = (low + high) / 2
        if rising(middle) < 0:
            low = middle
        else:
            high = middle
    return (low + high) / 2
