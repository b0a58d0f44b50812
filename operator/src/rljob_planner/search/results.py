"""What a search has found."""

from __future__ import annotations

from dataclasses import dataclass

from rljob_planner.memory.changes import Change
from rljob_planner.plan import Plan
from rljob_planner.workload import Workload

TIE_SHARE = 0.1
"""Plans whose steps are no longer than the fastest one's by this share are as good as it: the model is no finer."""


@dataclass(frozen=True)
class Candidate:
    """One of the best placements: of a grouping of roles on kinds of GPUs the fastest one, or a simpler one that is
    nearly as fast."""

    plan: Plan
    """Without knobs."""
    is_tie: bool
    """Whether it is among those that are as good as the fastest."""
    reasons: tuple[str, ...] = ()
    """Why it is behind the first, as sentences; none for the first."""

    @property
    def runs_today(self) -> bool:
        """Whether this version of the trainer can run it."""
        return self.plan.placement.runs_today

    @property
    def seconds(self) -> float:
        """Of a step, likely."""
        return self.plan.step.total.likely


@dataclass(frozen=True)
class ChangedJob:
    """A job that would have a mapping."""

    changes: tuple[Change, ...]
    """Of fields other than pools and layouts, which the mapping gives."""
    workload: Workload
    result: SearchResult


@dataclass(frozen=True)
class NearestMiss:
    """Where nothing fits: what comes closest."""

    plan: Plan
    """With the knobs that would make it fit."""
    advice: str
    """What it is and what it lacks, as a sentence."""
    changed: ChangedJob | None = None
    """The first change, or the first two, with which there is a mapping on these GPUs, and the best of them."""


@dataclass(frozen=True)
class SearchResult:
    """`candidates` is empty, and there is a nearest miss, where nothing fits."""

    candidates: tuple[Candidate, ...]
    """Best first: among ties the simplest, then by seconds."""
    best_today: Candidate | None
    """The first of those that this version can run; it may be none of the candidates."""
    nearest_miss: NearestMiss | None = None
    limits: tuple[str, ...] = ()
    """What was not tried, as sentences."""
