"""How far the attempt's RayCluster is: ClusterReady and the numbers of the pools."""

from __future__ import annotations

from dataclasses import dataclass

from rljob_api.conditions import ConditionType, Reason
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_api.v1alpha1.status import ConditionStatus
from rljob_operator.reconcile.cleanup import NODE_LOST_SECONDS
from rljob_operator.reconcile.observed import EffectKind, Observed, ObservedCluster, Reachability
from rljob_operator.reconcile.placement import missing_ray_nodes
from rljob_operator.reconcile.pod_readiness import head_pod, not_ready, pool_statuses
from rljob_operator.reconcile.status_draft import FALSE, TRUE, UNKNOWN, StatusDraft
from rljob_operator.reconcile.timestamps import timestamp

SHORT_SILENCE_SECONDS = 20.0
"""A dashboard that has not answered for less may only be busy."""


@dataclass(frozen=True)
class Verdict:
    """What is known about one condition in this pass."""

    status: ConditionStatus
    reason: Reason
    message: str

    @property
    def holds(self) -> bool:
        """Whether it is True."""
        return self.status is TRUE


def report_cluster(draft: StatusDraft, observed: Observed, spec: RLJobSpec | None) -> Verdict | None:
    """Sets ClusterReady and the pools, and remembers the cluster's UID once it is there. Without a spec that can be
    read it says only what is lost; None where there is nothing to say."""
    ours = our_cluster(draft, observed)
    if spec is not None:
        asked = observed.job.spec or spec
        draft.pools = pool_statuses(asked, observed.pods_of(draft.attempt.cluster) if ours is not None else ())
        draft.gpus = sum(pool.nodes * pool.gpus_per_node for pool in asked.pools)
    _note_conflict(draft, observed, ours)
    if ours is not None and draft.attempt.cluster_uid is None:
        draft.change_attempt(cluster_uid=ours.uid, admitted_at=timestamp(draft.now))
    verdict = _absent(draft, observed) if ours is None else _present(draft, observed, spec, ours)
    if verdict is not None:
        draft.set(ConditionType.CLUSTER_READY, verdict.status, verdict.reason, verdict.message)
        if verdict.holds and draft.attempt.ready_at is None:
            draft.change_attempt(ready_at=timestamp(draft.now))
    return verdict


def our_cluster(draft: StatusDraft, observed: Observed) -> ObservedCluster | None:
    """The attempt's own cluster, if it is there to stay."""
    cluster = observed.cluster(draft.attempt.cluster)
    if cluster is None or cluster.deleting or draft.attempt.cluster_uid not in (None, cluster.uid):
        return None
    return cluster


def _note_conflict(draft: StatusDraft, observed: Observed, ours: ObservedCluster | None) -> None:
    """Notes since when another owner's cluster has had the name. Whoever has not tried to make the cluster knows
    nothing new of it."""
    failure, since = observed.failure, draft.attempt.name_taken_since
    tried = failure is not None and failure.kind is EffectKind.CREATE_CLUSTER
    is_taken = tried and failure is not None and failure.reason is Reason.NAME_CONFLICT
    if is_taken and ours is None and since is None:
        draft.change_attempt(name_taken_since=timestamp(draft.now))
    elif since is not None and (ours is not None or (tried and not is_taken)):
        draft.change_attempt(name_taken_since=None)


def _absent(draft: StatusDraft, observed: Observed) -> Verdict:
    name, failure = draft.attempt.cluster, observed.failure
    if not observed.kuberay_installed:
        text = "this Kubernetes cluster has no resource RayCluster (ray.io/v1)"
        return Verdict(FALSE, Reason.KUBERAY_UNAVAILABLE, text)
    if observed.forbidden is not None:
        return Verdict(UNKNOWN, Reason.READ_FORBIDDEN, observed.forbidden)
    if draft.attempt.cluster_uid is not None or observed.cluster(name) is not None:
        return Verdict(FALSE, Reason.CLUSTER_LOST, f"RayCluster {name} was deleted while the job needed it")
    if failure is not None and failure.kind is EffectKind.CREATE_CLUSTER:
        return Verdict(FALSE, failure.reason, failure.message)
    return Verdict(FALSE, Reason.CREATING, f"RayCluster {name} is being created")


def _present(
    draft: StatusDraft, observed: Observed, spec: RLJobSpec | None, cluster: ObservedCluster
) -> Verdict | None:
    if observed.forbidden is not None:
        return Verdict(UNKNOWN, Reason.READ_FORBIDDEN, observed.forbidden)
    lost = _lost_head(draft, observed, cluster)
    if lost is not None:
        return Verdict(FALSE, Reason.HEAD_LOST, lost)
    if not cluster.authenticated:
        text = f"RayCluster {cluster.name} has lost its authOptions: this KubeRay is too old to know them"
        return Verdict(FALSE, Reason.KUBERAY_TOO_OLD, text)
    if spec is None:
        return None
    problem = not_ready(spec, observed.pods_of(cluster.name), cluster.pod_creation_error)
    if problem is not None:
        return Verdict(FALSE, problem.reason, problem.message)
    if observed.ray.reachability is Reachability.OK:
        missing = missing_ray_nodes(spec, observed.ray)
        if missing is not None and draft.attempt.running_since is None:
            return Verdict(FALSE, Reason.RAY_NODES_MISSING, missing)
    elif draft.attempt.running_since is None:
        # Once the trainer runs, Progressing tells of a silent dashboard; the cluster is no worse for it.
        return _silent_dashboard(observed)
    num_pods = 1 + sum(pool.nodes for pool in spec.pools)
    fewer = ", ".join(f"{pool.nodes} of pool {pool.name}" for pool in draft.attempt.nodes)
    note = f"; runs on fewer nodes than it asks for: {fewer} (runPolicy.elastic)" if fewer else ""
    return Verdict(TRUE, Reason.READY, f"{num_pods} of {num_pods} pods ready and in Ray{note}")


def _lost_head(draft: StatusDraft, observed: Observed, cluster: ObservedCluster) -> str | None:
    """What is known of a head pod that will not come back: KubeRay replaces it only while the cluster has never been
    complete."""
    attempt = draft.attempt
    was_complete = attempt.submissions > 0 or attempt.ready_at is not None or cluster.provisioned
    if not was_complete:
        return None
    head = head_pod(observed.pods_of(cluster.name))
    if head is None:
        return "the head pod is gone, and the trainer with it"
    where = f"pod {head.name}" + (f" on node {head.node}" if head.node else "")
    if head.ended:
        known = head.problem.message if head.problem is not None else "no reason is known"
        return f"the head ({where}) has ended: {known}"
    if head.overdue:
        return f"the head ({where}) was to be removed, and its node does not do it; the node is lost, it seems"
    if head.node_silent_seconds >= NODE_LOST_SECONDS and _is_silent(observed):
        return (
            f"the head ({where}): neither its node nor Ray's dashboard has answered for"
            f" {min(head.node_silent_seconds, 3600):.0f} s; the node is lost, it seems"
        )
    return None


def _is_silent(observed: Observed) -> bool:
    ray = observed.ray
    return ray.reachability is Reachability.NOT_ASKED or (
        ray.reachability is not Reachability.OK and ray.silent_seconds >= SHORT_SILENCE_SECONDS
    )


def _silent_dashboard(observed: Observed) -> Verdict:
    ray = observed.ray
    if ray.reachability is Reachability.REJECTED:
        text = f"all pods are ready, but Ray refuses the operator's token: {ray.error}"
        return Verdict(FALSE, Reason.TOKEN_REJECTED, text)
    if ray.reachability is Reachability.OPEN:
        text = f"all pods are ready, but Ray asks nobody for a token: {ray.error}"
        return Verdict(FALSE, Reason.AUTHENTICATION_MISSING, text)
    if ray.reachability is Reachability.NOT_ASKED:
        text = "all pods are ready; Ray's dashboard was not asked yet"
        return Verdict(FALSE, Reason.DASHBOARD_UNREACHABLE, text)
    text = f"all pods are ready, but Ray's dashboard does not answer: {ray.error}"
    return Verdict(FALSE, Reason.DASHBOARD_UNREACHABLE, text)
