"""Handles a job without a current attempt: before the first attempt, between two attempts, and while it is suspended.

This module also handles requests that users make by annotation: retry the job now, or stop a job without a running
attempt. `stops` handles the stop of the current attempt.
"""

from __future__ import annotations

from rljob_api.conditions import NO_ROOM, RESTARTED_FREELY, ConditionType, Reason
from rljob_api.requests import as_recorded, is_later
from rljob_api.v1alpha1.checkpoint import Resume
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_api.v1alpha1.status import AttemptOutcome, FailureClass
from rljob_operator.reconcile.attempt_endings import Ending
from rljob_operator.reconcile.cleanup import delete_unneeded_clusters, report_no_pods
from rljob_operator.reconcile.cluster import (
    Pods,
    are_clusters_deleted,
    disrupted_pod,
    head_pod,
    is_lost,
    readiness_problem,
    were_pods_deleted,
)
from rljob_operator.reconcile.creation import spec_of_attempt
from rljob_operator.reconcile.decision import Effect
from rljob_operator.reconcile.observed import Observed, ObservedCluster
from rljob_operator.reconcile.retries import end_job, reopen_job, reset_retry_budgets, start_attempt
from rljob_operator.reconcile.status_draft import FALSE, TRUE, UNKNOWN, StatusDraft, seconds_since, timestamp

_WORKERS_ARE_REPLACED = (Reason.INFRASTRUCTURE_ERROR, Reason.OUT_OF_MEMORY, Reason.DISRUPTED)
"""Reasons after which KubeRay replaces the worker pods that were lost, if the head pod was not lost."""
_STOPPED = "a user stopped the job while no attempt was running"


def apply_retry_request(draft: StatusDraft, observed: Observed) -> None:
    """Applies a user's retry request: reopens a failed job, or skips the backoff before the next attempt. Both reset
    the retry budgets. For a job that is running, suspended or complete, the request is only recorded."""
    request = observed.job.retry_request
    if request is None or as_recorded(request) == draft.handled.retry:
        return
    draft.handled = draft.handled.model_copy(update={"retry": as_recorded(request)})
    if draft.result is not None and draft.result.outcome != AttemptOutcome.SUCCEEDED:
        reopen_job(draft)
        # The stop request that ended the job must not end it again. A stop request later than this retry counts.
        if not is_later(observed.job.stop_request, than=request):
            draft.record_stop_applied()
    elif draft.next_attempt is not None:
        reset_retry_budgets(draft)
        draft.next_attempt = draft.next_attempt.model_copy(update={"not_before": timestamp(draft.now)})


def wait_or_start(draft: StatusDraft, observed: Observed) -> tuple[Effect, ...]:
    """Starts the next attempt once its backoff is over and the previous cluster was deleted or can be reused. A
    suspended job waits until it is resumed. If a user asked to stop the job, the job ends. Deletes clusters that are no
    longer needed."""
    if stop_between_attempts(draft):
        return ()
    if observed.job.should_be_suspended:
        draft.next_attempt = None
        report_suspension(draft, observed)
        _report_cluster(draft, observed, Reason.SUSPENDED, "the job is suspended")
        return delete_unneeded_clusters(draft, observed)
    # The job is not suspended, or was resumed. While `suspended_at` is set, no next pass is scheduled. It is cleared,
    # so that passes are repeated until the next attempt starts.
    draft.suspended_at = None
    planned = draft.next_attempt
    reusable = planned is not None and planned.same_cluster and is_cluster_reusable(draft, observed)
    if planned is not None and not reusable:
        draft.next_attempt = planned.model_copy(update={"same_cluster": False})
    is_time = planned is None or seconds_since(planned.not_before, draft.now) >= 0
    if is_time and reusable and observed.forbidden is None:
        _start_on_same_cluster(draft, observed)
    elif is_time and observed.forbidden is None and are_clusters_deleted(observed):
        start_attempt(draft, observed.job, with_same_name=_is_name_free(draft, observed))
    elif not reusable:
        _report_cluster(draft, observed, Reason.WAITING_FOR_NEXT_ATTEMPT, "waiting for the next attempt")
    return delete_unneeded_clusters(draft, observed)


def stop_between_attempts(draft: StatusDraft) -> bool:
    """If a user asked to stop the job, ends the job, which has no current attempt. Returns whether it was ended."""
    if not draft.has_stop_request:
        return False
    draft.record_stop_applied()
    end_job(draft, Ending(Reason.STOPPED_BY_USER, _STOPPED))
    return True


def report_suspension(draft: StatusDraft, observed: Observed) -> None:
    """While `spec.suspend` is true: sets the condition Suspended, and records when the suspension is complete."""
    if not observed.job.should_be_suspended:
        return
    kind = ConditionType.SUSPENDED
    if draft.is_under_way:
        draft.set(kind, FALSE, Reason.SUSPENDING, "the trainer should save a checkpoint and exit")
    elif observed.forbidden is not None or not are_clusters_deleted(observed):
        draft.set(kind, FALSE, Reason.SUSPENDING, "no attempt is running; the cluster is being deleted")
    else:
        if draft.suspended_at is None:
            draft.suspended_at = timestamp(draft.now)
        draft.waiting_since = None
        draft.drop(ConditionType.QUOTA_RESERVED)
        draft.set_if_present(ConditionType.RETRYING, FALSE, Reason.SUSPENDED, "the job is suspended")
        draft.set(kind, TRUE, Reason.SUSPENDED, _resume_point(draft, observed.job.spec))


def is_cluster_reusable(draft: StatusDraft, observed: Observed) -> bool:
    """Whether the next attempt can use the newest attempt's cluster, which must exist and ask for a token.

    A cluster that Kueue has suspended is used again, so that its place in the queue is kept. After
    InfrastructureError, OutOfMemory or Disrupted, the cluster is used again if its head pod and all Kubernetes nodes
    respond, because KubeRay replaces worker pods; after other infrastructure failures never. Otherwise all needed pods
    must be ready: those that the newest attempt used; after the reason Resized, all pods of the spec."""
    spec, attempt = observed.job.spec, draft.attempt
    cluster = observed.cluster(attempt.cluster)
    if spec is None or cluster is None or cluster.deleting or cluster.uid != attempt.cluster_uid:
        return False
    if not cluster.asks_for_token or attempt.reason in NO_ROOM:
        return False
    pods = observed.pods_of(cluster.name)
    if _is_emptied_by_queue(draft, cluster, pods):
        if cluster.suspending and pods and all(is_lost(pod) for pod in pods):
            # KubeRay waits for these pods, and nobody can delete them.
            return False
        # If the queue admitted the cluster again before KubeRay deleted the pods, the former trainer might still run.
        has_no_trainer = not attempt.trainer_may_run or head_pod(pods) is None
        return cluster.is_suspended or has_no_trainer or were_pods_deleted(attempt, cluster, pods)
    if attempt.reason in _WORKERS_ARE_REPLACED:
        return _does_head_respond(pods) and not _has_failed_on_it_before(draft)
    if attempt.failure_class == FailureClass.INFRASTRUCTURE:
        return False
    used = spec if attempt.reason == Reason.RESIZED else spec_of_attempt(spec, attempt)
    return readiness_problem(used, pods, None) is None


def seconds_to_start(draft: StatusDraft) -> float | None:
    """Seconds until the backoff before the next attempt is over; None if it is over, or no next attempt is planned."""
    if draft.next_attempt is None:
        return None
    seconds = -seconds_since(draft.next_attempt.not_before, draft.now)
    return seconds if seconds > 0 else None


def _start_on_same_cluster(draft: StatusDraft, observed: Observed) -> None:
    """Starts the next attempt on the newest attempt's cluster. If Kueue has suspended this cluster, the attempt starts
    once no pod of the newest attempt is left."""
    cluster = observed.cluster(draft.attempt.cluster)
    assert cluster is not None, "a reusable cluster exists"
    pods = observed.pods_of(cluster.name)
    are_pods_left = any((cluster.is_suspended or pod.deleting) and not is_lost(pod) for pod in pods)
    if _is_emptied_by_queue(draft, cluster, pods) and (are_pods_left or cluster.suspending):
        return
    start_attempt(draft, observed.job, on_same_cluster=True, is_suspended=cluster.suspended)


def _is_name_free(draft: StatusDraft, observed: Observed) -> bool:
    """Whether the next cluster may have the name of the newest attempt's cluster: no trainer was submitted to it, and
    none of its pods is left. A job that waits for days then needs one Secret and one network policy, not one of each
    per attempt: the operator is not allowed to delete them."""
    if not draft.attempts or draft.attempt.reason not in RESTARTED_FREELY or draft.attempt.submissions > 0:
        return False
    return not observed.pods_of(draft.attempt.cluster)


def _is_emptied_by_queue(draft: StatusDraft, cluster: ObservedCluster, pods: Pods) -> bool:
    """Whether the pods of the newest attempt are gone, or are being deleted, because Kueue suspended the cluster."""
    is_evicted = cluster.is_suspended or draft.attempt.reason == Reason.EVICTED
    return is_evicted or were_pods_deleted(draft.attempt, cluster, pods)


def _does_head_respond(pods: Pods) -> bool:
    """Whether the head pod is ready and no pod is on a Kubernetes node that does not respond. On such a node, it may
    take minutes until KubeRay replaces the pod."""
    head = head_pod(pods)
    is_head_ready = head is not None and head.ready and not head.deleting and disrupted_pod((head,)) is None
    return is_head_ready and not any(pod.overdue or pod.node_silent_seconds > 0 for pod in pods)


def _has_failed_on_it_before(draft: StatusDraft) -> bool:
    """Whether the two newest attempts used the same cluster, and both ended with an infrastructure failure, the newest
    one without a new checkpoint: then a node or a GPU of the cluster may be broken."""
    if len(draft.attempts) < 2 or draft.attempt.checkpoint_step is not None:
        return False
    before = draft.attempts[-2]
    is_same = before.cluster_uid == draft.attempt.cluster_uid
    return is_same and {before.failure_class, draft.attempt.failure_class} == {FailureClass.INFRASTRUCTURE}


def _report_cluster(draft: StatusDraft, observed: Observed, reason: Reason, why: str) -> None:
    """Sets ClusterReady to False (Unknown if clusters or pods cannot be read) for a job that has had an attempt. `why`:
    the start of the message."""
    if observed.forbidden is not None:
        draft.set(ConditionType.CLUSTER_READY, UNKNOWN, Reason.READ_FORBIDDEN, observed.forbidden)
        return
    if not draft.attempts:
        return
    draft.drop(ConditionType.QUOTA_RESERVED)
    if are_clusters_deleted(observed):
        report_no_pods(draft)
        draft.set(ConditionType.CLUSTER_READY, FALSE, reason, f"{why}; the previous cluster was deleted")
        return
    left = f"RayClusters: {len(observed.clusters)}, pods: {len(observed.pods)}"
    message = f"{why}; waiting until the objects of earlier attempts are deleted ({left})"
    draft.set(ConditionType.CLUSTER_READY, FALSE, reason, message)


def _resume_point(draft: StatusDraft, spec: RLJobSpec | None) -> str:
    """The message of a suspended job: where it will resume. `spec`: None if it is invalid."""
    checkpoint = draft.checkpoint
    if checkpoint is None:
        return "the job has no pods; it has no checkpoint and will start at step 0"
    if spec is not None and spec.checkpoint.resume is Resume.NEVER:
        return (
            f"the job has no pods; step {checkpoint.step} has a checkpoint, and spec.checkpoint.resume is Never, so"
            " its next attempt will fail; create a job with another name to start at step 0"
        )
    return f"the job has no pods; it will resume from the checkpoint of step {checkpoint.step}"
