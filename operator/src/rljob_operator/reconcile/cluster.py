"""How far the attempt's RayCluster is: ClusterReady and the numbers of the pools."""

from __future__ import annotations

from rljob_api.conditions import ConditionType, Reason
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_api.v1alpha1.status import ConditionStatus
from rljob_operator.reconcile.observed import EffectKind, Observed, ObservedCluster, Reachability
from rljob_operator.reconcile.placement import missing_ray_nodes
from rljob_operator.reconcile.pod_readiness import head_pod, not_ready, pool_statuses
from rljob_operator.reconcile.status_draft import FALSE, TRUE, StatusDraft

Verdict = tuple[ConditionStatus, Reason, str]


def report_cluster(draft: StatusDraft, observed: Observed, spec: RLJobSpec | None) -> None:
    """Sets ClusterReady and the pools, and remembers the cluster's UID once it is there. Without a spec that can be
    read it says only what is lost."""
    ours = _our_cluster(draft, observed)
    if spec is not None:
        draft.pools = pool_statuses(spec, observed.pods if ours is not None else ())
    if ours is not None and draft.attempt.cluster_uid is None:
        draft.change_attempt(draft.attempt.model_copy(update={"cluster_uid": ours.uid}))
    verdict = _absent(draft, observed) if ours is None else _present(draft, observed, spec, ours)
    if verdict is not None:
        draft.set(ConditionType.CLUSTER_READY, *verdict)


def _our_cluster(draft: StatusDraft, observed: Observed) -> ObservedCluster | None:
    """The attempt's own cluster, if it is there to stay."""
    cluster = observed.cluster
    if cluster is None or cluster.deleting or cluster.owner_uid != observed.job.uid:
        return None
    return cluster if draft.attempt.cluster_uid in (None, cluster.uid) else None


def _absent(draft: StatusDraft, observed: Observed) -> Verdict:
    name, cluster = draft.attempt.cluster, observed.cluster
    if not observed.kuberay_installed:
        return FALSE, Reason.KUBERAY_UNAVAILABLE, "this Kubernetes cluster has no resource RayCluster (ray.io/v1)"
    if draft.attempt.cluster_uid is not None or (cluster is not None and cluster.owner_uid == observed.job.uid):
        return FALSE, Reason.CLUSTER_LOST, f"RayCluster {name} was deleted while the job needed it"
    if cluster is not None:
        return FALSE, Reason.NAME_CONFLICT, f"there is a RayCluster {name} already that does not belong to this job"
    if observed.pods:
        message = f"pods of a former RayCluster {name} have not ended yet ({len(observed.pods)})"
        return FALSE, Reason.CREATING, message
    failure = observed.failure
    if failure is not None and failure.kind is EffectKind.CREATE_CLUSTER:
        return FALSE, failure.reason, failure.message
    refused = draft.condition(ConditionType.CLUSTER_READY)
    if refused is not None and refused.reason == Reason.CREATION_REFUSED:
        # Known from before a restart, and true until the cluster is there.
        return FALSE, Reason.CREATION_REFUSED, refused.message
    return FALSE, Reason.CREATING, f"RayCluster {name} is being created"


def _present(
    draft: StatusDraft, observed: Observed, spec: RLJobSpec | None, cluster: ObservedCluster
) -> Verdict | None:
    lost = _lost_head(draft, observed, cluster)
    if lost is not None:
        return FALSE, Reason.HEAD_LOST, lost
    if spec is None:
        return None
    problem = not_ready(spec, observed.pods, cluster.pod_creation_error)
    if problem is not None:
        return FALSE, problem.reason, problem.message
    if observed.ray.reachability is Reachability.OK:
        missing = missing_ray_nodes(spec, observed.ray)
        if missing is not None:
            return FALSE, Reason.RAY_NODES_MISSING, missing
    elif not draft.is_true(ConditionType.JOB_SUBMITTED):
        # Once the trainer runs, Progressing tells of a silent dashboard; the cluster is no worse for it.
        return _silent_dashboard(observed)
    num_pods = 1 + sum(pool.nodes for pool in spec.pools)
    return TRUE, Reason.READY, f"{num_pods} of {num_pods} pods ready and in Ray"


def _lost_head(draft: StatusDraft, observed: Observed, cluster: ObservedCluster) -> str | None:
    """What is known of a head pod that will not come back: KubeRay replaces it only while the cluster has never been
    complete."""
    submitted, was_ready = draft.attempt.submissions > 0, draft.is_true(ConditionType.CLUSTER_READY)
    was_complete = submitted or was_ready or cluster.provisioned
    head = head_pod(observed.pods)
    if not was_complete or (head is not None and not head.ended and not head.overdue):
        return None
    if head is None:
        return "the head pod is gone, and the trainer with it"
    if not head.ended:
        return f"the head pod {head.name} was to be removed, and its node does not do it; the node is lost, it seems"
    known = head.problem.message if head.problem is not None else "no reason is known"
    return f"the head pod {head.name} has ended: {known}"


def _silent_dashboard(observed: Observed) -> Verdict:
    ray = observed.ray
    if ray.reachability is Reachability.REJECTED:
        return FALSE, Reason.TOKEN_REJECTED, f"all pods are ready, but Ray refuses the operator's token: {ray.error}"
    if ray.reachability is Reachability.NOT_ASKED:
        return FALSE, Reason.DASHBOARD_UNREACHABLE, "all pods are ready; Ray's dashboard was not asked yet"
    return FALSE, Reason.DASHBOARD_UNREACHABLE, f"all pods are ready, but Ray's dashboard does not answer: {ray.error}"
