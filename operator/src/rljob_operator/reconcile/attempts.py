"""Attempts: one start of the trainer each. They begin and end here; what follows from an ending, `retries` says."""

from __future__ import annotations

from rljob_api.conditions import ConditionType, Reason
from rljob_api.v1alpha1.status import Attempt, AttemptOutcome, AttemptState
from rljob_operator.manifests.naming import cluster_name
from rljob_operator.reconcile.endings import Ending
from rljob_operator.reconcile.failure_classes import FAILURE_CLASSES
from rljob_operator.reconcile.messages import both_ends_of
from rljob_operator.reconcile.observed import ObservedJob
from rljob_operator.reconcile.status_draft import FALSE, StatusDraft
from rljob_operator.reconcile.timestamps import seconds_since, timestamp

MAX_MESSAGE = 512
"""Characters of an attempt's message, as its schema says."""

_OF_ONE_ATTEMPT = (ConditionType.PLACEMENT_FEASIBLE, ConditionType.JOB_SUBMITTED, ConditionType.PROGRESSING)
_STOPPED = (
    *(Reason.SUSPENDED, Reason.RESIZED, Reason.ACTIVE_DEADLINE_EXCEEDED),
    *(Reason.STOPPED_BY_USER, Reason.STOPPED_OUTSIDE),
)
_NEXT = "another attempt has begun"


def start_attempt(draft: StatusDraft, job: ObservedJob, *, on_same_cluster: bool = False) -> None:
    """Notes the intent to make the next cluster, or to start on that of the attempt before; what is to be done follows
    once that is written."""
    number = draft.counters.attempts + 1
    former = draft.attempt if on_same_cluster else None
    draft.add_attempt(
        Attempt(
            number=number,
            cluster=former.cluster if former is not None else cluster_name(job.name, number),
            cluster_uid=former.cluster_uid if former is not None else None,
            admitted_at=timestamp(draft.now) if former is not None else None,
            started=timestamp(draft.now),
        )
    )
    draft.change_counters(attempts=number)
    draft.next_attempt = None
    draft.suspended_at = None
    if number > 1:
        for kind in _OF_ONE_ATTEMPT:
            draft.set_if_told(kind, FALSE, Reason.NEXT_ATTEMPT_STARTED, _NEXT)
    draft.set_if_told(ConditionType.RETRYING, FALSE, Reason.NEXT_ATTEMPT_STARTED, f"attempt {number} has begun")
    draft.set_if_told(ConditionType.SUSPENDED, FALSE, Reason.RESUMED, f"attempt {number} has begun")


def end_attempt(draft: StatusDraft, ending: Ending) -> None:
    """Writes down how the newest attempt ended, and counts its time."""
    attempt = draft.attempt
    since = attempt.admitted_at
    if since is not None:
        active = max(0, round(seconds_since(since, draft.now)))
        draft.change_counters(active_seconds=draft.counters.active_seconds + active)
    found = FAILURE_CLASSES.get(ending.reason)
    draft.change_attempt(
        state=AttemptState.ENDED.value,
        ended=timestamp(draft.now),
        outcome=_outcome(ending.reason),
        reason=ending.reason.value,
        message=both_ends_of(ending.message, MAX_MESSAGE),
        failure_class=found.value if found is not None else None,
        silent_since=None,
    )
    if attempt.running_since is not None:
        draft.set(ConditionType.PROGRESSING, FALSE, Reason.ENDED, "")


def _outcome(reason: Reason) -> str:
    if reason is Reason.SUCCEEDED:
        return AttemptOutcome.SUCCEEDED.value
    return AttemptOutcome.STOPPED.value if reason in _STOPPED else AttemptOutcome.FAILED.value
