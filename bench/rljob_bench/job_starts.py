"""Jobs that are created at once, until each has its RayCluster: RLJob, KubeRay's RayJob, a plain client.

KubeRay's operator runs in every turn and creates the pods. All contenders create the same RayCluster, the one that our
operator makes of the job. The plain client creates the RayClusters directly: no operator can be faster.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rljob_bench.operators import (
    cpu_seconds,
    create_all,
    install_resources,
    kuberay_operator,
    our_operator,
    wait_for_objects,
)
from rljob_bench.report import OURS
from rljob_bench.rounds import Timings, interleaved
from rljob_testing.cluster.api_server import ApiServer, create_namespace, running_apiserver
from rljob_testing.operator.testbed import cluster_job

WAIT_SECONDS = 180.0
NO_DASHBOARDS = "http://127.0.0.1:9/{namespace}/{cluster}"
PLAIN, RAY_JOB = "plain client", "KubeRay RayJob"
CONCURRENCY = 10
"""Reconcile concurrency of KubeRay's operator; its default, 1, is slower."""


@dataclass
class _Contender:
    """Our operator from one checkout, with an API server of its own and KubeRay's operator."""

    server: ApiServer
    process_id: int
    processor_seconds: float = 0.0
    """Processor time of our operator in all of its turns."""
    num_jobs: int = 0
    """Number of jobs in all of its turns."""

    def turn(self, num_jobs: int) -> list[float]:
        """Seconds of one turn."""
        namespace, before = create_namespace(self.server), cpu_seconds(self.process_id)
        jobs = [cluster_job(f"job-{number}") for number in range(num_jobs)]
        path = f"/apis/rljob.dev/v1alpha1/namespaces/{namespace}/rljobs"
        seconds = _until_clusters(self.server, namespace, path, jobs)
        self.processor_seconds += cpu_seconds(self.process_id) - before
        self.num_jobs += num_jobs
        _delete(self.server, namespace, path)
        return [seconds]


@dataclass(frozen=True)
class StartTimes:
    """The results: seconds by contender, and milliseconds of processor time of our operators per job."""

    seconds: dict[str, Timings]
    processor_ms: dict[str, float]


def start_times(checkouts: dict[str, Path], folder: Path, num_jobs: int, num_rounds: int) -> StartTimes:
    """Measures all contenders, who take turns. `checkouts`: those of our operator, by the name of the contender."""
    with ExitStack() as stack:
        ours = {
            name: stack.enter_context(_contender(checkout, folder / f"starts-{number}"))
            for number, (name, checkout) in enumerate(checkouts.items())
        }
        server = ours[OURS].server
        cluster = _cluster_that_we_make(server)
        turns = {
            PLAIN: partial(_plain, server, cluster, num_jobs),
            **{name: partial(each.turn, num_jobs) for name, each in ours.items()},
            RAY_JOB: partial(_ray_jobs, server, cluster, num_jobs),
        }
        seconds = interleaved(turns, num_rounds)
        return StartTimes(seconds, {name: 1e3 * each.processor_seconds / each.num_jobs for name, each in ours.items()})


@contextmanager
def _contender(checkout: Path, folder: Path) -> Iterator[_Contender]:
    folder.mkdir()
    with running_apiserver() as server:
        install_resources(server, checkout)
        with (
            kuberay_operator(server, folder / "kuberay", f"--reconcile-concurrency={CONCURRENCY}"),
            our_operator(server, folder / "ours", NO_DASHBOARDS, checkout) as process_id,
        ):
            yield _Contender(server, process_id)


def _plain(server: ApiServer, cluster: dict[str, Any], num_jobs: int) -> list[float]:
    namespace = create_namespace(server)
    clusters = [_named(cluster, f"plain-{number}") for number in range(num_jobs)]
    seconds = _until_clusters(server, namespace, _clusters_of(namespace), clusters)
    _delete(server, namespace)
    return [seconds]


def _ray_jobs(server: ApiServer, cluster: dict[str, Any], num_jobs: int) -> list[float]:
    namespace = create_namespace(server)
    spec = {"entrypoint": "python -c 'pass'", "rayClusterSpec": cluster["spec"]}
    bare: dict[str, Any] = {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": {}, "spec": spec}
    path = f"/apis/ray.io/v1/namespaces/{namespace}/rayjobs"
    jobs = [_named(bare, f"rayjob-{number}") for number in range(num_jobs)]
    seconds = _until_clusters(server, namespace, path, jobs)
    _delete(server, namespace, path)
    return [seconds]


def _until_clusters(server: ApiServer, namespace: str, path: str, objects: list[dict[str, Any]]) -> float:
    """Creates the objects and waits for the same number of RayClusters. Returns the seconds."""
    begin = time.perf_counter()
    create_all(server, path, objects)
    wait_for_objects(server, _clusters_of(namespace), len(objects), WAIT_SECONDS)
    return time.perf_counter() - begin


def _delete(server: ApiServer, namespace: str, *paths: str) -> None:
    """Deletes the objects at these paths, the RayClusters and their pods, and waits until they are gone; KubeRay
    removes its finalizers."""
    paths = (*paths, _clusters_of(namespace))
    for path in (*paths, f"/api/v1/namespaces/{namespace}/pods"):
        server.http.delete(path, params={"gracePeriodSeconds": "0"}).raise_for_status()
    deadline = time.monotonic() + WAIT_SECONDS
    while any(server.http.get(path).json()["items"] for path in paths):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{paths} are not empty after {WAIT_SECONDS:.0f} s")
        time.sleep(0.2)


def _clusters_of(namespace: str) -> str:
    return f"/apis/ray.io/v1/namespaces/{namespace}/rayclusters"


def _named(bare: dict[str, Any], name: str) -> dict[str, Any]:
    return {**copy.deepcopy(bare), "metadata": {"name": name}}


def _cluster_that_we_make(server: ApiServer) -> dict[str, Any]:
    """Creates a job to get its RayCluster without server-side fields, and deletes the job."""
    namespace = create_namespace(server)
    path = f"/apis/rljob.dev/v1alpha1/namespaces/{namespace}/rljobs"
    create_all(server, path, [cluster_job("sample")])
    wait_for_objects(server, _clusters_of(namespace), 1, WAIT_SECONDS)
    [found] = server.http.get(_clusters_of(namespace)).raise_for_status().json()["items"]
    _delete(server, namespace, path)
    return {"apiVersion": "ray.io/v1", "kind": "RayCluster", "metadata": {}, "spec": found["spec"]}
