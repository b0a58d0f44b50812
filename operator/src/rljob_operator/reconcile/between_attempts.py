"""While no attempt is under way: before the first, between two, and while the job is suspended.

Also what people ask for by annotations: stop for good, and another attempt now. `stops` stops a trainer that runs.
"""

from __future__ import annotations

from rljob_api.conditions import ConditionType, Reason
from rljob_api.requests import as_noted, is_later
from rljob_api.v1alpha1.status import AttemptOutcome
from rljob_operator.reconcile.cleanup import delete_unowned, hold_nothing
from rljob_operator.reconcile.cluster import is_cleared, not_ready
from rljob_operator.reconcile.creation import spec_of_attempt
from rljob_operator.reconcile.endings import Ending
from rljob_operator.reconcile.observed import Observed
from rljob_operator.reconcile.plan_types import Effect
from rljob_operator.reconcile.retries import end_job, give_back_all, reopen_job, start_attempt
from rljob_operator.reconcile.status_draft import FALSE, TRUE, UNKNOWN, StatusDraft, seconds_since, timestamp

_STOPPED = "somebody asked for it while nothing of the job ran"


def heed_retry(draft: StatusDraft, observed: Observed) -> None:
    """Sees to a request for another attempt: takes back the end of a failed job, or ends the pause before the next
    attempt. What runs, is suspended or is complete is left as it is."""
    asked = observed.job.retry_request
    if asked is None or as_noted(asked) == draft.handled.retry:
        return
    draft.handled = draft.handled.model_copy(update={"retry": as_noted(asked)})
    if draft.result is not None and draft.result.outcome != AttemptOutcome.SUCCEEDED:
        reopen_job(draft)
        # A request to stop that ended the job is not heeded again; one that is later than this counts.
        if not is_later(observed.job.stop_request, than=asked):
            draft.note_stop()
    elif draft.next_attempt is not None:
        give_back_all(draft)
        draft.next_attempt = draft.next_attempt.model_copy(update={"not_before": timestamp(draft.now)})


def wait_or_start(draft: StatusDraft, observed: Observed) -> tuple[Effect, ...]:
    """Starts an attempt when its time has come and nothing is left of the one before; removes what is left."""
    if stop_between_attempts(draft):
        return ()
    if observed.job.is_suspended:
        draft.next_attempt = None
        report_suspension(draft, observed)
        _report_cluster(draft, observed, Reason.SUSPENDED, "the job is suspended")
        return delete_unowned(draft, observed)
    # Resumed: what is left to wait for is looked at again and again.
    draft.suspended_at = None
    waits = draft.next_attempt
    reusable = waits is not None and waits.same_cluster and is_well(draft, observed)
    if waits is not None and not reusable:
        draft.next_attempt = waits.model_copy(update={"same_cluster": False})
    is_time = waits is None or seconds_since(waits.not_before, draft.now) >= 0
    if is_time and reusable:
        start_attempt(draft, observed.job, on_same_cluster=True)
    elif is_time and observed.forbidden is None and is_cleared(observed):
        start_attempt(draft, observed.job)
    elif not reusable:
        _report_cluster(draft, observed, Reason.WAITING_FOR_NEXT_ATTEMPT, "another attempt follows")
    return delete_unowned(draft, observed)


def stop_between_attempts(draft: StatusDraft) -> bool:
    """Ends a job of which nothing runs, if somebody asked for it."""
    if not draft.is_to_be_stopped:
        return False
    draft.note_stop()
    end_job(draft, Ending(Reason.STOPPED_BY_USER, _STOPPED))
    return True


def report_suspension(draft: StatusDraft, observed: Observed) -> None:
    """Suspended, while the job says so."""
    if not observed.job.is_suspended:
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


def is_well(draft: StatusDraft, observed: Observed) -> bool:
    """Whether the cluster of the newest attempt is there, asks for a token, and has all pods ready that the attempt
    used, or that the next one will."""
    spec, attempt = observed.job.spec, draft.attempt
    cluster = observed.cluster(attempt.cluster)
    if spec is None or cluster is None or cluster.deleting or cluster.uid != attempt.cluster_uid:
        return False
    if not cluster.authenticated:
        return False
    used = spec if attempt.reason == Reason.RESIZED else spec_of_attempt(spec, attempt)
    return not_ready(used, observed.pods_of(cluster.name), None) is None


def seconds_to_start(draft: StatusDraft) -> float | None:
    """Until the pause before the next attempt is over; None where there is none, or it is over."""
    if draft.next_attempt is None:
        return None
    seconds = -seconds_since(draft.next_attempt.not_before, draft.now)
    return seconds if seconds > 0 else None


def _report_cluster(draft: StatusDraft, observed: Observed, reason: Reason, why: str) -> None:
    if observed.forbidden is not None:
        draft.set(ConditionType.CLUSTER_READY, UNKNOWN, Reason.READ_FORBIDDEN, observed.forbidden)
        return
    if not draft.attempts:
        return
    if is_cleared(observed):
        hold_nothing(draft)
        draft.set(ConditionType.CLUSTER_READY, FALSE, reason, f"{why}; nothing of the former cluster is left")
        return
    left = [f"{len(observed.clusters)} RayCluster" if observed.clusters else "", f"{len(observed.pods)} pods"]
    message = f"{why}; of the former attempt there are left: {', '.join(part for part in left if part)}"
    draft.set(ConditionType.CLUSTER_READY, FALSE, reason, message)


def _where_it_goes_on(draft: StatusDraft) -> str:
    checkpoint = draft.checkpoint
    if checkpoint is None:
        return "the job holds no nodes; it has no checkpoint, and will begin at step 0"
    return f"the job holds no nodes; it will go on from the checkpoint of step {checkpoint.step}"
