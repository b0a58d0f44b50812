"""Waits until the pod that reads the results runs, and says why it does not start."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rljob.cluster import Cluster
from rljob.errors import ClusterUnreachableError, NotAllowedError, ObjectNotFoundError, ResultsError
from rljob.kubernetes_models import Event, Pod
from rljob.plain_text import one_line
from rljob.polling import MAX_UNREACHABLE_SECONDS, Clock
from rljob.results.connection import PodGoneError
from rljob.stored_job import StoredJob

POLL_SECONDS = 1.0
START_SECONDS = 300.0
"""How long the pod may take to start, without the time to pull its image. A volume that is attached to another node, or
a node that is added for the pod, takes some minutes."""
PULL_SECONDS = 1800.0
"""How long the pull of the image may take."""
PROBLEM_SECONDS = 10.0
"""How long the container may be in a state that is probably, but not certainly, final."""
_FINAL = ("ErrImageNeverPull", "InvalidImageName")
_PROBABLY_FINAL = (
    *("ErrImagePull", "ImagePullBackOff", "ImageInspectError", "RegistryUnavailable"),
    *("CreateContainerConfigError", "CreateContainerError", "RunContainerError", "CrashLoopBackOff"),
)
_PULL_BEGINS, _PULL_ENDS = "Pulling", ("Pulled", "Failed", "BackOff")
"""Reasons of the kubelet's events about an image."""


def wait_until_running(cluster: Cluster, job: StoredJob, name: str, note: Callable[[str], None], clock: Clock) -> None:
    """Waits until the pod runs.

    Raises:
        ResultsError: it cannot start, or did not start in time; the message has the reason that Kubernetes reports.
        PodGoneError: somebody deleted it.
        ClusterUnreachableError: the API server did not respond for long.
    """
    started, problem_since, noted = clock.now(), None, ""
    pulled_at = read_at = 0.0
    while True:
        seconds = (clock.now() - started).total_seconds()
        try:
            pod, events = _read(cluster, job.metadata.namespace, name)
        except ClusterUnreachableError:
            if seconds - read_at > MAX_UNREACHABLE_SECONDS:
                raise
            # What the pod does meanwhile cannot be seen, so this time does not count.
            pulled_at = seconds
            clock.sleep(POLL_SECONDS)
            continue
        read_at = seconds
        if pod.status.phase == "Running":
            return
        reason, message = _waiting_reason(pod, events)
        if pod.status.phase in ("Succeeded", "Failed"):
            raise _not_started(job, reason or pod.status.phase, message)
        if reason in _PROBABLY_FINAL or reason in _FINAL:
            problem_since = seconds if problem_since is None else problem_since
            if reason in _FINAL or seconds - problem_since > PROBLEM_SECONDS:
                raise _not_started(job, reason, message)
        else:
            problem_since = None
        pull = _pull(events)
        if pull is not None:
            pulled_at = seconds
        if seconds - pulled_at > START_SECONDS or (pull is not None and seconds > PULL_SECONDS):
            raise _not_started(job, reason or "not started", message or f"after {seconds:.0f} s")
        waits_for = pull.message if pull is not None else message
        if waits_for not in ("", noted):
            note(f"waiting: {one_line(waits_for)}")
            noted = waits_for
        clock.sleep(POLL_SECONDS)


def _read(cluster: Cluster, namespace: str, name: str) -> tuple[Pod, Sequence[Event]]:
    """The pod, and the events about it, oldest first."""
    try:
        pod = Pod.model_validate(cluster.request("GET", f"/api/v1/namespaces/{namespace}/pods/{name}"))
    except ObjectNotFoundError as error:
        raise PodGoneError(f"pod {name} was deleted") from error
    return pod, _events(cluster, namespace, name)


def _events(cluster: Cluster, namespace: str, pod: str) -> Sequence[Event]:
    """The events about the pod, oldest first; none without permission to list events."""
    query = [("fieldSelector", f"involvedObject.kind=Pod,involvedObject.name={pod}")]
    try:
        items = cluster.request("GET", f"/api/v1/namespaces/{namespace}/events", query).get("items")
    except NotAllowedError:
        return []
    found = map(Event.model_validate, items if isinstance(items, list) else [])
    return sorted(found, key=lambda event: event.seen)


def _pull(events: Sequence[Event]) -> Event | None:
    """The event about a pull of the image that has not ended; None if there is none. Only the kubelet's
    events are compared: their times are whole seconds, unlike those of the scheduler."""
    own = [event for event in events if event.reason in (_PULL_BEGINS, *_PULL_ENDS)]
    begun = [event for event in own if event.reason == _PULL_BEGINS]
    if not begun or any(event.reason in _PULL_ENDS and event.seen >= begun[-1].seen for event in own):
        return None
    return begun[-1]


def _waiting_reason(pod: Pod, events: Sequence[Event]) -> tuple[str, str]:
    """Why the pod does not run, as (reason, message); empty if Kubernetes reports nothing."""
    for status in pod.status.container_statuses:
        waiting, terminated = status.state.waiting, status.state.terminated
        if waiting is not None and waiting.reason in (*_FINAL, *_PROBABLY_FINAL):
            return waiting.reason, waiting.message
        if terminated is not None:
            return terminated.reason, terminated.message or f"exit code {terminated.exit_code}"
    if pod.status.reason:
        return pod.status.reason, pod.status.message
    warnings = [event for event in events if event.type == "Warning"]
    if warnings:
        return warnings[-1].reason, warnings[-1].message
    # These two only say that the containers have not started.
    unmet = [
        each
        for each in pod.status.conditions
        if each.status == "False" and each.message and each.type not in ("Ready", "ContainersReady")
    ]
    return (unmet[0].reason, unmet[0].message) if unmet else ("", "")


def _not_started(job: StoredJob, reason: str, message: str) -> ResultsError:
    storage = job.storage
    claim = storage.persistent_volume_claim if storage is not None else ""
    advice = "correct what this message names, and run the command again"
    if "Image" in reason or reason in ("ErrImagePull", "StartError"):
        advice = "give an image that has python3 with --image"
    elif reason in ("FailedMount", "FailedAttachVolume"):
        advice = f"see `kubectl describe pvc {claim} -n {job.metadata.namespace}`"
    elif reason in ("FailedScheduling", "Unschedulable", "SchedulingGated"):
        advice = "the pod needs 50m CPU and 64Mi memory on a node that can mount the claim"
    text = f"{one_line(reason)}: {one_line(message)}" if message else one_line(reason)
    return ResultsError(f"{job.where}: the pod that reads the results did not start ({text}); {advice}")
