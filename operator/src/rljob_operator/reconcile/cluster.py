"""Judges the attempt's RayCluster: sets ClusterReady and the status of the pools.

It checks which pods are ready and what blocks the others, and whether the pods have joined Ray.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from rljob_api.conditions import NO_ROOM, ConditionType, Reason
from rljob_api.constants import HEAD_GROUP
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_api.v1alpha1.status import Attempt, AttemptState, ConditionStatus, PoolStatus
from rljob_operator.reconcile.observed import (
    EffectKind,
    Observed,
    ObservedCluster,
    ObservedPod,
    ObservedRay,
    ObservedWorkload,
    PodProblem,
    Reachability,
)
from rljob_operator.reconcile.quota import is_quota_in_use
from rljob_operator.reconcile.status_draft import FALSE, TRUE, UNKNOWN, StatusDraft, moment, timestamp

SHORT_SILENCE_SECONDS = 20.0
"""A dashboard that has not responded for a shorter time may only be busy."""
NODE_LOST_SECONDS = 60
"""How long a Kubernetes node may be unreachable before its pods count as lost."""

Pods = tuple[ObservedPod, ...]

_MOST_SPECIFIC_FIRST = (
    Reason.OUT_OF_MEMORY,
    Reason.CONTAINER_CONFIG_ERROR,
    Reason.IMAGE_PULL_FAILED,
    Reason.VOLUME_MOUNT_FAILED,
    Reason.CONTAINER_CRASHING,
    Reason.UNSCHEDULABLE,
    Reason.DISRUPTED,
)
"""If pods have different problems, the reason that comes first here is reported."""


@dataclass(frozen=True)
class Finding:
    """The value of one condition, as this pass found it."""

    status: ConditionStatus
    reason: Reason
    message: str

    @property
    def is_true(self) -> bool:
        """Whether the condition is True."""
        return self.status is TRUE


def report_cluster(draft: StatusDraft, observed: Observed, spec: RLJobSpec | None) -> Finding | None:
    """Sets ClusterReady and the status of the pools, and records the cluster's UID once the cluster exists. If the spec
    cannot be read (`spec` is None), only the head pod is checked, and the pools stay as they are. Returns ClusterReady;
    None if nothing can be reported."""
    cluster = _cluster_of_attempt(draft, observed)
    if spec is not None:
        requested = observed.job.spec or spec
        draft.pools = _pool_statuses(requested, observed.pods_of(draft.attempt.cluster) if cluster is not None else ())
        draft.gpus = sum(pool.nodes * pool.gpus_per_node for pool in requested.pools)
    _record_name_conflict(draft, observed, cluster)
    if cluster is not None:
        _record_cluster(draft, cluster)
        _report_quota(draft, cluster)
    if cluster is None:
        finding: Finding | None = _finding_without_cluster(draft, observed)
    else:
        finding = _finding_with_cluster(draft, observed, spec, cluster)
    if finding is not None:
        draft.set(ConditionType.CLUSTER_READY, finding.status, finding.reason, finding.message)
        if finding.reason in (Reason.QUEUED, *NO_ROOM):
            draft.begin_waiting()
        elif finding.reason not in (Reason.CREATING, Reason.PODS_PENDING) or _have_pods_nodes(draft, observed):
            _end_waiting(draft)
        if finding.is_true and draft.attempt.ready_at is None:
            head = head_pod(observed.pods_of(draft.attempt.cluster))
            draft.change_attempt(
                ready_at=timestamp(draft.now), head_pod_uid=head.uid or None if head is not None else None
            )
    return finding


def _end_waiting(draft: StatusDraft) -> None:
    """Records that the job no longer waits for capacity. The time of the wait does not count toward the deadlines,
    unless the trainer was running."""
    since, active = draft.waiting_since, draft.attempt.active_since
    if since is not None and active is not None and draft.attempt.running_since is None:
        waited = draft.now - max(moment(since), moment(active))
        counted = moment(draft.attempt.scheduled_at or active) + waited
        draft.change_attempt(scheduled_at=timestamp(min(counted, draft.now)))
    draft.waiting_since = None


def _have_pods_nodes(draft: StatusDraft, observed: Observed) -> bool:
    """Whether the attempt has pods, and the scheduler has found nodes for all of them."""
    pods = observed.pods_of(draft.attempt.cluster)
    return bool(pods) and all(pod.node for pod in pods)


def _queue_finding(draft: StatusDraft, cluster: ObservedCluster) -> Finding | None:
    """What a suspended cluster waits for: it has not been admitted yet (reason Queued), or it was suspended again after
    it had been admitted (reason Evicted). None if the cluster is not suspended."""
    if not cluster.is_suspended:
        return None
    reason = Reason.QUEUED if draft.attempt.active_since is None else Reason.EVICTED
    text = f"RayCluster {cluster.name} is suspended"
    if cluster.queue:
        what = "waits in" if reason is Reason.QUEUED else "was evicted by"
        text = f"RayCluster {cluster.name} {what} queue {cluster.queue} (Kueue)"
    workload = cluster.workload or ObservedWorkload()
    messages = (workload.waits_for, workload.evicted_because)
    why = next(filter(None, messages if reason is Reason.QUEUED else reversed(messages)), "")
    text += f": {why}" if why else ""
    return Finding(FALSE, reason, text)


def is_lost(pod: ObservedPod) -> bool:
    """Whether the pod's Kubernetes node no longer responds, so that the pod cannot be stopped. The pod may still be
    running; checkpoints that it saves later are not used (fencing by start numbers)."""
    return pod.overdue or pod.node_silent_seconds >= NODE_LOST_SECONDS


def were_pods_deleted(attempt: Attempt, cluster: ObservedCluster, pods: Pods) -> bool:
    """Whether KubeRay has deleted all pods of the attempt because the cluster was suspended, also if it was admitted
    again since then: only this resets `provisioned` of a cluster whose pods were all ready."""
    was_complete = attempt.ready_at is not None and not attempt.nodes
    # KubeRay may also report this late, or never while one pod is not ready. So it counts only in a queue.
    is_reset = was_complete and cluster.provisioned is False and bool(cluster.queue)
    return is_reset or was_head_replaced(attempt, pods)


def was_head_replaced(attempt: Attempt, pods: Pods) -> bool:
    """Whether the head pod is another one than when all pods of the attempt were ready. KubeRay replaces the head pod
    of such a cluster only after a suspension. An attempt on fewer pods than requested does not count."""
    head = head_pod(pods)
    return head is not None and attempt.head_pod_uid not in (None, head.uid) and not attempt.nodes


def disrupted_pod(pods: Pods, *, is_complete: bool = False) -> str | None:
    """Which pod Kubernetes takes away, and why (preemption, drain, eviction); None if it takes none away.
    `is_complete`: whether all needed pods are ready. Then pods that terminate do not count, because KubeRay has
    replaced them."""
    for pod in sorted(pods, key=lambda pod: pod.name):
        is_disrupted = pod.problem is not None and pod.problem.reason is Reason.DISRUPTED
        if pod.problem is not None and is_disrupted and not (is_complete and (pod.deleting or pod.ended)):
            return f"pod {pod.name}: {pod.problem.message}"
    return None


def are_clusters_deleted(observed: Observed) -> bool:
    """Whether the job has no RayCluster, and no pods except lost ones (`is_lost`)."""
    return not observed.clusters and all(is_lost(pod) for pod in observed.pods)


def head_pod(pods: Pods) -> ObservedPod | None:
    """The head pod among these pods of one cluster. If there are several: one that has not ended and is not being
    deleted, if possible. None if there is none."""
    heads = sorted(
        (pod for pod in pods if pod.group == HEAD_GROUP), key=lambda pod: (pod.ended, pod.deleting, pod.name)
    )
    return heads[0] if heads else None


def readiness_problem(spec: RLJobSpec, pods: Pods, creation_error: str | None) -> PodProblem | None:
    """How many of the pods that the spec requests are ready, and the most specific reason why the others are not; None
    if all are ready. `creation_error`: KubeRay's message if it could not create a pod."""
    desired = {HEAD_GROUP: 1, **{pool.name: pool.nodes for pool in spec.pools}}
    ready = {group: min(count, _num_ready(pods, group)) for group, count in desired.items()}
    if ready == desired:
        return None
    summary = f"{sum(ready.values())} of {sum(desired.values())} pods ready"
    existing = Counter(pod.group for pod in pods if not (pod.ended or pod.deleting))
    num_missing = sum(max(0, count - existing[group]) for group, count in desired.items())
    if creation_error and num_missing:
        reason = Reason.QUOTA_EXCEEDED if is_quota_in_use(creation_error, spec) else Reason.POD_CREATION_FAILED
        return PodProblem(reason, f"{summary}; {num_missing} cannot be created: {creation_error}")
    problems = _problems(pods)
    if problems:
        rank = {reason: index for index, reason in enumerate(_MOST_SPECIFIC_FIRST)}
        reason, group = min(problems, key=lambda key: (rank.get(key[0], len(rank)), -len(problems[key]), key[1]))
        return PodProblem(reason, f"{summary}; {_description(problems[reason, group], group, desired.get(group, 0))}")
    waiting = [_pods_text(group, count - ready[group]) for group, count in desired.items() if count > ready[group]]
    return PodProblem(Reason.PODS_PENDING, f"{summary}; waiting for {' and '.join(waiting)}")


def _cluster_of_attempt(draft: StatusDraft, observed: Observed) -> ObservedCluster | None:
    """The newest attempt's cluster, if it exists and is not being deleted. A cluster with its name and another UID does
    not count."""
    cluster = observed.cluster(draft.attempt.cluster)
    if cluster is None or cluster.deleting or draft.attempt.cluster_uid not in (None, cluster.uid):
        return None
    return cluster


def _record_cluster(draft: StatusDraft, cluster: ObservedCluster) -> None:
    """Records the cluster's UID, and since when the cluster is not suspended by a queue."""
    if draft.attempt.cluster_uid is None:
        draft.change_attempt(cluster_uid=cluster.uid)
    if draft.attempt.active_since is not None:
        return
    if cluster.is_suspended:
        draft.change_attempt(state=AttemptState.QUEUED.value)
    else:
        draft.change_attempt(state=AttemptState.PROVISIONING.value, active_since=timestamp(draft.now))


def _report_quota(draft: StatusDraft, cluster: ObservedCluster) -> None:
    """Sets QuotaReserved for a cluster that is or was in a queue."""
    kind, found = ConditionType.QUOTA_RESERVED, _queue_finding(draft, cluster)
    if found is not None:
        draft.set(kind, found.status, found.reason, found.message)
    elif cluster.queue:
        draft.set(kind, TRUE, Reason.ADMITTED, f"queue {cluster.queue}")
    else:
        draft.set_if_present(kind, TRUE, Reason.ADMITTED, "the cluster is not suspended")


def _record_name_conflict(draft: StatusDraft, observed: Observed, cluster: ObservedCluster | None) -> None:
    """Records since when a cluster of another owner has the name of the attempt's cluster. Only a failed creation shows
    this. The record is cleared when the attempt's cluster exists, or when its creation fails for another reason."""
    failure, since = observed.failure, draft.attempt.name_taken_since
    has_failed = failure is not None and failure.kind is EffectKind.CREATE_CLUSTER
    is_taken = has_failed and failure is not None and failure.reason is Reason.NAME_CONFLICT
    if is_taken and cluster is None and since is None:
        draft.change_attempt(name_taken_since=timestamp(draft.now))
    elif since is not None and (cluster is not None or (has_failed and not is_taken)):
        draft.change_attempt(name_taken_since=None)


def _finding_without_cluster(draft: StatusDraft, observed: Observed) -> Finding:
    """ClusterReady while the attempt's cluster does not exist or is being deleted."""
    name, failure = draft.attempt.cluster, observed.failure
    if not observed.kuberay_installed:
        text = "this Kubernetes cluster has no resource RayCluster (ray.io/v1); install KubeRay"
        return Finding(FALSE, Reason.KUBERAY_UNAVAILABLE, text)
    if observed.forbidden is not None:
        return Finding(UNKNOWN, Reason.READ_FORBIDDEN, observed.forbidden)
    if draft.attempt.cluster_uid is not None or observed.cluster(name) is not None:
        return Finding(FALSE, Reason.CLUSTER_LOST, f"RayCluster {name} was deleted while the job needed it")
    if failure is not None and failure.kind is EffectKind.CREATE_CLUSTER:
        reason = Reason.QUOTA_EXCEEDED if is_quota_in_use(failure.message, observed.job.spec) else failure.reason
        return Finding(FALSE, reason, failure.message)
    return Finding(FALSE, Reason.CREATING, f"RayCluster {name} is being created")


def _finding_with_cluster(
    draft: StatusDraft, observed: Observed, spec: RLJobSpec | None, cluster: ObservedCluster
) -> Finding | None:
    """ClusterReady while the attempt's cluster exists; None if the spec cannot be read and nothing is known to be
    wrong."""
    if observed.forbidden is not None:
        return Finding(UNKNOWN, Reason.READ_FORBIDDEN, observed.forbidden)
    queued = _queue_finding(draft, cluster)
    if queued is not None and queued.reason is Reason.QUEUED:
        return queued
    lost = _lost_head(draft, observed, cluster)
    if lost is not None:
        return Finding(FALSE, Reason.HEAD_LOST, lost)
    if not cluster.asks_for_token:
        text = f"RayCluster {cluster.name} has no spec.authOptions: KubeRay is too old; install KubeRay 1.6 or later"
        return Finding(FALSE, Reason.KUBERAY_TOO_OLD, text)
    if queued is not None or spec is None:
        return queued
    problem = readiness_problem(spec, observed.pods_of(cluster.name), cluster.pod_creation_error)
    if problem is not None:
        return Finding(FALSE, problem.reason, problem.message)
    if observed.ray.reachability is Reachability.OK:
        missing = _missing_ray_nodes(spec, observed.ray)
        if missing is not None and draft.attempt.running_since is None:
            return Finding(FALSE, Reason.RAY_NODES_MISSING, missing)
    elif draft.attempt.running_since is None:
        # Once the trainer is running, Progressing reports an unreachable dashboard; the cluster stays ready.
        return _finding_without_dashboard(observed)
    num_pods = 1 + sum(pool.nodes for pool in spec.pools)
    fewer = ", ".join(f"{pool.nodes} of pool {pool.name}" for pool in draft.attempt.nodes)
    note = f"; the job runs with fewer worker pods than requested: {fewer} (runPolicy.elastic)" if fewer else ""
    return Finding(TRUE, Reason.READY, f"{num_pods} of {num_pods} pods ready and in Ray{note}")


def _lost_head(draft: StatusDraft, observed: Observed, cluster: ObservedCluster) -> str | None:
    """How the head pod was lost; None if it was not. Before all pods of the cluster are ready for the first time, a
    head pod does not count as lost, because KubeRay replaces it until then."""
    attempt = draft.attempt
    was_complete = attempt.submissions > 0 or attempt.ready_at is not None or cluster.provisioned is True
    if not was_complete:
        return None
    head = head_pod(observed.pods_of(cluster.name))
    if head is None:
        return "the head pod was deleted"
    name = f"the head pod {head.name}" + (f" on node {head.node}" if head.node else "")
    if head.ended:
        problem = head.problem.message if head.problem is not None else "reason unknown"
        return f"{name} has terminated: {problem}"
    if head.overdue:
        return f"{name} should have been deleted, but the node does not respond; the node seems to be lost"
    if head.node_silent_seconds >= NODE_LOST_SECONDS and _is_dashboard_silent(observed):
        return (
            f"{name} does not respond: the node has been unreachable for {min(head.node_silent_seconds, 3600):.0f} s,"
            " and Ray's dashboard is unreachable, too; the node seems to be lost"
        )
    return None


def _is_dashboard_silent(observed: Observed) -> bool:
    """Whether the dashboard cannot be polled, or polls have failed for at least `SHORT_SILENCE_SECONDS`."""
    ray = observed.ray
    return ray.reachability is Reachability.NOT_ASKED or (
        ray.reachability is not Reachability.OK and ray.silent_seconds >= SHORT_SILENCE_SECONDS
    )


def _finding_without_dashboard(observed: Observed) -> Finding:
    """ClusterReady when all pods are ready, but the dashboard does not work for the operator."""
    ray = observed.ray
    if ray.reachability is Reachability.REJECTED:
        text = f"all pods are ready, but Ray rejects the operator's token: {ray.error}"
        return Finding(FALSE, Reason.TOKEN_REJECTED, text)
    if ray.reachability is Reachability.OPEN:
        text = f"all pods are ready, but Ray's token authentication is off: {ray.error}"
        return Finding(FALSE, Reason.AUTHENTICATION_MISSING, text)
    if ray.reachability is Reachability.NOT_ASKED:
        text = "all pods are ready; waiting for the first response of Ray's dashboard"
        return Finding(FALSE, Reason.DASHBOARD_UNREACHABLE, text)
    text = f"all pods are ready, but Ray's dashboard is unreachable: {ray.error}"
    return Finding(FALSE, Reason.DASHBOARD_UNREACHABLE, text)


def _pool_statuses(spec: RLJobSpec, pods: Pods) -> tuple[PoolStatus, ...]:
    """Desired and ready worker pods of each pool."""
    return tuple(
        PoolStatus(name=pool.name, desired=pool.nodes, ready=min(pool.nodes, _num_ready(pods, pool.name)))
        for pool in spec.pools
    )


def _num_ready(pods: Pods, group: str) -> int:
    """How many pods of a group (a pool, or the head) are ready."""
    return sum(pod.group == group and pod.ready and not (pod.deleting or pod.ended) for pod in pods)


def _problems(pods: Pods) -> dict[tuple[Reason, str], list[tuple[str, str]]]:
    """Names and messages of the pods that have a problem and are not ready, by reason and group; sorted by pod name."""
    found: dict[tuple[Reason, str], list[tuple[str, str]]] = {}
    for pod in sorted(pods, key=lambda pod: pod.name):
        if pod.problem is not None and not (pod.ready or pod.deleting):
            found.setdefault((pod.problem.reason, pod.group), []).append((pod.name, pod.problem.message))
    return found


def _description(pods: list[tuple[str, str]], group: str, desired: int) -> str:
    """Describes pods of one group with the same reason. `pods`: their names and messages; `desired`: how many pods the
    group should have."""
    name, message = pods[0]
    if group == HEAD_GROUP:
        return f"the head pod {name}: {message}"
    return f"{len(pods)} of {desired} pods of pool {group}: {message} (pod {name})"


def _pods_text(group: str, count: int) -> str:
    return "the head pod" if group == HEAD_GROUP else f"{count} of pool {group}"


def _missing_ray_nodes(spec: RLJobSpec, ray: ObservedRay) -> str | None:
    """How many pods have joined Ray, for a message; None if all pods of the spec have joined."""
    num_workers = sum(pool.nodes for pool in spec.pools)
    num_joined = min(num_workers, sum(not node.is_head for node in ray.nodes))
    has_head = any(node.is_head for node in ray.nodes)
    if num_joined == num_workers and has_head:
        return None
    num_pods = num_workers + 1
    return f"{num_pods} of {num_pods} pods ready, {num_joined + has_head} of them have joined Ray"
