"""What memory is for, phase by phase. All numbers are bytes of one GPU, of the fullest one."""

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


WITHOUT_MOMENTS = (Phase.ENGINE_START, Phase.FIRST_WAKE)
"""Before the first update."""


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
