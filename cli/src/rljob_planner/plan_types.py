"""The results of a plan: the memory of each phase, in bytes on the fullest GPU, and the seconds of each phase."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Phase(StrEnum):
    """The phases of a run for which a memory peak is computed. docs/memory.md lists what is in memory during each."""

    ENGINE_START = "engine start"
    FIRST_WAKE = "first wake-up"
    LATER_WAKE = "later wake-ups"
    SYNC = "weight sync"
    GENERATION = "generation"
    LOGPROBS = "log-probs"
    """All passes without backward: log-probabilities of actor and reference, values, scores of the reward model."""
    CRITIC_UPDATE = "critic update"
    UPDATE = "update"
    CHECKPOINT = "checkpoint"


@dataclass(frozen=True)
class Part:
    """Memory that is used for one purpose (its owner)."""

    owner: str
    """What the memory holds: `actor parameters`, `KV cache`, `ref activations`, ..."""
    num_bytes: float
    formula: str = ""
    """The formula with its numbers, for `--explain`: `4 x 8.2e9 / 8`. Empty if there is none."""


Parts = tuple[Part, ...]


@dataclass(frozen=True)
class PhaseMemory:
    """The memory of one GPU of a pool at the peak of a phase, in bytes."""

    phase: Phase
    pool: str
    parts: Parts
    limit: float
    """Bytes that the job may use on the GPU."""
    kv_cache_shortage: float = 0.0
    """Bytes that the KV cache lacks to hold one sequence of the largest length; 0 if it is large enough."""

    @property
    def total(self) -> float:
        """Bytes of all parts."""
        return sum(part.num_bytes for part in self.parts)

    @property
    def spare(self) -> float:
        """Free bytes. Negative if the phase does not fit, or if its KV cache is too small for one sequence."""
        room = self.limit - self.total
        return min(room, -self.kv_cache_shortage) if self.kv_cache_shortage else room


TIGHT_SHARE = 0.1
"""If a phase has a smaller share of free memory than this, the job is tight."""


class Verdict(StrEnum):
    """Whether the memory of a job fits on its GPUs."""

    FITS = "fits"
    """At least a tenth of the memory is free in every phase."""
    TIGHT = "tight"
    """Every phase fits, but in some phase less than a tenth of the memory is free."""
    TOO_LARGE = "does not fit"


def verdict_of(phases: tuple[PhaseMemory, ...]) -> Verdict:
    """The verdict of the worst phase: the one with the smallest share of free memory."""
    if any(each.spare < 0 for each in phases):
        return Verdict.TOO_LARGE
    return Verdict.TIGHT if any(each.spare < TIGHT_SHARE * each.limit for each in phases) else Verdict.FITS


def fails_from_second_step(phases: tuple[PhaseMemory, ...]) -> bool:
    """Whether the first step fits but later steps do not, because the optimizer's moments exist from the first update
    on. Always false for transformers, because such a run has no phase LATER_WAKE."""
    too_large = {phase.phase for phase in phases if phase.spare < 0}
    return Phase.LATER_WAKE in too_large and too_large <= {Phase.LATER_WAKE, Phase.GENERATION, Phase.SYNC}


@dataclass(frozen=True)
class Seconds:
    """An estimate of a time, with a range that shows how uncertain it is."""

    low: float
    likely: float
    high: float

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(self.low + other.low, self.likely + other.likely, self.high + other.high)

    def times(self, factor: float) -> Seconds:
        """All three multiplied by `factor`."""
        return Seconds(self.low * factor, self.likely * factor, self.high * factor)


@dataclass(frozen=True)
class PhaseTime:
    """The time of one phase of a step. These phases are not those of `Phase`: each has the name of its metric,
    `timing_s/NAME` (docs/metrics.md)."""

    name: str
    """`weight_sync`, `generate`, `reward`, `old_logprob`, `ref`, `values`, `update_critic`, `update_actor`, ..."""
    pool: str
    seconds: Seconds
    bound_by: str
    """`compute`, `memory bandwidth`, `the network`, `the longest response`, ..."""
    assumption: str
    """What the estimate assumes, as text: reached speeds, response lengths."""
    formula: str
    """The formula with its numbers, for `--explain`."""
    waited: Seconds
    """The expected value of the metric: how long the controller waits for this phase after the phases before it have
    ended. Less than `seconds` if the phase runs at the same time as a phase on another pool."""


@dataclass(frozen=True)
class StepTime:
    """The time of a step. Phases on one pool run one after the other. While phases of several pools run at the same
    time, only the longest counts."""

    phases: tuple[PhaseTime, ...]
    total: Seconds
    bound_by: str
    """The longest phase, and what limits its speed: `mostly generate: memory bandwidth`."""
