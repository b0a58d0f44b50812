"""Which pods a cluster should have, which are ready, and what keeps the others."""

from __future__ import annotations

from collections import Counter

from rljob_api.conditions import Reason
from rljob_api.constants import HEAD_GROUP
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_api.v1alpha1.status import PoolStatus
from rljob_operator.reconcile.observed import ObservedPod, PodProblem

Pods = tuple[ObservedPod, ...]

_MOST_TELLING_FIRST = (
    Reason.OUT_OF_MEMORY,
    Reason.CONTAINER_CONFIG_ERROR,
    Reason.IMAGE_PULL_FAILED,
    Reason.VOLUME_MOUNT_FAILED,
    Reason.CONTAINER_CRASHING,
    Reason.UNSCHEDULABLE,
)


def pool_statuses(spec: RLJobSpec, pods: Pods) -> tuple[PoolStatus, ...]:
    """Desired and ready nodes of each pool."""
    return tuple(
        PoolStatus(name=pool.name, desired=pool.nodes, ready=min(pool.nodes, _num_ready(pods, pool.name)))
        for pool in spec.pools
    )


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
