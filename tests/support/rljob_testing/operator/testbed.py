"""A namespace in which an operator process works on jobs, with stand-ins for KubeRay and Ray."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from rljob_testing.cluster.api_server import DEFINITIONS, ApiServer, create_namespace, wait_until_ready
from rljob_testing.cluster.job_requests import JobNamespace
from rljob_testing.jobs.valid_job import Wire, valid_job
from rljob_testing.operator import forked_operator, scripts
from rljob_testing.operator.forked_operator import OperatorProcess
from rljob_testing.operator.kuberay_stand_in import KubeRayStandIn, install_ray_cluster_resource
from rljob_testing.operator.ray_dashboard_stand_in import ClusterDashboard, RayDashboardStandIn
from rljob_testing.running_clock import clock_of_this_process

WAIT_SECONDS = 120.0
LOOK_SECONDS = 0.2
"""Pause between two polls of something that no API object shows."""


@dataclass(frozen=True)
class Testbed(JobNamespace):
    """A namespace and everything that acts in it, except the operator."""

    __test__ = False
    """Tells pytest that this class, despite its name, contains no tests."""

    kuberay: KubeRayStandIn
    dashboards: RayDashboardStandIn
    setup: forked_operator.OperatorSetup

    def submit(self, name: str, edits: Mapping[str, object] | None = None) -> None:
        """Creates a job of one pool with 1 node of 2 GPUs, changed at wire paths."""
        job = cluster_job(name, edits)
        answer = self.http.post(self.jobs, params={"fieldValidation": "Strict"}, json=job)
        assert answer.status_code == 201, answer.text

    def wire(self, name: str) -> Wire:
        """A job in the form in which it is submitted."""
        return cluster_job(name)

    def served_spec(self) -> dict[str, Any]:
        """The spec of a job with the server's defaults, from a dry run. Empty if the server does not serve jobs, as for
        a moment after their definition changed, or not yet (429)."""
        answer = self.http.post(self.jobs, params={"dryRun": "All"}, json=cluster_job("probe"))
        is_served = answer.status_code == 201 and self.http.get(self.jobs).status_code == 200
        spec: dict[str, Any] = answer.json()["spec"] if is_served else {}
        return spec

    def delete_all_jobs(self) -> None:
        """Deletes all jobs, so that no operator that watches all namespaces finds them."""
        self.http.delete(self.jobs).raise_for_status()

    def condition(self, name: str, kind: str) -> dict[str, Any]:
        """A condition of a job; empty if the job does not have it."""
        for found in self.job(name).get("status", {}).get("conditions", []):
            if found["type"] == kind:
                return dict(found)
        return {}

    def wait_for(
        self, name: str, kind: str, reason: str, status: str = "True", seconds: float = WAIT_SECONDS
    ) -> dict[str, Any]:
        """Waits until a condition has this reason and status, and returns the condition."""
        found: dict[str, Any] = {}

        def reached() -> bool:
            nonlocal found
            found = self.condition(name, kind)
            return (found.get("reason"), found.get("status")) == (reason, status)

        what = f"{name}: {kind}={status}/{reason}; it says {{}}"
        self.wait(reached, what, lambda: self.job(name).get("status"), seconds)
        return found

    def wait(
        self,
        ask: Callable[[], object],
        what: str,
        seen: Callable[[], object] = lambda: "",
        seconds: float = WAIT_SECONDS,
    ) -> None:
        """Calls `ask` until it returns something true, for at most `seconds` in which this machine runs."""
        clock = clock_of_this_process()
        deadline = clock.seconds + seconds
        changes = self.kuberay.changes
        while True:
            number = changes.count(self.namespace)
            if ask():
                return
            assert clock.seconds < deadline, f"timed out after {seconds} s: {what.format(seen())}"
            changes.wait(self.namespace, number, LOOK_SECONDS)

    @property
    def lease(self) -> str:
        """API path of the operators' lease."""
        return forked_operator.LEASE_PATH

    def restart_server(self) -> None:
        """Restarts the API server after it was killed.

        The server reports ready before it serves custom resources. The first request for one waits until the validation
        rules are compiled, on a busy machine for long, or gets 429.
        """
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
        """The resourceVersion from which `most_live_clusters` can count."""
        found = self.http.get(self._clusters).raise_for_status().json()
        return str(found["metadata"]["resourceVersion"])

    def most_live_clusters(self, since: str) -> tuple[int, int]:
        """The maximum number of RayClusters at the same time, without those being deleted, and the number of created
        ones, by the watch events since a version. A marker cluster is created to find the last event."""
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
        """Sets the script of a RayCluster."""
        self.kuberay.script(self.namespace, cluster, script)

    def keep_pods_starting(self, cluster: str) -> None:
        """Keeps the worker containers in ContainerCreating until `let_pods_start`."""
        self.script(cluster, scripts.ClusterScript({"main": scripts.STARTING}))

    def let_pods_start(self, cluster: str) -> None:
        """Makes all pods ready."""
        self.script(cluster, scripts.HEALTHY)

    def lose_head(self, cluster: str) -> None:
        """Deletes the head pod for good."""
        self.script(cluster, scripts.ClusterScript(missing=("head-0",)))

    def fail_volume_mount(self, cluster: str, message: str) -> None:
        """Makes the head pod wait for a volume on its node, for a minute already."""
        event = ("FailedMount", message)
        head = scripts.PodScript(phase="Pending", ready=False, event=event, scheduled_seconds_ago=60.0)
        self.script(cluster, scripts.ClusterScript({"head": head}))

    def uninstall_kuberay(self) -> None:
        """Removes the RayCluster resource, and waits until it is no longer served."""
        self.http.delete(f"{DEFINITIONS}/rayclusters.ray.io").raise_for_status()
        self.wait(lambda: self.http.get("/apis/ray.io/v1/rayclusters").status_code == 404, "the resource to go")

    def install_kuberay(self) -> None:
        """Installs the RayCluster resource if it is missing."""
        install_ray_cluster_resource(self.http)

    def dashboard(self, cluster: str) -> ClusterDashboard:
        """The dashboard of a RayCluster."""
        return self.dashboards.cluster(self.namespace, cluster)

    def with_server_url(self, url: str) -> Testbed:
        """A copy for operators that use another address for the API server, by plain HTTP."""
        return replace(self, setup=replace(self.setup, server_url=url, certificate=None))

    def with_environment(self, environment: Mapping[str, str]) -> Testbed:
        """A copy for operators with additional environment variables."""
        return replace(self, setup=replace(self.setup, environment={**self.setup.environment, **environment}))

    def with_leader_election(self, shorter: Mapping[str, float] = forked_operator.LONG_LEASE) -> Testbed:
        """A copy for operators with leader election, whose lease times are divided by these factors."""
        return self.with_environment({"RLJOB_OPERATOR_LEADER_ELECTION": "true"}).with_shorter_times(shorter)

    def with_shorter_times(self, shorter: Mapping[str, float]) -> Testbed:
        """A copy for operators in which these constants, too, are divided by the given factors."""
        return replace(self, setup=replace(self.setup, shorter={**self.setup.shorter, **shorter}))

    def with_real_times(self) -> Testbed:
        """A copy for operators with the pauses of a cluster."""
        return replace(self, setup=replace(self.setup, shorter={}))

    def in_new_namespace(self, folder: Path) -> Testbed:
        """A copy with a new namespace and the same server and stand-ins; its operators write into `folder`."""
        namespace = create_namespace(self.server)
        return replace(self, namespace=namespace, setup=replace(self.setup, folder=folder, namespaces=[namespace]))

    def with_clock(self, file: Path) -> Testbed:
        """A copy for operators that use the RunningClock of this file."""
        return replace(self, setup=replace(self.setup, clock=file))

    def operator(self, name: str = "operator-0") -> OperatorProcess:
        """An operator for this namespace, not started yet."""
        return OperatorProcess(self.setup, name)


def cluster_job(name: str, edits: Mapping[str, object] | None = None) -> Wire:
    """A small job with everything that it needs on a cluster, changed at wire paths."""
    storage = {"storage": {"persistentVolumeClaim": "checkpoints"}}
    return valid_job({"metadata.name": name, "spec.checkpoint": storage, **(edits or {})})


def new_testbed(
    server: ApiServer, kuberay: KubeRayStandIn, dashboards: RayDashboardStandIn, token: str, folder: Path
) -> Testbed:
    """A testbed with a new namespace, for operators with short pauses."""
    namespace = create_namespace(server)
    setup = forked_operator.OperatorSetup(
        folder,
        server.url,
        server.certificate,
        token,
        dashboards.url_template,
        [namespace],
        environment={},
        shorter=forked_operator.QUICK,
    )
    return Testbed(server, namespace, kuberay, dashboards, setup)
