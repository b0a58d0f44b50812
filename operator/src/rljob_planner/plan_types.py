"""What a plan is made of: memory phase by phase, in bytes of the fullest GPU, and seconds of the parts of a step."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Phase(StrEnum):
    """Parts of a run with a peak of their own. Names of boundaries are those of docs/memory.md."""

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
    """One owner's share."""

    owner: str
    """`actor parameters`, `KV cache`, `ref activations`, ..."""
    num_bytes: float
    formula: str = ""
    """With numbers put in, for `--explain`: `4 x 8.2e9 / 8`."""


@dataclass(frozen=True)
class PhaseMemory:
    """What is on one GPU of a pool at the peak of a phase."""

    phase: Phase
    pool: str
    parts: tuple[Part, ...]
    limit: float
    """What the GPU has for it."""
    lacks: float = 0.0
    """What a part with a limit of its own has too little of: the engine's KV cache, for one longest sequence."""

    @property
    def total(self) -> float:
        """Of all parts."""
        return sum(part.num_bytes for part in self.parts)

    @property
    def spare(self) -> float:
        """Below 0 where it does not fit."""
        room = self.limit - self.total
        return min(room, -self.lacks) if self.lacks else room


class Verdict(StrEnum):
    """Of a pool or a whole placement."""

    FITS = "fits"
    """A tenth or more is spare."""
    TIGHT = "tight"
    TOO_LARGE = "does not fit"


def verdict_of(phases: tuple[PhaseMemory, ...]) -> Verdict:
    """The worst of them."""
    if any(each.spare < 0 for each in phases):
        return Verdict.TOO_LARGE
    return Verdict.TIGHT if any(each.spare < 0.1 * each.limit for each in phases) else Verdict.FITS


def fails_from_second_step(phases: tuple[PhaseMemory, ...]) -> bool:
    """Whether a first step fits, and only what comes with the optimizer's moments, from the second one on, does not."""
    too_large = {phase.phase for phase in phases if phase.spare < 0}
    return Phase.LATER_WAKE in too_large and too_large <= {Phase.LATER_WAKE, Phase.GENERATION, Phase.SYNC}


@dataclass(frozen=True)
class Peak:
    """Of a train engine's passes: what is there beyond the state that stays."""

    resident: float
    """Shards that stay on the device between passes: parameters, and moments unless they are offloaded."""
    transient: float
    """What comes on top of that at the worst moment: gradients, gathered parameters, activations."""
    bound_by: str
    """The worst moment: `activations of a layer`, `output head`, `end of backward`, `optimizer step`."""
    parts: tuple[Part, ...] = ()
    """All of it, for people; their sum is `resident` + `transient`."""


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
    """With numbers put in, for `--explain`."""
    waited: Seconds
    """What the metric of this name shows where pools work beside each other: what is still waited for after the phases
    before it."""


@dataclass(frozen=True)
class StepTime:
    """A step: phases of one pool follow each other; what pools do beside each other is counted once."""

    phases: tuple[PhaseTime, ...]
    total: Seconds
    bound_by: str
    """The phase that most of it goes to, and what bounds that."""
