"""What a pod's status and events say about why it does not start or how it ended."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta

import pytest

from rljob_api.conditions import Reason
from rljob_operator.kube import pod_problems
from rljob_operator.kube.allowed_calls import PODS
from rljob_operator.kube.pod_problems import is_ready, needs_events
from rljob_operator.kube.projections import projected
from rljob_operator.reconcile.observed import ObservedPod, PodProblem
from rljob_testing.operator import manual_clock

Json = Mapping[str, object]
NOW = datetime(2026, 1, 31, 12, 0, 30, tzinfo=UTC)
SCHEDULED = {"type": "PodScheduled", "status": "True", "lastTransitionTime": "2026-01-31T12:00:00Z"}
READY = {"type": "Ready", "status": "True"}


def observed_pod(raw: Json, now: datetime, events: Iterable[Json] = ()) -> ObservedPod:
    """The pod as observed by an operator that has just learned the server's time: from the API server, and from its
    cache."""
    events = tuple(events)
    found, cached = (
        pod_problems.observed_pod(each, now, manual_clock.synchronized_clock(now).ages, events)
        for each in (raw, projected(PODS, raw))
    )
    assert found == cached
    return found


def pod(phase: str = "Pending", **status: object) -> dict[str, object]:
    return {
        "metadata": {
            "name": "job-1-main-abcde",
            "uid": "u",
            "labels": {"ray.io/cluster": "job-1", "ray.io/node-type": "worker", "ray.io/group": "main"},
        },
        "spec": {"nodeName": "node-7"},
        "status": {"phase": phase, "conditions": [SCHEDULED], **status},
    }


def container(name: str = "ray", state: Json | None = None, last: Json | None = None, restarts: int = 0) -> Json:
    return {"name": name, "ready": False, "restartCount": restarts, "state": state or {}, "lastState": last or {}}


def waiting(reason: str, message: str = "") -> Json:
    return {"waiting": {"reason": reason, "message": message}}


def ended(reason: str, code: int, message: str = "", finished: str = "2026-01-31T11:59:00Z") -> Json:
    return {"terminated": {"reason": reason, "exitCode": code, "message": message, "finishedAt": finished}}


def with_memory_kill(name: str, finished: str) -> Json:
    """A preempted pod with a container that ran out of memory before."""
    kill = ended("OOMKilled", 137, finished=finished)
    status = container(name, {"running": {}}, kill, restarts=1)
    return pod("Running", conditions=[SCHEDULED, DISRUPTED], containerStatuses=[status])


def test_a_healthy_pod_has_no_problem() -> None:
    seen = observed_pod(pod("Running", conditions=[SCHEDULED, READY]), NOW)
    assert (seen.name, seen.cluster, seen.group, seen.node) == ("job-1-main-abcde", "job-1", "main", "node-7")
    assert (seen.ready, seen.deleting, seen.ended, seen.problem) == (True, False, False, None)
    assert seen.uid == "u"


def test_a_container_that_is_ready_again_is_no_problem_however_often_it_was_restarted() -> None:
    status = container(state={"running": {}}, last=ended("Error", 1), restarts=7)
    raw = pod("Running", conditions=[SCHEDULED, READY], containerStatuses=[status | {"ready": True}])
    assert observed_pod(raw, NOW).problem is None
    broken = observed_pod(pod("Running", conditions=[SCHEDULED], containerStatuses=[status]), NOW).problem
    assert broken is not None
    assert broken.reason == "ContainerCrashing"


def test_the_head_has_a_group_of_its_own() -> None:
    raw = pod()
    raw["metadata"] = {"name": "h", "labels": {"ray.io/node-type": "head", "ray.io/group": "headgroup"}}
    assert observed_pod(raw, NOW).group == "head"


def test_a_terminating_pod_is_not_ready() -> None:
    raw = pod("Succeeded", conditions=[READY])
    raw["metadata"] = {"name": "p", "deletionTimestamp": "2026-01-31T12:00:00Z"}
    seen = observed_pod(raw, NOW)
    assert (seen.ready, seen.deleting, seen.ended) == (False, True, True)


@pytest.mark.parametrize(
    ("gone_by", "overdue"), [("2026-01-31T11:59:29Z", True), ("2026-01-31T11:59:31Z", False), (None, False)]
)
def test_a_deleted_pod_that_still_exists_is_overdue_after_a_minute(gone_by: str | None, overdue: bool) -> None:
    raw = pod("Running")
    raw["metadata"] = {"name": "p"} if gone_by is None else {"name": "p", "deletionTimestamp": gone_by}
    assert observed_pod(raw, NOW).overdue is overdue


@pytest.mark.parametrize("hours", [1, -1])
def test_a_jump_of_the_clock_neither_makes_a_pod_overdue_nor_hides_one(hours: int) -> None:
    clock = manual_clock.synchronized_clock(NOW)
    clock.server_time += timedelta(hours=hours)
    clock.hear()
    gone_by = (clock.server_time + timedelta(seconds=30)).isoformat()
    raw = pod("Running")
    raw["metadata"] = {"name": "p", "uid": "u", "deletionTimestamp": gone_by, "deletionGracePeriodSeconds": 30}

    def overdue() -> bool:
        return pod_problems.observed_pod(raw, clock.clock.now(), clock.ages).overdue

    assert not overdue()
    clock.advance(89)
    assert not overdue()
    clock.advance(2)
    assert overdue()


def not_ready(since: str = "2026-01-31T12:00:10Z", containers: str = "True", phase: str = "Running") -> Json:
    """A pod as the node lifecycle controller leaves it when its node is NotReady."""
    conditions = [
        SCHEDULED,
        {"type": "Ready", "status": "False", "lastTransitionTime": since},
        {"type": "ContainersReady", "status": containers},
    ]
    return pod(phase, conditions=conditions)


def test_a_node_is_silent_since_its_pods_lost_readiness() -> None:
    clock = manual_clock.synchronized_clock(NOW)

    def seconds(raw: Json) -> float:
        return pod_problems.observed_pod(raw, clock.clock.now(), clock.ages).node_silent_seconds

    # 20 seconds ago, and the half second that the API server's header leaves out.
    assert seconds(not_ready()) == 20.5
    clock.advance(40)
    assert seconds(not_ready()) == 60.5
    assert seconds(pod("Running", conditions=[SCHEDULED, READY])) == 0.0
    assert seconds(not_ready(containers="False")) == 0.0, "its kubelet has reported it itself"
    assert seconds(not_ready(phase="Failed")) == 0.0


def test_the_silence_of_a_node_is_measured_and_not_subtracted() -> None:
    clock = manual_clock.ManualClock(NOW)
    clock.hear()
    pod_problems.observed_pod(not_ready(), clock.clock.now(), clock.ages)
    clock.server_time += timedelta(hours=1)
    clock.hear()
    clock.advance(5)
    seen = pod_problems.observed_pod(not_ready(), clock.clock.now(), clock.ages)
    assert seen.node_silent_seconds == 25.5


@pytest.mark.parametrize(
    ("reason", "ray", "expected"),
    [("ContainersNotReady", True, True), ("ContainersNotReady", False, False), ("NodeNotReady", True, False)],
)
def test_only_the_ray_container_makes_a_pod_ready(reason: str, ray: bool, expected: bool) -> None:
    statuses = [{"name": "driver", "ready": False}, {"name": "ray", "ready": ray}]
    condition = {"type": "Ready", "status": "False", "reason": reason}
    assert is_ready(pod("Running", conditions=[condition], containerStatuses=statuses)) is expected


UNSCHEDULABLE = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}
DISRUPTED = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler", "message": "for a/b"}


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (pod(conditions=[UNSCHEDULABLE]), PodProblem(Reason.UNSCHEDULABLE, "0/3 nodes")),
        *(
            (
                pod(containerStatuses=[container(state=waiting(reason, "x not found"))]),
                PodProblem(expected, f"container ray: {reason}: x not found"),
            )
            for reason, expected in {
                "ErrImagePull": Reason.IMAGE_PULL_FAILED,
                "ImagePullBackOff": Reason.IMAGE_PULL_FAILED,
                "InvalidImageName": Reason.IMAGE_PULL_FAILED,
                "ErrImageNeverPull": Reason.IMAGE_PULL_FAILED,
                "CreateContainerConfigError": Reason.CONTAINER_CONFIG_ERROR,
                "RunContainerError": Reason.CONTAINER_CONFIG_ERROR,
            }.items()
        ),
        (
            pod(
                initContainerStatuses=[container("wait-gcs-ready", waiting("ErrImagePull", "no such tag"))],
                containerStatuses=[container(state=waiting("PodInitializing"))],
            ),
            PodProblem(Reason.IMAGE_PULL_FAILED, "container wait-gcs-ready: ErrImagePull: no such tag"),
        ),
        (
            pod(
                "Running",
                containerStatuses=[
                    container(state=waiting("CrashLoopBackOff", "back-off 40s"), last=ended("Error", 127), restarts=3)
                ],
            ),
            PodProblem(Reason.CONTAINER_CRASHING, "container ray: terminated with exit code 127"),
        ),
        # Between two restarts it runs for a moment; that is no recovery.
        (
            pod("Running", containerStatuses=[container(state={"running": {}}, last=ended("Error", 1), restarts=2)]),
            PodProblem(Reason.CONTAINER_CRASHING, "container ray: terminated with exit code 1"),
        ),
        (
            pod("Running", containerStatuses=[container(state={"running": {}}, last=ended("Error", 1), restarts=1)]),
            None,
        ),
        (
            pod("Running", containerStatuses=[container(state={"running": {}}, last=ended("OOMKilled", 137))]),
            PodProblem(Reason.OUT_OF_MEMORY, "container ray ran out of memory (OOMKilled)"),
        ),
        (
            pod("Failed", containerStatuses=[container(state=ended("OOMKilled", 137, finished=""))]),
            PodProblem(Reason.OUT_OF_MEMORY, "container ray ran out of memory (OOMKilled)"),
        ),
        (
            with_memory_kill("ray", "2026-01-31T11:55:31Z"),
            PodProblem(Reason.OUT_OF_MEMORY, "container ray ran out of memory (OOMKilled)"),
        ),
        (
            with_memory_kill("ray", "2026-01-31T11:55:29Z"),
            PodProblem(Reason.DISRUPTED, "PreemptionByScheduler: for a/b"),
        ),
        (
            with_memory_kill("driver", "2026-01-31T11:55:31Z"),
            PodProblem(Reason.DISRUPTED, "PreemptionByScheduler: for a/b"),
        ),
        (
            pod("Failed", reason="Evicted", message="The node was low on resource: memory."),
            PodProblem(Reason.INFRASTRUCTURE_ERROR, "Evicted: The node was low on resource: memory."),
        ),
        (
            pod("Running", conditions=[SCHEDULED, READY, DISRUPTED]),
            PodProblem(Reason.DISRUPTED, "PreemptionByScheduler: for a/b"),
        ),
        (
            pod("Failed", containerStatuses=[container("driver", ended("Error", 3, "bad\n"))]),
            PodProblem(Reason.CONTAINER_CRASHING, "container driver: terminated with exit code 3: bad"),
        ),
        (pod("Failed"), PodProblem(Reason.CONTAINER_CRASHING, "the pod has failed")),
        (pod(containerStatuses=[container(state=waiting("ContainerCreating"))]), None),
        (pod("Succeeded"), None),
        ({}, None),
    ],
)
def test_problems_are_recognized(raw: Json, problem: PodProblem | None) -> None:
    assert observed_pod(raw, NOW).problem == problem


CREATING = [container(state=waiting("ContainerCreating"))]


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (pod(containerStatuses=CREATING), True),
        (pod(conditions=[{**SCHEDULED, "lastTransitionTime": "2026-01-31T12:00:25Z"}]), False),
        (pod(conditions=[UNSCHEDULABLE]), False),
        (pod("Running", containerStatuses=CREATING), False),
        (pod(containerStatuses=[container(state=waiting("ErrImagePull"))]), False),
        (
            pod(
                initContainerStatuses=[container("wait-gcs-ready", {"running": {"startedAt": "t"}})],
                containerStatuses=[container(state=waiting("PodInitializing"))],
            ),
            False,
        ),
    ],
)
def test_only_pods_that_hang_without_a_message_need_their_events(raw: Json, expected: bool) -> None:
    assert needs_events(raw, NOW) is needs_events(projected(PODS, raw), NOW) is expected


def test_the_newest_informative_event_counts() -> None:
    events: list[Json] = [
        {"reason": "FailedMount", "message": "old", "lastTimestamp": "2026-01-31T12:00:01Z"},
        {"reason": "FailedMount", "message": "new", "series": {"lastObservedTime": "2026-01-31T12:00:09.000000Z"}},
        {"reason": "Scheduled", "message": "fine", "lastTimestamp": "2026-01-31T12:00:20Z"},
    ]
    assert observed_pod(pod(), NOW, events).problem == PodProblem(Reason.VOLUME_MOUNT_FAILED, "FailedMount: new")
    assert observed_pod(pod(), NOW, events[2:]).problem is None
    events.append({"reason": "FailedCreatePodSandBox", "message": "cni", "eventTime": "2026-01-31T12:00:25Z"})
    assert observed_pod(pod(), NOW, events).problem == PodProblem(
        Reason.INFRASTRUCTURE_ERROR, "FailedCreatePodSandBox: cni"
    )
