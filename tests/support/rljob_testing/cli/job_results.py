"""A job on an API server whose results can be copied: its claim, and clocks for the commands."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta

from rljob_testing.cli.job_cluster import JobCluster
from rljob_testing.cli.pod_runner import PodRunner

STORAGE = "  checkpoint: {storage: {persistentVolumeClaim: data, subPath: team/small}}\n"
SINCE = "2026-11-27T12:00:00Z"
ATTEMPT = {"number": 1, "cluster": "small-1", "started": SINCE}
PODS = {"image": "trainer:1", "imagePullPolicy": "IfNotPresent", "runAsUser": 1234}


def claim_object(modes: list[str]) -> dict[str, object]:
    resources = {"requests": {"storage": "1Gi"}}
    return {"metadata": {"name": "data"}, "spec": {"accessModes": modes, "resources": resources}}


def create_claim(cluster: JobCluster, *, modes: tuple[str, ...] = ("ReadWriteMany",), phase: str = "Bound") -> None:
    path = f"/api/v1/namespaces/{cluster.namespace}/persistentvolumeclaims"
    cluster.http.post(path, json=claim_object(list(modes))).raise_for_status()
    cluster.http.patch(f"{path}/data/status", json={"status": {"phase": phase}}).raise_for_status()


def short_sleep(seconds: float) -> None:
    time.sleep(min(seconds, 0.02))


class SteppedClock:
    """A clock that only advances when somebody sleeps."""

    def __init__(self) -> None:
        self._start = datetime.now(UTC)
        self.seconds = 0.0
        self.steps = 0
        self.events: dict[int, Callable[[], object]] = {}
        """What happens after so many sleeps."""

    def now(self) -> datetime:
        return self._start + timedelta(seconds=self.seconds)

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds
        self.steps += 1
        if self.steps in self.events:
            self.events[self.steps]()


def pulling(job: JobCluster, pod: str) -> dict[str, object]:
    about = {"kind": "Pod", "name": pod, "namespace": job.namespace}
    return {
        "metadata": {"generateName": "e-"},
        "involvedObject": about,
        "type": "Normal",
        "reason": "Pulling",
        "message": 'Pulling image "trainer:1"',
        "firstTimestamp": SINCE,
        "lastTimestamp": SINCE,
    }


def wait_until_deleted(pods: PodRunner, but: Sequence[str] = ()) -> None:
    deadline = time.monotonic() + 30
    while pods.names() != list(but):
        assert time.monotonic() < deadline, pods.names()
        time.sleep(0.02)
