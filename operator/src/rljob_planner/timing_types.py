"""How long the parts of a step take, in seconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Seconds:
    """A range: what is not known is not hidden in one number."""

    low: float
    likely: float
    high: float

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(self.low + other.low, self.likely + other.likely, self.high + other.high)

    def times(self, factor: float) -> Seconds:
        """Each end by the same factor."""
        return Seconds(self.low * factor, self.likely * factor, self.high * factor)

    def at_least(self, other: Seconds) -> Seconds:
        """End by end the larger one."""
        return Seconds(max(self.low, other.low), max(self.likely, other.likely), max(self.high, other.high))


NO_TIME = Seconds(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class PhaseTime:
    """One phase of a step, under the name of its metric: `timing_s/NAME` (docs/metrics.md)."""

    name: str
    """`weight_sync`, `generate`, `reward`, `old_logprob`, `ref`, `values`, `update_critic`, `update_actor`, ..."""
    pool: str
    seconds: Seconds
    bound_by: str
    """`compute`, `memory bandwidth`, `network`, `the longest response`, ..."""
    assumption: str = ""
    formula: str = ""
    """With numbers put in, for `--explain`."""
    waited: Seconds | None = None
    """What the metric of this name shows where pools work beside each other: what is still waited for after the phases
    before it. None: all of `seconds`."""


@dataclass(frozen=True)
class StepTime:
    """A step: phases of one pool follow each other; what pools do beside each other is counted once."""

    phases: tuple[PhaseTime, ...]
    total: Seconds
    bound_by: str
    """The phase that most of it goes to, and what bounds that."""
