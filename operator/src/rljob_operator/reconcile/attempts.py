"""Attempts: one cluster each. They begin here and end here, and here is decided what follows from an ending.

Every ending ends the job: there is one attempt.
"""

from __future__ import annotations

from rljob_api.conditions import ConditionType, Reason
from rljob_api.v1alpha1.status import Attempt, AttemptOutcome
from rljob_operator.manifests.naming import cluster_name
from rljob_operator.reconcile.endings import Ending
from rljob_operator.reconcile.observed import ObservedJob
from rljob_operator.reconcile.status_draft import FALSE, TRUE, StatusDraft
from rljob_operator.reconcile.timestamps import timestamp

_STOPPED = (Reason.ACTIVE_DEADLINE_EXCEEDED, Reason.STOPPED_OUTSIDE)


def start_attempt(draft: StatusDraft, job: ObservedJob) -> None:
    """Notes the intent to make the next cluster; the cluster follows once that is written."""
    number = len(draft.attempts) + 1
    draft.attempts.append(
        Attempt(
            number=number,
            cluster=cluster_name(job.name, number),
            submissions=0,
            started=timestamp(draft.now),
            outcome=AttemptOutcome.RUNNING,
        )
    )


def end_attempt(draft: StatusDraft, ending: Ending) -> None:
    """Ends the newest attempt, if there is one, and with it the job."""
    if draft.attempts:
        ended = {"ended": timestamp(draft.now), "outcome": _outcome(ending.reason), "reason": ending.reason.value}
        draft.change_attempt(draft.attempt.model_copy(update=ended))
    # Said of every trainer that was started, also of one that ended before it was first looked at.
    if draft.is_true(ConditionType.JOB_SUBMITTED) or draft.condition(ConditionType.PROGRESSING) is not None:
        draft.set(ConditionType.PROGRESSING, FALSE, Reason.ENDED, "")
    kind = ConditionType.COMPLETE if ending.reason is Reason.SUCCEEDED else ConditionType.FAILED
    draft.set(kind, TRUE, ending.reason, ending.message)


def _outcome(reason: Reason) -> AttemptOutcome:
    if reason is Reason.SUCCEEDED:
        return AttemptOutcome.SUCCEEDED
    return AttemptOutcome.STOPPED if reason in _STOPPED else AttemptOutcome.FAILED
