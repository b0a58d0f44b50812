"""The parts of a plan: memory of each phase, in bytes on the fullest GPU, and seconds of each phase of a step."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Phase(StrEnum):
    """The phases of a run that have a memory peak of their own; docs/memory.md says what is in memory in each."""

    ENGINE_START = "engine start"
    FIRST_WAKE = "first wake-up"
    LATER_WAKE = "later wake-ups"
    SYNC = "weight sync"
    GENERATION = "generation"
    LOGPROBS = "log-probs"
    CRITIC_UPDATE = "critic update"
    UPDATE = "update"
    CHECKPOINT = "checkpoint"


@dataclass(frozen=True)
class Part:
    """The memory of one owner."""

    owner: str
    """`actor parameters`, `KV cache`, `ref activations`, ..."""
    num_bytes: float
    formula: str = ""
    """The formula with its numbers, for `--explain`: `4 x 8.2e9 / 8`."""


Parts = tuple[Part, ...]


@dataclass(frozen=True)
class PhaseMemory:
    """The memory of one GPU of a pool at the peak of a phase, in bytes."""

    phase: Phase
    pool: str
    parts: Parts
    limit: float
    """Memory that the job may use."""
    kv_cache_shortage: float = 0.0
    """Bytes that the KV cache lacks to hold one longest sequence; 0 if it is large enough."""

    @property
    def total(self) -> float:
        """Sum of all parts."""
        return sum(part.num_bytes for part in self.parts)

    @property
    def spare(self) -> float:
        """Free memory; negative if the phase does not fit."""
        room = self.limit - self.total
        return min(room, -self.kv_cache_shortage) if self.kv_cache_shortage else room


TIGHT_SHARE = 0.1
"""Share of free memory below which a job hardly fits."""


class Verdict(StrEnum):
    """Whether a pool or a placement fits."""

    FITS = "fits"
    """At least a tenth of the memory is free in every phase."""
    TIGHT = "tight"
    TOO_LARGE = "does not fit"


def verdict_of(phases: tuple[PhaseMemory, ...]) -> Verdict:
    """The verdict on the phase with the least free memory."""
    if any(each.spare < 0 for each in phases):
        return Verdict.TOO_LARGE
    return Verdict.TIGHT if any(each.spare < TIGHT_SHARE * each.limit for each in phases) else Verdict.FITS


def fails_from_second_step(phases: tuple[PhaseMemory, ...]) -> bool:
    """Whether the first step fits and later ones do not, because the optimizer's moments exist from the second on."""
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
    """One phase of a step, under the name of its metric: `timing_s/NAME` (docs/metrics.md)."""

    name: str
    """`weight_sync`, `generate`, `reward`, `old_logprob`, `ref`, `values`, `update_critic`, `update_actor`, ..."""
    pool: str
    seconds: Seconds
    bound_by: str
    """`compute`, `memory bandwidth`, `network`, `the longest response`, ..."""
    assumption: str
    formula: str
    """The formula with its numbers, for `--explain`."""
    waited: Seconds
    """What the metric of this name shows: the time that the controller still waits for this phase after the phases
    before it. Less than `seconds` if the phase runs at the same time as one on another pool."""


@dataclass(frozen=True)
class StepTime:
    """The time of a step. The phases of one pool follow each other; phases that run at the same time count once."""

    phases: tuple[PhaseTime, ...]
    total: Seconds
    bound_by: str
    """The longest phase and what bounds it: `generate: memory bandwidth`."""
