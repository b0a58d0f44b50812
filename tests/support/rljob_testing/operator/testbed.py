"""Jobs in a namespace of their own, for tests that let the operator work on them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from rljob_testing.cluster.api_server import ApiServer, wait_until_ready
from rljob_testing.jobs.valid_job import Wire, edited, valid_job
from rljob_testing.operator import operator_process, scripts
from rljob_testing.operator.kuberay import KubeRayStandIn
from rljob_testing.operator.operator_process import OperatorProcess
from rljob_testing.operator.ray_dashboard import ClusterDashboard, RayDashboardStandIn
from rljob_testing.running_clock import clock_of_this_process

WAIT_SECONDS = 120.0
LOOK_SECONDS = 0.2
"""Between two looks at what no object tells of."""


@dataclass(frozen=True)
class Testbed:
    """A namespace, and everything that acts in it but the operator."""

    __test__ = False
    """Not a class of tests, whatever its name begins with."""

    server: ApiServer
    kuberay: KubeRayStandIn
    dashboards: RayDashboardStandIn
    namespace: str
    setup: operator_process.OperatorSetup

    @property
    def http(self) -> httpx.Client:
        """As an administrator."""
        return self.server.http

    @property
    def jobs(self) -> str:
        """Path of the jobs."""
        return f"/apis/rljob.dev/v1alpha1/namespaces/{self.namespace}/rljobs"

    def submit(self, name: str, edits: Mapping[str, object] | None = None) -> None:
        """Creates a job of one pool with 1 node of 2 GPUs, changed at wire paths."""
        wire = edited(cluster_job(name), edits or {})
        answer = self.http.post(self.jobs, params={"fieldValidation": "Strict"}, json=wire)
        assert answer.status_code == 201, answer.text

    def wire(self, name: str) -> Wire:
        """A job as it would be submitted."""
        return cluster_job(name)

    def served_spec(self) -> dict[str, Any]:
        """The spec of a job with the defaults that the server fills in; nothing is made. Empty where it serves no jobs,
        as for a moment after a change of their definition."""
        answer = self.http.post(self.jobs, params={"dryRun": "All"}, json=cluster_job("probe"))
        spec: dict[str, Any] = answer.json()["spec"] if answer.status_code == 201 else {}
        return spec

    def delete(self, name: str) -> None:
        """Deletes a job."""
        self.http.delete(f"{self.jobs}/{name}").raise_for_status()

    def delete_all_jobs(self) -> None:
        """Leaves nothing for an operator that looks at all namespaces."""
        self.http.delete(self.jobs).raise_for_status()

    def change(self, name: str, patch: Mapping[str, object]) -> None:
        """Sends a merge patch to a job."""
        headers = {"Content-Type": "application/merge-patch+json"}
        self.http.patch(f"{self.jobs}/{name}", json=patch, headers=headers).raise_for_status()

    def job(self, name: str) -> dict[str, Any]:
        """A stored job."""
        found: dict[str, Any] = self.http.get(f"{self.jobs}/{name}").raise_for_status().json()
        return found

    def condition(self, name: str, kind: str) -> dict[str, Any]:
        """A condition of a job; empty where it has none."""
        for found in self.job(name).get("status", {}).get("conditions", []):
            if found["type"] == kind:
                return dict(found)
        return {}

    def wait_for(
        self, name: str, kind: str, reason: str, status: str = "True", seconds: float = WAIT_SECONDS
    ) -> dict[str, Any]:
        """Waits until a condition has this reason and status, and returns it."""
        found: dict[str, Any] = {}

        def reached() -> bool:
            nonlocal found
            found = self.condition(name, kind)
            return (found.get("reason"), found.get("status")) == (reason, status)

        what = f"{name}: {kind}={status}/{reason}; it says {{}}"
        self.wait(reached, what, lambda: self.job(name).get("status"), seconds)
        return found

    def wait_until_ended(self, name: str, seconds: float = WAIT_SECONDS) -> dict[str, Any]:
        """Waits for Complete or Failed; returns that condition."""

        def ended() -> list[dict[str, Any]]:
            found = [self.condition(name, kind) for kind in ("Complete", "Failed")]
            return [condition for condition in found if condition.get("status") == "True"]

        self.wait(ended, f"the end of {name}; it says {{}}", lambda: self.job(name).get("status"), seconds)
        return ended()[0]

    def wait(
        self,
        ask: Callable[[], object],
        what: str,
        seen: Callable[[], object] = lambda: "",
        seconds: float = WAIT_SECONDS,
    ) -> None:
        """Asks until the answer is true, for so many seconds in which this machine does not stand still."""
        clock = clock_of_this_process()
        deadline = clock.seconds + seconds
        changes = self.kuberay.changes
        while True:
            number = changes.number(self.namespace)
            if ask():
                return
            assert clock.seconds < deadline, f"waited {seconds} s for {what.format(seen())}"
            changes.wait(self.namespace, number, LOOK_SECONDS)

    def start_server_again(self) -> None:
        """After it was killed. It says that it is ready before it serves what definitions make: a first request for
        that waits until their rules are compiled, as long as other programs keep the processor busy, or gets 429."""
        self.server.program.start()
        wait_until_ready(self.server.program, self.http)

        def are_served() -> bool:
            with contextlib.suppress(httpx.TransportError):
                return all(self.http.get(path).status_code == 200 for path in (self.jobs, self._clusters))
            return False

        self.wait(are_served, "jobs and clusters to be served")

    def items(self, kind: str) -> list[dict[str, Any]]:
        """All objects of a kind in the namespace: `rayclusters`, `pods`, `secrets`, `networkpolicies`, `events`."""
        group = {
            "rayclusters": "/apis/ray.io/v1",
            "networkpolicies": "/apis/networking.k8s.io/v1",
            "events": "/apis/events.k8s.io/v1",
        }.get(kind, "/api/v1")
        found = self.http.get(f"{group}/namespaces/{self.namespace}/{kind}").raise_for_status().json()
        return list(found["items"])

    def item_of(self, job: str, kind: str) -> dict[str, Any]:
        """The only object of a kind that belongs to a job."""
        (found,) = (item for item in self.items(kind) if item["metadata"]["labels"]["rljob.dev/job"] == job)
        return found

    def clusters_version(self) -> str:
        """Where a history of RayClusters can begin."""
        found = self.http.get(self._clusters).raise_for_status().json()
        return str(found["metadata"]["resourceVersion"])

    def most_live_clusters(self, since: str) -> tuple[int, int]:
        """How many RayClusters there were at the same time at most, not counting those that were being deleted, and how
        many were made, by the events since a version. The last event is that of a cluster which is made for it."""
        end = "end-of-history"
        self.script(end, scripts.ClusterScript(invalid="it marks the end of a history"))
        body = {"apiVersion": "ray.io/v1", "kind": "RayCluster", "metadata": {"name": end}}
        self.http.post(self._clusters, json=body).raise_for_status()
        live: set[str] = set()
        made: set[str] = set()
        most = 0
        with self.http.stream("GET", self._clusters, params={"watch": "1", "resourceVersion": since}) as events:
            for line in events.iter_lines():
                event: dict[str, Any] = json.loads(line)
                assert event["type"] != "ERROR", line
                metadata = event["object"]["metadata"]
                if metadata["name"] == end:
                    break
                if event["type"] == "DELETED" or "deletionTimestamp" in metadata:
                    live.discard(metadata["uid"])
                else:
                    live.add(metadata["uid"])
                    made.add(metadata["uid"])
                most = max(most, len(live))
        self.http.delete(f"{self._clusters}/{end}").raise_for_status()
        return most, len(made)

    @property
    def _clusters(self) -> str:
        return f"/apis/ray.io/v1/namespaces/{self.namespace}/rayclusters"

    def script(self, cluster: str, script: scripts.ClusterScript) -> None:
        """What becomes of a RayCluster."""
        self.kuberay.script(self.namespace, cluster, script)

    def dashboard(self, cluster: str) -> ClusterDashboard:
        """The dashboard of a RayCluster."""
        return self.dashboards.cluster(self.namespace, cluster)

    def through(self, url: str) -> Testbed:
        """The same place, for operators that reach the API server at another address, by plain HTTP."""
        return replace(self, setup=replace(self.setup, server_url=url, certificate=None))

    def with_environment(self, environment: Mapping[str, str]) -> Testbed:
        """The same place, for operators with further variables."""
        return replace(self, setup=replace(self.setup, environment={**self.setup.environment, **environment}))

    def with_pauses(self, shorter: Mapping[str, float]) -> Testbed:
        """The same place, for operators of which these constants are so many times shorter; the others are real."""
        return replace(self, setup=replace(self.setup, shorter=shorter))

    def by_clock(self, file: Path) -> Testbed:
        """The same place, for operators that go by the RunningClock of this file."""
        return replace(self, setup=replace(self.setup, clock=file))

    def operator(self, name: str = "operator-0") -> OperatorProcess:
        """An operator for this namespace, not started yet."""
        return OperatorProcess(self.setup, name)


def cluster_job(name: str) -> Wire:
    """A small job with what it needs on a cluster."""
    return valid_job(
        {
            "metadata.name": name,
            "spec.checkpoint": {"storage": {"persistentVolumeClaim": "checkpoints"}},
        },
    )


def new_testbed(
    server: ApiServer, kuberay: KubeRayStandIn, dashboards: RayDashboardStandIn, token: str, folder: Path
) -> Testbed:
    """A place with a namespace that no other test uses, for operators whose pauses are short."""
    answer = server.http.post("/api/v1/namespaces", json={"metadata": {"generateName": "jobs-"}})
    assert answer.status_code == 201, answer.text
    namespace = answer.json()["metadata"]["name"]
    url, certificate = server.url, server.certificate
    setup = operator_process.OperatorSetup(
        folder,
        url,
        certificate,
        token,
        dashboards.url_template,
        [namespace],
        environment={},
        shorter=operator_process.QUICK,
    )
    return Testbed(server, kuberay, dashboards, namespace, setup)
