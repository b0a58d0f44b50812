"""Suspension, and what people ask for by annotations: stop for good, and another attempt now.

A trainer that runs is stopped for them in `stops`; what waits until a job is suspended no longer is in
`between_attempts`.
"""

from __future__ import annotations

from rljob_api.conditions import ConditionType, Reason
from rljob_api.requests import as_noted, is_later
from rljob_api.v1alpha1.status import AttemptOutcome
from rljob_operator.reconcile.cleanup import is_cleared
from rljob_operator.reconcile.endings import Ending
from rljob_operator.reconcile.observed import Observed
from rljob_operator.reconcile.retries import end_job, give_back_all, reopen_job
from rljob_operator.reconcile.status_draft import FALSE, TRUE, StatusDraft
from rljob_operator.reconcile.timestamps import timestamp

_STOPPED = "somebody asked for it while nothing of the job ran"


def is_suspended(observed: Observed) -> bool:
    """Whether the job says so; not, where its spec cannot be read."""
    spec = observed.job.spec
    return spec is not None and spec.suspend


def wants_to_be_stopped(draft: StatusDraft, observed: Observed) -> bool:
    """Whether there is a request to stop that has not been seen to."""
    request = _noted(observed.job.stop_request)
    return request is not None and request != draft.handled.stop


def note_stop(draft: StatusDraft, observed: Observed) -> None:
    """The request to stop has been seen to."""
    draft.handled = draft.handled.model_copy(update={"stop": _noted(observed.job.stop_request)})


def heed_retry(draft: StatusDraft, observed: Observed) -> None:
    """Sees to a request for another attempt: takes back the end of a failed job, or ends the pause before the next
    attempt. What runs, is suspended or is complete is left as it is."""
    request = _noted(observed.job.retry_request)
    if request is None or request == draft.handled.retry:
        return
    draft.handled = draft.handled.model_copy(update={"retry": request})
    if draft.result is not None and draft.result.outcome != AttemptOutcome.SUCCEEDED:
        reopen_job(draft)
        # A request to stop that ended the job is not heeded again; one that is later than this counts.
        if not is_later(observed.job.stop_request, than=observed.job.retry_request):
            note_stop(draft, observed)
    elif draft.next_attempt is not None:
        give_back_all(draft)
        draft.next_attempt = draft.next_attempt.model_copy(update={"not_before": timestamp(draft.now)})


def stop_between_attempts(draft: StatusDraft, observed: Observed) -> bool:
    """Ends a job of which nothing runs, if somebody asked for it."""
    if not wants_to_be_stopped(draft, observed):
        return False
    note_stop(draft, observed)
    end_job(draft, Ending(Reason.STOPPED_BY_USER, _STOPPED))
    return True


def report_suspension(draft: StatusDraft, observed: Observed) -> None:
    """Suspended, while the job says so."""
    if not is_suspended(observed):
        return
    kind = ConditionType.SUSPENDED
    if draft.is_under_way:
        draft.set(kind, FALSE, Reason.SUSPENDING, "the trainer saves a checkpoint and ends")
    elif observed.forbidden is not None or not is_cleared(observed):
        draft.set(kind, FALSE, Reason.SUSPENDING, "the trainer has ended; its cluster is being removed")
    else:
        if draft.suspended_at is None:
            draft.suspended_at = timestamp(draft.now)
        draft.set_if_told(ConditionType.RETRYING, FALSE, Reason.SUSPENDED, "the job is suspended")
        draft.set(kind, TRUE, Reason.SUSPENDED, _where_it_goes_on(draft))


def _noted(request: str | None) -> str | None:
    return None if request is None else as_noted(request)


def _where_it_goes_on(draft: StatusDraft) -> str:
    checkpoint = draft.checkpoint
    if checkpoint is None:
        return "the job holds no nodes; it has no checkpoint, and will begin at step 0"
    return f"the job holds no nodes; it will go on from the checkpoint of step {checkpoint.step}"
