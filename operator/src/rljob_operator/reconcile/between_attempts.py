"""While no attempt is under way: before the first, between two, and while the job is suspended."""

from __future__ import annotations

from rljob_api.conditions import ConditionType, Reason
from rljob_operator.reconcile.attempts import start_attempt
from rljob_operator.reconcile.cleanup import delete_unowned, hold_nothing, is_cleared
from rljob_operator.reconcile.elastic import spec_of_attempt
from rljob_operator.reconcile.observed import Observed
from rljob_operator.reconcile.plan_types import Effect
from rljob_operator.reconcile.pod_readiness import not_ready
from rljob_operator.reconcile.status_draft import FALSE, UNKNOWN, StatusDraft
from rljob_operator.reconcile.suspension import is_suspended, report_suspension, stop_between_attempts
from rljob_operator.reconcile.timestamps import seconds_since


def wait_or_start(draft: StatusDraft, observed: Observed) -> tuple[Effect, ...]:
    """Starts an attempt when its time has come and nothing is left of the one before; removes what is left."""
    if stop_between_attempts(draft, observed):
        return ()
    if is_suspended(observed):
        draft.next_attempt = None
        report_suspension(draft, observed)
        _report_cluster(draft, observed, Reason.SUSPENDED, "the job is suspended")
        return delete_unowned(draft, observed)
    # Resumed: what is left to wait for is looked at again and again.
    draft.suspended_at = None
    waits = draft.next_attempt
    reusable = waits is not None and waits.same_cluster and is_well(draft, observed)
    if not reusable:
        _keep_no_cluster(draft)
    is_time = waits is None or seconds_since(waits.not_before, draft.now) >= 0
    if is_time and reusable:
        start_attempt(draft, observed.job, on_same_cluster=True)
    elif is_time and observed.forbidden is None and is_cleared(observed):
        start_attempt(draft, observed.job)
    elif not reusable:
        _report_cluster(draft, observed, Reason.WAITING_FOR_NEXT_ATTEMPT, "another attempt follows")
    return delete_unowned(draft, observed)


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


def _keep_no_cluster(draft: StatusDraft) -> None:
    """The next attempt makes its own."""
    if draft.next_attempt is not None:
        draft.next_attempt = draft.next_attempt.model_copy(update={"same_cluster": False})


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
