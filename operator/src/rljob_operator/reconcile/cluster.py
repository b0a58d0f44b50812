"""How far the attempt's RayCluster is: ClusterReady, PlacementFeasible and the numbers of the pools.

Which of its pods are ready and what keeps the others, whether they have joined Ray, and whether Ray can place what the
trainer reserves.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from rljob_api.conditions import ConditionType, Reason
from rljob_api.constants import HEAD_GROUP
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_api.v1alpha1.status import ConditionStatus, PoolStatus
from rljob_operator.reconcile.observed import (
    EffectKind,
    Observed,
    ObservedCluster,
    ObservedPod,
    ObservedRay,
    PodProblem,
    Reachability,
)
from rljob_operator.reconcile.status_draft import FALSE, TRUE, UNKNOWN, StatusDraft, timestamp

SHORT_SILENCE_SECONDS = 20.0
"""A dashboard that has not answered for less may only be busy."""
NODE_LOST_SECONDS = 60
"""How long a node may not be heard of before its pods count as lost."""

Pods = tuple[ObservedPod, ...]

_MOST_TELLING_FIRST = (
    Reason.OUT_OF_MEMORY,
    Reason.CONTAINER_CONFIG_ERROR,
    Reason.IMAGE_PULL_FAILED,
    Reason.VOLUME_MOUNT_FAILED,
    Reason.CONTAINER_CRASHING,
    Reason.UNSCHEDULABLE,
)


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
    ours = _our_cluster(draft, observed)
    if spec is not None:
        asked = observed.job.spec or spec
        draft.pools = _pool_statuses(asked, observed.pods_of(draft.attempt.cluster) if ours is not None else ())
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


def report_placement(draft: StatusDraft, observed: Observed, spec: RLJobSpec, *, cluster_ready: bool) -> str | None:
    """Sets PlacementFeasible, once the cluster is ready; says nothing new while it is not. Returns what is missing;
    None where nothing is, or nothing is known."""
    ray = observed.ray
    if not cluster_ready or ray.reachability is not Reachability.OK:
        return None
    reason, message = _placement_verdict(spec, ray)
    feasible = reason is Reason.FEASIBLE
    draft.set(ConditionType.PLACEMENT_FEASIBLE, TRUE if feasible else FALSE, reason, message)
    return None if feasible else message


def is_lost(pod: ObservedPod) -> bool:
    """Whether nobody on its node carries out what is asked of the pod. What it may still do, fencing makes harmless."""
    return pod.overdue or pod.node_silent_seconds >= NODE_LOST_SECONDS


def is_cleared(observed: Observed) -> bool:
    """Whether nothing of the job runs: no cluster, and no pod but lost ones."""
    return not observed.clusters and all(is_lost(pod) for pod in observed.pods)


def head_pod(pods: Pods) -> ObservedPod | None:
    """The head pod that is alive, or else one that has ended or is going."""
    heads = sorted(
        (pod for pod in pods if pod.group == HEAD_GROUP), key=lambda pod: (pod.ended, pod.deleting, pod.name)
    )
    return heads[0] if heads else None


def not_ready(spec: RLJobSpec, pods: Pods, creation_error: str | None) -> PodProblem | None:
    """What is missing, in numbers, and the most telling reason; None when every pod is ready."""
    desired = {HEAD_GROUP: 1, **{pool.name: pool.nodes for pool in spec.pools}}
    ready = {group: min(count, _num_ready(pods, group)) for group, count in desired.items()}
    if ready == desired:
        return None
    summary = f"{sum(ready.values())} of {sum(desired.values())} pods ready"
    there = Counter(pod.group for pod in pods if not (pod.ended or pod.deleting))
    num_missing = sum(max(0, count - there[group]) for group, count in desired.items())
    if creation_error and num_missing:
        return PodProblem(Reason.POD_CREATION_FAILED, f"{summary}; {num_missing} cannot be created: {creation_error}")
    problems = _problems(pods)
    if problems:
        rank = {reason: place for place, reason in enumerate(_MOST_TELLING_FIRST)}
        reason, group = min(problems, key=lambda key: (rank.get(key[0], len(rank)), -len(problems[key]), key[1]))
        return PodProblem(reason, f"{summary}; {_told(problems[reason, group], group, desired.get(group, 0))}")
    waiting = [_named(group, count - ready[group]) for group, count in desired.items() if count > ready[group]]
    return PodProblem(Reason.PODS_PENDING, f"{summary}; waiting for {' and '.join(waiting)}")


def _our_cluster(draft: StatusDraft, observed: Observed) -> ObservedCluster | None:
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
        missing = _missing_ray_nodes(spec, observed.ray)
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


def _pool_statuses(spec: RLJobSpec, pods: Pods) -> tuple[PoolStatus, ...]:
    """Desired and ready nodes of each pool."""
    return tuple(
        PoolStatus(name=pool.name, desired=pool.nodes, ready=min(pool.nodes, _num_ready(pods, pool.name)))
        for pool in spec.pools
    )


def _num_ready(pods: Pods, group: str) -> int:
    return sum(pod.group == group and pod.ready and not (pod.deleting or pod.ended) for pod in pods)


def _problems(pods: Pods) -> dict[tuple[Reason, str], list[tuple[str, str]]]:
    """Names and messages of the pods that do not start, in the order of their names, by reason and group."""
    found: dict[tuple[Reason, str], list[tuple[str, str]]] = {}
    for pod in sorted(pods, key=lambda pod: pod.name):
        if pod.problem is not None and not (pod.ready or pod.deleting):
            found.setdefault((pod.problem.reason, pod.group), []).append((pod.name, pod.problem.message))
    return found


def _told(pods: list[tuple[str, str]], group: str, desired: int) -> str:
    name, message = pods[0]
    if group == HEAD_GROUP:
        return f"the head pod {name}: {message}"
    return f"{len(pods)} of {desired} pods of pool {group}: {message} (pod {name})"


def _named(group: str, count: int) -> str:
    return "the head pod" if group == HEAD_GROUP else f"{count} of pool {group}"


def _missing_ray_nodes(spec: RLJobSpec, ray: ObservedRay) -> str | None:
    """Which pods have not joined Ray; None when all have."""
    num_workers = sum(pool.nodes for pool in spec.pools)
    num_joined = min(num_workers, sum(not node.is_head for node in ray.nodes))
    has_head = any(node.is_head for node in ray.nodes)
    if num_joined == num_workers and has_head:
        return None
    num_pods = num_workers + 1
    return f"{num_pods} of {num_pods} pods ready, {num_joined + has_head} of them in Ray"


def _placement_verdict(spec: RLJobSpec, ray: ObservedRay) -> tuple[Reason, str]:
    expected = sorted((pool.gpus_per_node for pool in spec.pools for _ in range(pool.nodes)), reverse=True)
    seen = sorted((node.num_gpus for node in ray.nodes if not node.is_head), reverse=True)
    numbers = f"Ray has {sum(seen)} of {sum(expected)} GPUs"
    if any(there < needed for there, needed in zip(seen, expected, strict=False)):
        return Reason.INSUFFICIENT_GPUS, f"{numbers}, {seen[-1]} on the node with the fewest"
    if ray.infeasible_groups:
        return Reason.PLACEMENT_GROUP_INFEASIBLE, f"{numbers}; no node can hold {'; '.join(ray.infeasible_groups)}"
    return Reason.FEASIBLE, numbers
