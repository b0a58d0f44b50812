"""What becomes of the cluster once the job has ended."""

from __future__ import annotations

from rljob_api.conditions import ConditionType, Reason
from rljob_api.v1alpha1.run_policy import Cleanup
from rljob_operator.reconcile.observed import Observed
from rljob_operator.reconcile.plan import DeleteCluster, Effect
from rljob_operator.reconcile.status import FALSE, TRUE, StatusDraft

_TOLD_ALREADY = (Reason.CLUSTER_LOST, Reason.REMOVED)


def clean_up(draft: StatusDraft, observed: Observed) -> tuple[Effect, ...]:
    """Removes the cluster, or keeps it, as the job says now. A cluster that is not the job's own is left alone, and so
    is every cluster while the job's spec cannot be read."""
    cluster, spec = observed.cluster, observed.job.spec
    if spec is None or not draft.attempts:
        return ()
    if cluster is None or cluster.owner_uid != observed.job.uid:
        if not observed.pods:
            _report_gone(draft)
        return ()
    if cluster.deleting:
        return ()
    if spec.run_policy.cleanup is Cleanup.KEEP_CLUSTER:
        draft.set(ConditionType.CLUSTER_READY, TRUE, Reason.KEPT, "the job has ended; its cluster is kept")
        return ()
    return (DeleteCluster(cluster.name, cluster.uid),)


def _report_gone(draft: StatusDraft) -> None:
    """Says once that nothing is left. A cluster that never was keeps the reason why."""
    draft.pools = tuple(pool.model_copy(update={"ready": 0}) for pool in draft.pools)
    never_was = draft.attempt.cluster_uid is None
    if never_was or draft.has_reason(ConditionType.CLUSTER_READY, *_TOLD_ALREADY):
        return
    draft.set(ConditionType.CLUSTER_READY, FALSE, Reason.REMOVED, "the job has ended; its cluster was removed")
