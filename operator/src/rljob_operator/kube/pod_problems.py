"""Finds out from the status and events of a pod why the pod does not start or how it ended. It sends no requests."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta

from rljob_api.conditions import Reason
from rljob_api.constants import HEAD_GROUP, RAY_CONTAINER
from rljob_operator.kube.observed_objects import event_time, time_at
from rljob_operator.kube.server_clock import Ages
from rljob_operator.raw_json import JsonObject, flag_at, integer_at, object_at, objects_at, optional_text_at, text_at
from rljob_operator.reconcile.observed import ObservedPod, PodProblem

LABEL_CLUSTER = "ray.io/cluster"
LABEL_GROUP = "ray.io/group"
LABEL_NODE_TYPE = "ray.io/node-type"
START_PATIENCE = timedelta(seconds=8)
"""Time from the scheduling of a pod until its events are read. A healthy pod needs seconds to mount its volumes."""
LAST_STATE_MAX_AGE = timedelta(minutes=5)
"""Maximum age of `lastState.terminated` of a restarted container to count as a problem of the pod."""
DELETION_PATIENCE_SECONDS = 60.0
"""How long a pod may exist after its grace period before its deletion counts as overdue."""

_NOT_SCHEDULED = ("Unschedulable", "SchedulingGated")
# By `state.waiting.reason` of a container.
WAITING_REASONS = {
    "ErrImagePull": Reason.IMAGE_PULL_FAILED,
    "ImagePullBackOff": Reason.IMAGE_PULL_FAILED,
    "InvalidImageName": Reason.IMAGE_PULL_FAILED,
    "ErrImageNeverPull": Reason.IMAGE_PULL_FAILED,
    "ImageInspectError": Reason.IMAGE_PULL_FAILED,
    "RegistryUnavailable": Reason.IMAGE_PULL_FAILED,
    "CreateContainerConfigError": Reason.CONTAINER_CONFIG_ERROR,
    "CreateContainerError": Reason.CONTAINER_CONFIG_ERROR,
    "RunContainerError": Reason.CONTAINER_CONFIG_ERROR,
    "CrashLoopBackOff": Reason.CONTAINER_CRASHING,
}
# By the reason of an event about the pod.
EVENT_REASONS = {
    "FailedMount": Reason.VOLUME_MOUNT_FAILED,
    "FailedAttachVolume": Reason.VOLUME_MOUNT_FAILED,
    "FailedCreatePodSandBox": Reason.INFRASTRUCTURE_ERROR,
}


def observed_pod(raw: JsonObject, now: datetime, ages: Ages, events: Iterable[JsonObject] = ()) -> ObservedPod:
    """Parses a pod of a RayCluster. `events`: events about this pod; needed only if `needs_events` is true."""
    labels = object_at(raw, "metadata", "labels")
    return ObservedPod(
        name=text_at(raw, "metadata", "name"),
        cluster=text_at(labels, LABEL_CLUSTER),
        group=HEAD_GROUP if is_head(raw) else text_at(labels, LABEL_GROUP),
        ready=is_ready(raw),
        deleting=optional_text_at(raw, "metadata", "deletionTimestamp") is not None,
        ended=_ended(raw),
        problem=_problem(raw, now) or _problem_in(events),
        overdue=_seconds_overdue(raw, ages) > DELETION_PATIENCE_SECONDS,
        node=text_at(raw, "spec", "nodeName"),
        node_silent_seconds=_node_silent_seconds(raw, ages),
        uid=text_at(raw, "metadata", "uid"),
    )


def _seconds_overdue(raw: JsonObject, ages: Ages) -> float:
    """Seconds since the end of the grace period of a pod that is being deleted; negative before that, and if the pod is
    not being deleted."""
    grace_end = time_at(raw, "metadata", "deletionTimestamp")
    if grace_end is None:
        return -1.0
    # deletionTimestamp is the time of the request plus the grace period.
    grace_seconds = integer_at(raw, "metadata", "deletionGracePeriodSeconds") or 0
    return ages.seconds(text_at(raw, "metadata", "uid"), ("overdue", grace_end), grace_end, otherwise=-grace_seconds)


def _node_silent_seconds(raw: JsonObject, ages: Ages) -> float:
    """Seconds since the pod's node became NotReady; 0 if `is_on_not_ready_node` is false."""
    since = time_at(_condition(raw, "Ready"), "lastTransitionTime")
    if not is_on_not_ready_node(raw):
        return 0.0
    return max(0.0, ages.seconds(text_at(raw, "metadata", "uid"), ("not ready", since), since))


def is_of_ray_cluster(raw: JsonObject) -> bool:
    """Whether a pod belongs to a RayCluster, which may have been deleted without its pods. Other pods may carry the
    labels of a job, too, for example to reach the job's pods through their network policy."""
    owners = [owner for owner in objects_at(raw, "metadata", "ownerReferences") if flag_at(owner, "controller")]
    has_other_owner = any(text_at(owner, "kind") != "RayCluster" for owner in owners)
    return text_at(object_at(raw, "metadata", "labels"), LABEL_CLUSTER) != "" and not has_other_owner


def is_head(raw: JsonObject) -> bool:
    """Whether the pod is the head of its cluster."""
    return text_at(raw, "metadata", "labels", LABEL_NODE_TYPE) == "head"


def is_ready(raw: JsonObject) -> bool:
    """Whether the pod is ready, not counting the container that prints the driver's log."""
    if _ended(raw):
        return False
    ready = _condition(raw, "Ready")
    # With any other reason, such as a lost node, the whole pod is not ready, whatever its containers last reported.
    only_containers = text_at(ready, "reason") == "ContainersNotReady"
    return text_at(ready, "status") == "True" or (only_containers and _ray_container(raw).get("ready") is True)


def is_on_not_ready_node(raw: JsonObject) -> bool:
    """Whether the pod's node is NotReady. Kubernetes' node controller then sets the pod's condition Ready to False;
    only the kubelet writes ContainersReady, which stays True. The pod may still be running."""
    ready, containers = _condition(raw, "Ready"), _condition(raw, "ContainersReady")
    return text_at(ready, "status") == "False" and text_at(containers, "status") == "True" and not _ended(raw)


def needs_events(raw: JsonObject, now: datetime) -> bool:
    """Whether only events can explain why the pod does not start: it was scheduled at least `START_PATIENCE` ago, no
    container runs, and the pod's status shows no problem."""
    scheduled = _condition(raw, "PodScheduled")
    since = time_at(scheduled, "lastTransitionTime")
    if text_at(scheduled, "status") != "True" or since is None or now - since < START_PATIENCE:
        return False
    if text_at(raw, "status", "phase") != "Pending" or text_at(raw, "metadata", "deletionTimestamp"):
        return False
    if any(object_at(container, "state", "running") for container in _containers(raw)):
        # A running init container waits for the head; the pod itself is healthy.
        return False
    return _problem(raw, now) is None


def _ended(raw: JsonObject) -> bool:
    """Whether none of the pod's containers will run again."""
    return text_at(raw, "status", "phase") in ("Succeeded", "Failed")


def _problem(raw: JsonObject, now: datetime) -> PodProblem | None:
    """The most important problem that the pod's status shows; None if it shows none."""
    return _memory_problem(raw, now) or _lost(raw) or _waiting_problem(raw) or _unschedulable(raw) or _crashed(raw)


def _memory_problem(raw: JsonObject, now: datetime) -> PodProblem | None:
    """The problem if the Ray container ran out of memory, now or at most `LAST_STATE_MAX_AGE` ago."""
    container = _ray_container(raw)
    ends = [object_at(container, "state", "terminated")]
    former = object_at(container, "lastState", "terminated")
    finished = time_at(former, "finishedAt")
    if finished is not None and now - finished <= LAST_STATE_MAX_AGE:
        ends.append(former)
    if all(text_at(end, "reason") != "OOMKilled" for end in ends):
        return None
    return PodProblem(Reason.OUT_OF_MEMORY, f"container {RAY_CONTAINER} ran out of memory (OOMKilled)")


def _lost(raw: JsonObject) -> PodProblem | None:
    """The problem of a pod that Kubernetes removes (Disrupted), or that failed with its node; None for other pods."""
    disruption = _condition(raw, "DisruptionTarget")
    if text_at(disruption, "status") == "True":
        message = _joined(text_at(disruption, "reason"), text_at(disruption, "message"))
        return PodProblem(Reason.DISRUPTED, message)
    if text_at(raw, "status", "phase") == "Failed" and text_at(raw, "status", "reason"):
        message = _joined(text_at(raw, "status", "reason"), text_at(raw, "status", "message"))
        return PodProblem(Reason.INFRASTRUCTURE_ERROR, message)
    return None


def _waiting_problem(raw: JsonObject) -> PodProblem | None:
    """The problem of the first container that waits with one of `WAITING_REASONS`."""
    for container in _containers(raw):
        waiting = text_at(container, "state", "waiting", "reason")
        reason = WAITING_REASONS.get(waiting)
        if reason is Reason.CONTAINER_CRASHING:
            return _crash(container)
        if reason is not None:
            message = _joined(waiting, text_at(container, "state", "waiting", "message"))
            return PodProblem(reason, f"container {text_at(container, 'name')}: {message}")
    return None


def _unschedulable(raw: JsonObject) -> PodProblem | None:
    scheduled = _condition(raw, "PodScheduled")
    if text_at(scheduled, "status") != "False" or text_at(scheduled, "reason") not in _NOT_SCHEDULED:
        return None
    message = text_at(scheduled, "message") or "the scheduler found no node for the pod"
    is_claim_missing = "persistentvolumeclaim" in message and "not found" in message
    return PodProblem(Reason.VOLUME_MOUNT_FAILED if is_claim_missing else Reason.UNSCHEDULABLE, message)


def _crashed(raw: JsonObject) -> PodProblem | None:
    """The problem of a pod that has failed, or that has a container which fails again after each restart: after a
    restart, such a pod looks as if it were starting for the first time."""
    if text_at(raw, "status", "phase") != "Failed":
        return next((_crash(container) for container in _containers(raw) if _keeps_crashing(container)), None)
    for container in _containers(raw):
        if integer_at(container, "state", "terminated", "exitCode"):
            return _crash(container)
    return PodProblem(Reason.CONTAINER_CRASHING, text_at(raw, "status", "message") or "the pod has failed")


def _keeps_crashing(container: JsonObject) -> bool:
    ended_badly = bool(integer_at(container, "lastState", "terminated", "exitCode"))
    return ended_badly and container.get("ready") is not True and (integer_at(container, "restartCount") or 0) > 1


def _crash(container: JsonObject) -> PodProblem:
    """The problem of a container that has crashed."""
    return PodProblem(Reason.CONTAINER_CRASHING, f"container {text_at(container, 'name')}: {_termination(container)}")


def _termination(container: JsonObject) -> str:
    """How the container last terminated, without the restart count, which would change the job's status each time."""
    for state in ("state", "lastState"):
        ended = object_at(container, state, "terminated")
        if ended:
            code = integer_at(ended, "exitCode")
            return _joined(f"terminated with exit code {code}", text_at(ended, "message").strip()[-300:])
    return "terminates repeatedly"


def _problem_in(events: Iterable[JsonObject]) -> PodProblem | None:
    """The problem that the newest event with one of `EVENT_REASONS` reports; None without such an event."""
    found = [event for event in events if text_at(event, "reason") in EVENT_REASONS]
    if not found:
        return None
    newest = max(found, key=event_time)
    reason = text_at(newest, "reason")
    return PodProblem(EVENT_REASONS[reason], _joined(reason, text_at(newest, "message")))


def _containers(raw: JsonObject) -> tuple[JsonObject, ...]:
    """Statuses of all containers; init containers first, because the others wait for them."""
    status = object_at(raw, "status")
    return (*objects_at(status, "initContainerStatuses"), *objects_at(status, "containerStatuses"))


def _ray_container(raw: JsonObject) -> JsonObject:
    """The status of the container that runs Ray; empty if there is none yet."""
    containers = objects_at(raw, "status", "containerStatuses")
    return next((each for each in containers if text_at(each, "name") == RAY_CONTAINER), {})


def _condition(raw: JsonObject, condition_type: str) -> JsonObject:
    """The condition of this type; empty if there is none."""
    for condition in objects_at(raw, "status", "conditions"):
        if text_at(condition, "type") == condition_type:
            return condition
    return {}


def _joined(*parts: str) -> str:
    return ": ".join(part for part in parts if part)
