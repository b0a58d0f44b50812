"""Phase and reason of a job: two words for people, from the records and the conditions of one status."""

from __future__ import annotations

from rljob_api.conditions import ConditionType
from rljob_api.v1alpha1.status import AttemptOutcome, AttemptState, ConditionStatus, RLJobStatus

_GETS_THERE_BY = (
    ConditionType.SPEC_VALID,
    ConditionType.CLUSTER_READY,
    ConditionType.PLACEMENT_FEASIBLE,
    ConditionType.JOB_SUBMITTED,
)


def phase_of(status: RLJobStatus) -> str:
    """Where the job is."""
    if status.result is not None:
        return "Complete" if status.result.outcome == AttemptOutcome.SUCCEEDED else "Failed"
    if status.suspended_at is not None:
        return "Suspended"
    if status.next_attempt is not None:
        return "Retrying"
    if not status.attempts:
        return "Pending"
    attempt = status.attempts[-1]
    return AttemptState.STOPPING.value if attempt.ended is not None else attempt.state


def reason_of(status: RLJobStatus) -> str | None:
    """Why it is there: the reason of the ending, of the next attempt, or of the first condition that does not hold."""
    if status.result is not None:
        return status.result.reason
    if status.next_attempt is not None:
        return status.next_attempt.reason
    told = {condition.type: condition for condition in status.conditions}
    if status.suspended_at is not None:
        return "Suspended"
    for kind in _GETS_THERE_BY:
        found = told.get(kind)
        if found is not None and found.status is not ConditionStatus.TRUE:
            return found.reason
    progressing = told.get(ConditionType.PROGRESSING)
    return progressing.reason if progressing is not None else None
