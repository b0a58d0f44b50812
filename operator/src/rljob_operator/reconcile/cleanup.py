"""What becomes of the cluster once the job has ended."""

from __future__ import annotations

from rljob_api.conditions import ConditionType, Reason
from rljob_api.v1alpha1.run_policy import Cleanup
from rljob_operator.reconcile.observed import EffectFailure, EffectKind, Observed
from rljob_operator.reconcile.plan_types import DeleteCluster, Effect
from rljob_operator.reconcile.status_draft import FALSE, TRUE, StatusDraft

_GOING = "the job has ended; its cluster is being removed"
_GONE = "the job has ended; its cluster was removed"
_NEVER_MADE = "the job has ended before its cluster was made"


def clean_up(draft: StatusDraft, observed: Observed) -> tuple[Effect, ...]:
    """Removes the cluster, or keeps it, as the job says now. A cluster that is not the job's own is left alone. Where
    the spec cannot be read, the cluster goes too, but not one that was kept before."""
    cluster, spec = observed.cluster, observed.job.spec
    if not draft.attempts:
        return ()
    if cluster is None or cluster.owner_uid != observed.job.uid:
        if not observed.pods:
            _report_gone(draft)
        return ()
    if cluster.deleting:
        _report_going(draft, None)
        return ()
    if spec is None and draft.has_reason(ConditionType.CLUSTER_READY, Reason.KEPT):
        return ()
    if spec is not None and spec.run_policy.cleanup is Cleanup.KEEP_CLUSTER:
        draft.set(ConditionType.CLUSTER_READY, TRUE, Reason.KEPT, "the job has ended; its cluster is kept")
        return ()
    failure = observed.failure
    _report_going(draft, failure if failure is not None and failure.kind is EffectKind.DELETE_CLUSTER else None)
    return (DeleteCluster(cluster.name, cluster.uid),)


def _report_going(draft: StatusDraft, failure: EffectFailure | None) -> None:
    """That the cluster is going, or what keeps it. One that was lost stays lost."""
    if draft.has_reason(ConditionType.CLUSTER_READY, Reason.CLUSTER_LOST):
        return
    reason, message = Reason.ENDED, _GOING
    if failure is not None:
        reason, message = failure.reason, f"the job has ended; its cluster cannot be removed: {failure.message}"
    draft.set(ConditionType.CLUSTER_READY, FALSE, reason, message)


def _report_gone(draft: StatusDraft) -> None:
    """Says once that nothing is left. A cluster that could not be made keeps the reason why."""
    draft.pools = tuple(pool.model_copy(update={"ready": 0}) for pool in draft.pools)
    never_was = draft.attempt.cluster_uid is None
    if never_was and draft.has_reason(ConditionType.CLUSTER_READY, Reason.CREATING):
        draft.set(ConditionType.CLUSTER_READY, FALSE, Reason.REMOVED, _NEVER_MADE)
        return
    if never_was or draft.has_reason(ConditionType.CLUSTER_READY, Reason.CLUSTER_LOST):
        return
    draft.set(ConditionType.CLUSTER_READY, FALSE, Reason.REMOVED, _GONE)
