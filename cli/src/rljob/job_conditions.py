"""Reads a job's status: its conditions, how the job finished, and what it waits for.

How the job finished is in `status.result`; if that is missing, in the conditions.

See also: `job_attempts` derives more from the whole job.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from rljob_api.conditions import ConditionType
from rljob_api.v1alpha1.status import AttemptOutcome, Condition, ConditionStatus, RLJobStatus

_MUST_BE_TRUE = (
    ConditionType.SPEC_VALID,
    ConditionType.QUOTA_RESERVED,
    ConditionType.CLUSTER_READY,
    ConditionType.PLACEMENT_FEASIBLE,
    ConditionType.JOB_SUBMITTED,
    ConditionType.PROGRESSING,
)
"""Conditions that a training job needs, in the order in which they become True."""


@dataclass(frozen=True)
class Ending:
    """How a job finished."""

    kind: str
    """`Complete` or `Failed`; a newer operator may have others."""
    reason: str
    message: str
    at: datetime
    cleaned_up_at: str | None = None
    """The time when the job's RayClusters had been deleted (with `runPolicy.cleanup: KeepCluster`, all except the kept
    one). None before, and if `status.result` cannot be parsed."""

    @property
    def is_complete(self) -> bool:
        """Whether the job succeeded."""
        return self.kind == ConditionType.COMPLETE


def moment(timestamp: str) -> datetime:
    """The time of a timestamp in a status."""
    return datetime.fromisoformat(timestamp)


def condition(status: RLJobStatus, kind: ConditionType) -> Condition | None:
    """The condition of this type; None if the operator has not set it yet."""
    return next((found for found in status.conditions if found.type == kind), None)


def is_true(status: RLJobStatus, kind: ConditionType) -> bool:
    """Whether a condition is True; False if it is not set yet."""
    found = condition(status, kind)
    return found is not None and found.status is ConditionStatus.TRUE


def ending(status: RLJobStatus) -> Ending | None:
    """How the job finished; None if it has not finished."""
    result = status.result
    if result is not None:
        kind = ConditionType.COMPLETE.value if result.outcome == AttemptOutcome.SUCCEEDED else result.outcome
        return Ending(kind, result.reason, result.message, moment(result.at), result.cleaned_up_at)
    for end in (ConditionType.COMPLETE, ConditionType.FAILED):
        found = condition(status, end)
        if found is not None and found.status is ConditionStatus.TRUE:
            return Ending(end.value, found.reason, found.message, moment(found.last_transition_time))
    return None


def waits_for(status: RLJobStatus) -> Condition | None:
    """The first condition that is not True and blocks an unfinished job from training; None if there is none."""
    for kind in _MUST_BE_TRUE:
        found = condition(status, kind)
        if found is not None and found.status is not ConditionStatus.TRUE:
            return found
    return None
