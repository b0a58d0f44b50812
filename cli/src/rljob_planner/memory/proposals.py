"""Searches for changes that make a job fit if it does not, or give it more room if it hardly fits.

The memory of the job is computed again with each change. A ladder is a list of changes of one field, each with another
value, the smallest change first: `maxTokensPerMicroBatch: 8192`, `4096`, `2048`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

from rljob_planner.constants import Constants
from rljob_planner.memory.job_changes import Change, ChangedJob, smaller_jobs
from rljob_planner.memory.phases import phases_of
from rljob_planner.plan_types import TIGHT_SHARE, PhaseMemory, Seconds, Verdict, verdict_of
from rljob_planner.workload import Placement, Workload

MAX_PAIRS = 6
"""The largest number of pairs of changes that are proposed."""
MAX_CHANGES = 4
"""The largest number of changes that are combined if no pair is enough."""


@dataclass(frozen=True)
class Proposal:
    """One or several changes that are made together, and the changed job."""

    changes: tuple[Change, ...]
    workload: Workload
    placement: Placement
    fullest_phase: PhaseMemory
    """The phase with the smallest share of free memory, over all pools."""
    verdict: Verdict
    missing: float
    """Bytes that are missing, summed over all phases. If the job without changes does not fit: bytes that a phase lacks
    to fit. If that job is tight: bytes that a phase lacks to leave a tenth of the memory free."""
    step_seconds: Seconds | None = None
    """Seconds of a step of the changed job, if they were computed."""


@dataclass(frozen=True)
class Proposals:
    """The result of a search."""

    fitting: tuple[Proposal, ...] = ()
    """Proposals that make the job fit or, if it is tight, leave a tenth free. Gentle ones come before drastic ones
    (more nodes, LoRA)."""
    nearest_miss: Proposal | None = None
    """If changes were tried and none is enough: the changes that come closest."""


def fullest_phase(phases: Iterable[PhaseMemory]) -> PhaseMemory:
    """The phase with the smallest share of free memory.

    Raises:
        ValueError: there are no phases.
    """
    return min(phases, key=lambda phase: phase.spare / phase.limit)


def all_phases(workload: Workload, placement: Placement, constants: Constants) -> tuple[PhaseMemory, ...]:
    """The phases of all pools."""
    return tuple(phase for pool in placement.pools for phase in phases_of(pool, workload, constants))


def find_proposals(
    workload: Workload, placement: Placement, constants: Constants, *, with_combinations: bool = True
) -> Proposals:
    """Proposals that make the job fit or, if it hardly fits, leave a tenth of the memory free; none if a tenth is free
    already. With `with_combinations`, changes are combined if no single gentle one is enough; that takes about ten
    times as long."""
    return _Search(workload, placement, constants).found(with_combinations=with_combinations)


class _Search:
    def __init__(self, workload: Workload, placement: Placement, constants: Constants) -> None:
        self.workload, self.placement, self.constants = workload, placement, constants
        phases = all_phases(workload, placement, constants)
        self.verdict = verdict_of(phases)
        self.margin = 0.0 if self.verdict is Verdict.TOO_LARGE else TIGHT_SHARE
        self.missing = self._missing(phases)
        self.closest: Proposal | None = None

    def found(self, *, with_combinations: bool) -> Proposals:
        if self.verdict is Verdict.FITS:
            return Proposals()
        helpful: list[_Key] = []
        gentle: list[Proposal] = []
        drastic: list[Proposal] = []
        for ladder in smaller_jobs(self.workload, self.placement):
            proposals = [self._proposal(each) for each in ladder]
            is_drastic = ladder[0].change.is_drastic
            if any(proposal.missing < self.missing for proposal in proposals) and not is_drastic:
                helpful.append(_key(ladder[0]))
            (drastic if is_drastic else gentle).extend(self._gentlest(proposals))
        if not gentle and with_combinations:
            pairs = [pair for pair in combinations(helpful, 2) if pair[0][0] != pair[1][0]]
            found = [proposal for pair in pairs for proposal in self._pair(*pair)]
            gentle = sorted(found, key=lambda proposal: proposal.verdict is Verdict.TIGHT)[:MAX_PAIRS]
        fitting = (*gentle, *drastic)
        if not fitting and with_combinations:
            fitting = tuple(self._together(self.workload, self.placement, self.missing))
        return Proposals(fitting, None if fitting else self.closest)

    def _pair(self, one: _Key, other: _Key) -> list[Proposal]:
        """The gentlest values of two fields that together make the job fit, in a list; empty if there are none.

        The value of `one` is chosen first: the gentlest that is enough beside the strongest value of `other`. Then the
        value of `other` is chosen: the gentlest that is enough beside that value of `one`.
        """
        for changed in _ladder(one, self.workload, self.placement):
            beside = _ladder(other, changed.workload, changed.placement)
            if beside and self._is_better(self._proposal(beside[-1], changed.change)):
                return self._gentlest([self._proposal(each, changed.change) for each in beside])
        return []

    def _together(
        self, workload: Workload, placement: Placement, missing: float, changes: tuple[Change, ...] = ()
    ) -> list[Proposal]:
        """Combines up to MAX_CHANGES changes into one proposal, in a list; empty if they are not enough. Each round
        adds the change after which the fewest bytes are missing, so not all combinations are tried.

        `missing`: the missing bytes of this job, which already has `changes`.
        """
        fields = {change.field for change in changes}
        changed = [each for ladder in smaller_jobs(workload, placement) for each in ladder]
        proposals = [self._proposal(each, *changes) for each in changed if each.change.field not in fields]
        best = min(proposals, key=lambda proposal: proposal.missing, default=None)
        if best is None or self._is_better(best):
            return [] if best is None else [best]
        if best.missing >= missing or len(best.changes) == MAX_CHANGES:
            return []
        return self._together(best.workload, best.placement, best.missing, best.changes)

    def _proposal(self, changed: ChangedJob, *before: Change) -> Proposal:
        """The proposal that makes the changes `before`, then that of `changed`. Also updates `closest`."""
        phases = all_phases(changed.workload, changed.placement, self.constants)
        worst, verdict, missing = fullest_phase(phases), verdict_of(phases), self._missing(phases)
        proposal = Proposal((*before, changed.change), changed.workload, changed.placement, worst, verdict, missing)
        if self.closest is None or worst.spare > self.closest.fullest_phase.spare:
            self.closest = proposal
        return proposal

    def _missing(self, phases: Iterable[PhaseMemory]) -> float:
        """See `Proposal.missing`."""
        return sum(max(0.0, self.margin * phase.limit - phase.spare) for phase in phases)

    def _is_better(self, proposal: Proposal) -> bool:
        """Whether the proposal has a better verdict than the job without changes."""
        order = (Verdict.FITS, Verdict.TIGHT, Verdict.TOO_LARGE)
        return order.index(proposal.verdict) < order.index(self.verdict)

    def _gentlest(self, ladder: Sequence[Proposal]) -> list[Proposal]:
        """In a list: the first proposal of a ladder that leaves a tenth of the memory free, else the first one that
        fits. Empty if there is none."""
        better = [proposal for proposal in ladder if self._is_better(proposal)]
        roomy = [proposal for proposal in better if proposal.verdict is Verdict.FITS]
        return (roomy or better)[:1]


_Key = tuple[str, int]
"""Field and direction (`ChangedJob.direction`) of a ladder."""


def _key(changed: ChangedJob) -> _Key:
    return changed.change.field, changed.direction


def _ladder(key: _Key, workload: Workload, placement: Placement) -> tuple[ChangedJob, ...]:
    """The jobs with the values of one ladder; empty if another change has made all of them invalid."""
    return next((each for each in smaller_jobs(workload, placement) if _key(each[0]) == key), ())
