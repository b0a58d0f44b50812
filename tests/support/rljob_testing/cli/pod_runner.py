"""Plays scheduler and kubelet for the pods of one namespace: places them on the stand-in node, and reports that they
run. Pods that a test has created on a node keep their status."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from rljob_testing.cli.job_cluster import NODE, JobCluster

POLL_SECONDS = 0.05
Json = dict[str, object]


@dataclass
class PodRunner:
    """What the pods of the namespace do."""

    cluster: JobCluster
    created: list[Json] = field(default_factory=list)
    """Every pod, as it was created."""
    statuses: list[Mapping[str, object]] = field(default_factory=list)
    """The statuses of the next pods; further ones run."""
    node: str | None = NODE
    """None: the scheduler places no pod."""
    stopped: threading.Event = field(default_factory=threading.Event)

    @property
    def path(self) -> str:
        """URL path of the namespace's pods."""
        return f"/api/v1/namespaces/{self.cluster.namespace}/pods"

    def names(self) -> list[str]:
        """The names of the pods that exist."""
        return [item["metadata"]["name"] for item in self.cluster.http.get(self.path).json()["items"]]

    def run(self) -> None:
        """Handles pods until `stopped` is set."""
        seen: set[str] = set()
        while not self.stopped.wait(POLL_SECONDS):
            for pod in self.cluster.http.get(self.path).json()["items"]:
                name = pod["metadata"]["name"]
                if "deletionTimestamp" in pod["metadata"]:
                    self.cluster.http.delete(f"{self.path}/{name}", params={"gracePeriodSeconds": "0"})
                elif name not in seen and "nodeName" not in pod["spec"]:
                    seen.add(name)
                    self.created.append(pod)
                    self._start(name)

    def _start(self, name: str) -> None:
        if self.node is not None:
            binding = {"metadata": {"name": name}, "target": {"kind": "Node", "name": self.node}}
            self.cluster.http.post(f"{self.path}/{name}/binding", json=binding)
        status = self.statuses.pop(0) if self.statuses else {"phase": "Running"}
        self.cluster.write_pod_status(name, status)


@contextmanager
def running_pods(cluster: JobCluster) -> Iterator[PodRunner]:
    """Runs the pods of a namespace."""
    runner = PodRunner(cluster)
    thread = threading.Thread(target=runner.run, daemon=True)
    thread.start()
    try:
        yield runner
    finally:
        runner.stopped.set()
        thread.join()
