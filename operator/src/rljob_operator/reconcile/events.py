"""What people read under `kubectl describe`: one event for each change of a condition that is worth one."""

from __future__ import annotations

from rljob_api.conditions import Reason
from rljob_api.v1alpha1.status import RLJobStatus
from rljob_operator.reconcile.plan_types import EventRecord, EventType

MAX_BYTES = 1024
"""Of an event's note, as the API server counts it."""

_QUIET = (
    *(Reason.VALID, Reason.PODS_PENDING, Reason.FEASIBLE, Reason.SUBMITTING, Reason.NO_CHECKPOINT_YET),
    *(Reason.ENDED, Reason.RAY_NODES_MISSING, Reason.NEXT_ATTEMPT_STARTED, Reason.SUSPENDING),
)
"""Said by the event before or after."""

_GOOD = (
    *(Reason.CREATING, Reason.READY, Reason.SUBMITTED, Reason.STARTING, Reason.TRAINING, Reason.STOPPING),
    *(Reason.SAVED, Reason.SUCCEEDED, Reason.REMOVED, Reason.KEPT, Reason.SUSPENDED, Reason.RESUMED, Reason.RESIZED),
    Reason.WAITING_FOR_NEXT_ATTEMPT,
)


def events_between(before: RLJobStatus, after: RLJobStatus) -> tuple[EventRecord, ...]:
    """In the order of the conditions. A reason that two conditions give is told once, by the later of them."""
    known = {condition.type: (condition.status, condition.reason) for condition in before.conditions}
    changed = {
        condition.reason: condition
        for condition in after.conditions
        if known.get(condition.type) != (condition.status, condition.reason)
    }
    return tuple(
        EventRecord(
            type=EventType.NORMAL if reason in _GOOD else EventType.WARNING,
            reason=Reason(reason),
            message=_bounded(condition.message or condition.type),
        )
        for reason, condition in changed.items()
        if reason not in _QUIET
    )


def _bounded(text: str) -> str:
    return text.encode()[:MAX_BYTES].decode(errors="ignore")
