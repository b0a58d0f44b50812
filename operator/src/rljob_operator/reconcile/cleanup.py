"""Deletes clusters that no attempt needs, clusters of a finished job, and finally the job itself, after its TTL."""

from __future__ import annotations

from rljob_api.conditions import ConditionType, Reason
from rljob_api.v1alpha1.run_policy import Cleanup, RunPolicy
from rljob_operator.reconcile.cluster import are_clusters_deleted
from rljob_operator.reconcile.decision import DeleteCluster, DeleteJob, Effect
from rljob_operator.reconcile.observed import EffectKind, Observed, ObservedCluster
from rljob_operator.reconcile.status_draft import FALSE, TRUE, StatusDraft, seconds_since, timestamp

_DELETING = "the job has finished; its cluster is being deleted"
_DELETED = "the job has finished; its cluster was deleted"
_KEPT = "the job has finished; its cluster is kept"
_NOT_KEPT = (
    " despite runPolicy.cleanup: KeepCluster, because the operator did not see the trainer exit,"
    " and it might still be running"
)
_NOT_KEPT_IN_QUEUE = " despite runPolicy.cleanup: KeepCluster, because it would hold the quota of its queue (Kueue)"
_UNNEEDED = "neither the current nor the next attempt uses it"
_NEVER_CREATED = "the job finished before its cluster was created"


def delete_unneeded_clusters(draft: StatusDraft, observed: Observed) -> tuple[Effect, ...]:
    """Deletes all clusters of an unfinished job except the one that the current attempt uses or the next attempt will
    reuse."""
    planned = draft.next_attempt
    needs_cluster = draft.is_under_way or (planned is not None and planned.same_cluster)
    attempt = draft.attempt if needs_cluster else None
    return tuple(
        DeleteCluster(cluster.name, cluster.uid, f"the operator deletes RayCluster {cluster.name}: {_UNNEEDED}")
        for cluster in observed.clusters
        if not cluster.deleting
        and (attempt is None or cluster.name != attempt.cluster or attempt.cluster_uid not in (None, cluster.uid))
    )


def report_no_pods(draft: StatusDraft) -> None:
    """Sets the status of all pools to no ready pods, and the number of GPUs that the job holds to 0."""
    draft.gpus = 0
    draft.pools = tuple(pool.model_copy(update={"ready": 0}) for pool in draft.pools)


def clean_up(draft: StatusDraft, observed: Observed) -> tuple[Effect, ...]:
    """Deletes the clusters of a finished job, and the job itself once its TTL is over.

    The newest attempt's cluster is kept for `runPolicy.keepClusterSeconds` if `runPolicy.cleanup` is KeepCluster now
    and its trainer has certainly exited. If the spec cannot be read, a cluster that was kept so far is kept for this
    time, or for the default time if this field cannot be read either.
    """
    result = draft.result
    assert result is not None, "only finished jobs are cleaned up"
    kept = _kept_cluster(draft, observed)
    to_delete = tuple(cluster for cluster in observed.clusters if cluster is not kept)
    if observed.forbidden is None:
        _report(draft, observed, kept)
        is_done = not to_delete and (kept is not None or are_clusters_deleted(observed))
        if is_done and result.cleaned_up_at is None:
            draft.result = result.model_copy(update={"cleaned_up_at": timestamp(draft.now)})
        elif not is_done and result.cleaned_up_at is not None and not (kept is not None and observed.job.spec is None):
            # Clusters appeared after the clean-up, or a cluster is no longer kept. If the spec cannot be read and a
            # cluster is kept, `cleaned_up_at` is the only sign that it should be kept. So `cleaned_up_at` stays.
            draft.result = result.model_copy(update={"cleaned_up_at": None})
    left = seconds_to_deletion(draft, observed)
    if left is not None and left <= 0:
        why = f"the operator deletes the job: it finished at {result.at}, and ttlSecondsAfterFinished is over"
        return (DeleteJob(observed.job.uid, why),)
    return tuple(_deletion(draft, observed, cluster) for cluster in to_delete if not cluster.deleting)


def _deletion(draft: StatusDraft, observed: Observed, cluster: ObservedCluster) -> DeleteCluster:
    """The deletion of a cluster of a finished job. ClusterReady reports that of the newest attempt's cluster at the end
    of the job; an event reports that of any other cluster, and of a cluster that was kept long enough."""
    policy = _policy(observed)
    if not draft.attempts or draft.attempt.cluster != cluster.name:
        why = "the job has finished without it"
    elif _is_in_queue(observed):
        # The message of ClusterReady says why the cluster is not kept.
        return DeleteCluster(cluster.name, cluster.uid)
    elif policy.cleanup is Cleanup.KEEP_CLUSTER and not draft.attempt.trainer_may_run:
        why = f"it was kept for runPolicy.keepClusterSeconds ({policy.keep_cluster_seconds} s)"
    else:
        return DeleteCluster(cluster.name, cluster.uid)
    return DeleteCluster(cluster.name, cluster.uid, f"the operator deletes RayCluster {cluster.name}: {why}")


def seconds_to_cleanup(draft: StatusDraft, observed: Observed) -> float | None:
    """Seconds until a finished job, or before that its kept cluster, is deleted; negative if this is overdue. None if
    neither will be deleted."""
    times = [seconds_to_deletion(draft, observed)]
    if _kept_cluster(draft, observed) is not None:
        times.append(_seconds_to_end_of_keeping(draft, observed))
    return min((seconds for seconds in times if seconds is not None), default=None)


def _seconds_to_end_of_keeping(draft: StatusDraft, observed: Observed) -> float | None:
    """Seconds until a kept cluster of a finished job is deleted; 0 or less if it is not kept any longer. None if the
    job is not finished."""
    if draft.result is None:
        return None
    return _policy(observed).keep_cluster_seconds - seconds_since(draft.result.at, draft.now)


def seconds_to_deletion(draft: StatusDraft, observed: Observed) -> float | None:
    """Seconds until a finished job is deleted; negative if this is overdue. None if the job is not finished or has no
    `runPolicy.ttlSecondsAfterFinished`, or if its spec cannot be read."""
    spec = observed.job.spec
    if draft.result is None or spec is None or spec.run_policy.ttl_seconds_after_finished is None:
        return None
    return spec.run_policy.ttl_seconds_after_finished - seconds_since(draft.result.at, draft.now)


def _kept_cluster(draft: StatusDraft, observed: Observed) -> ObservedCluster | None:
    """The cluster of a finished job that must not be deleted; None if there is none."""
    if not draft.attempts or draft.result is None or draft.attempt.trainer_may_run:
        return None
    spec, cluster = observed.job.spec, observed.cluster(draft.attempt.cluster)
    if cluster is None or cluster.deleting or draft.attempt.cluster_uid not in (None, cluster.uid):
        return None
    if _is_in_queue(observed) or cluster.suspended:
        return None
    was_kept = draft.result.cleaned_up_at is not None
    is_to_be_kept = was_kept if spec is None else spec.run_policy.cleanup is Cleanup.KEEP_CLUSTER
    left = _seconds_to_end_of_keeping(draft, observed)
    return cluster if is_to_be_kept and left is not None and left > 0 else None


def _report(draft: StatusDraft, observed: Observed, kept: ObservedCluster | None) -> None:
    """Sets ClusterReady after the job has finished. If the newest attempt ended as ClusterLost, the condition keeps
    this reason."""
    if not draft.attempts:
        return
    kind, attempt = ConditionType.CLUSTER_READY, draft.attempt
    if kept is not None:
        seconds = _policy(observed).keep_cluster_seconds
        draft.set(kind, TRUE, Reason.KEPT, f"{_KEPT} for {seconds} s (runPolicy.keepClusterSeconds)")
        return
    if are_clusters_deleted(observed):
        report_no_pods(draft)
    if attempt.reason == Reason.CLUSTER_LOST:
        return
    spec = observed.job.spec
    was_to_be_kept = spec is not None and spec.run_policy.cleanup is Cleanup.KEEP_CLUSTER
    why_not_kept = ""
    if was_to_be_kept:
        why_not_kept = _NOT_KEPT if attempt.trainer_may_run else _NOT_KEPT_IN_QUEUE if _is_in_queue(observed) else ""
    if are_clusters_deleted(observed):
        message = _NEVER_CREATED if attempt.cluster_uid is None else _DELETED + why_not_kept
        draft.set(kind, FALSE, Reason.REMOVED, message)
        return
    failure = observed.failure
    if failure is not None and failure.kind is EffectKind.DELETE_CLUSTER:
        text = f"the job has finished; its cluster cannot be deleted: {failure.message}"
        draft.set(kind, FALSE, failure.reason, text)
    else:
        draft.set(kind, FALSE, Reason.DELETING, _DELETING + why_not_kept)


def _policy(observed: Observed) -> RunPolicy:
    """The job's `runPolicy`; of a spec that cannot be read, the readable part of it."""
    spec = observed.job.spec
    return observed.job.readable_policy if spec is None else spec.run_policy


def _is_in_queue(observed: Observed) -> bool:
    return bool(observed.job.queue_labels) or any(cluster.queue for cluster in observed.clusters)
