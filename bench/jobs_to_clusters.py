"""Time until 100 jobs that are created at once have their RayClusters: RLJob, KubeRay's RayJob, a plain client.

    PYTHONPATH=tests/support python bench/jobs_to_clusters.py [--quick] [--json PATH]

It runs on a real API server without nodes. KubeRay's operator runs in every turn and creates the pods, as on a cluster.
All contenders create the same RayCluster, the one that our operator makes of the job. The plain client creates the
RayClusters directly: no operator can be faster.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from rljob_bench.operators import (
    create_all,
    install_resources,
    kuberay_operator,
    our_operator,
    wait_for_objects,
)
from rljob_bench.report import OURS, Bar, Report, of_timings, ratio
from rljob_bench.rounds import interleaved
from rljob_testing.cluster.api_server import ApiServer, create_namespace, running_apiserver
from rljob_testing.cluster.go_programs import PROGRAMS
from rljob_testing.operator.testbed import cluster_job

NUM_JOBS, NUM_ROUNDS, WAIT_SECONDS = 100, 4, 180.0
NO_DASHBOARDS = "http://127.0.0.1:9/{namespace}/{cluster}"
PLAIN, RAY_JOB = "plain client", "KubeRay RayJob"
CONCURRENCY = 10
"""Reconcile concurrency of KubeRay's operator; its default, 1, is slower."""


def ours(server: ApiServer, namespace: str, num_jobs: int) -> list[float]:
    """Seconds of one turn of RLJob."""
    jobs = [cluster_job(name) for name in names("job", num_jobs)]
    return until_clusters(server, namespace, f"/apis/rljob.dev/v1alpha1/namespaces/{namespace}/rljobs", jobs)


def plain(server: ApiServer, cluster: dict[str, Any], num_jobs: int) -> list[float]:
    """Seconds of one turn of the plain client."""
    namespace = create_namespace(server)
    clusters = [named(cluster, name) for name in names("plain", num_jobs)]
    return until_clusters(server, namespace, clusters_of(namespace), clusters)


def ray_jobs(server: ApiServer, cluster: dict[str, Any], num_jobs: int) -> list[float]:
    """Seconds of one turn of KubeRay's RayJob."""
    namespace = create_namespace(server)
    spec = {"entrypoint": "python -c 'pass'", "rayClusterSpec": cluster["spec"]}
    bare: dict[str, Any] = {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": {}, "spec": spec}
    jobs = [named(bare, name) for name in names("rayjob", num_jobs)]
    return until_clusters(server, namespace, f"/apis/ray.io/v1/namespaces/{namespace}/rayjobs", jobs)


def until_clusters(server: ApiServer, namespace: str, path: str, objects: list[dict[str, Any]]) -> list[float]:
    """Creates the objects, waits for the same number of RayClusters, and deletes everything."""
    begin = time.perf_counter()
    create_all(server, path, objects)
    wait_for_objects(server, clusters_of(namespace), len(objects), WAIT_SECONDS)
    seconds = time.perf_counter() - begin
    for left in (path, clusters_of(namespace), f"/api/v1/namespaces/{namespace}/pods"):
        server.http.delete(left, params={"gracePeriodSeconds": "0"}).raise_for_status()
    wait_until_empty(server, [path, clusters_of(namespace)])
    return [seconds]


def wait_until_empty(server: ApiServer, paths: list[str]) -> None:
    """Waits until the objects are deleted; KubeRay removes its finalizers."""
    deadline = time.monotonic() + WAIT_SECONDS
    while any(server.http.get(path).json()["items"] for path in paths):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{paths} are not empty after {WAIT_SECONDS:.0f} s")
        time.sleep(0.2)


def clusters_of(namespace: str) -> str:
    """API path of the RayClusters of a namespace."""
    return f"/apis/ray.io/v1/namespaces/{namespace}/rayclusters"


def names(kind: str, number: int) -> list[str]:
    """Names that are new in every turn, because deletions can take a while."""
    return [f"{kind}-{time.monotonic_ns() // 1_000_000 % 10**8}-{each}" for each in range(number)]


def named(bare: dict[str, Any], name: str) -> dict[str, Any]:
    """A copy of a manifest with another name."""
    return {**copy.deepcopy(bare), "metadata": {"name": name}}


def cluster_that_we_make(server: ApiServer, namespace: str) -> dict[str, Any]:
    """Creates a job to get its RayCluster without server-side fields, and deletes the job."""
    path = f"/apis/rljob.dev/v1alpha1/namespaces/{namespace}/rljobs"
    create_all(server, path, [cluster_job("sample")])
    wait_for_objects(server, clusters_of(namespace), 1, WAIT_SECONDS)
    [found] = server.http.get(clusters_of(namespace)).raise_for_status().json()["items"]
    server.http.delete(f"{path}/sample").raise_for_status()
    server.http.delete(clusters_of(namespace)).raise_for_status()
    return {"apiVersion": "ray.io/v1", "kind": "RayCluster", "metadata": {}, "spec": found["spec"]}


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few jobs and one round, only to check the program")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the results to this file")
    options = parser.parse_args()
    num_jobs, num_rounds = (5, 1) if options.quick else (NUM_JOBS, NUM_ROUNDS)
    kuberay = PROGRAMS["kuberay-operator"].version
    report = Report("bench/jobs_to_clusters.py", {"KubeRay": f"{kuberay}, --reconcile-concurrency={CONCURRENCY}"})
    if options.quick:
        report.notes.append("--quick only checks that the program works; its numbers have no meaning")
    report.print_head()
    with running_apiserver() as server, tempfile.TemporaryDirectory(prefix="rljob-bench-") as folder:
        install_resources(server)
        namespace = create_namespace(server)
        arguments = (f"--reconcile-concurrency={CONCURRENCY}",)
        with (
            kuberay_operator(server, Path(folder) / "kuberay", *arguments),
            our_operator(server, Path(folder) / "ours", [namespace], NO_DASHBOARDS),
        ):
            cluster = cluster_that_we_make(server, namespace)
            turns = {
                PLAIN: partial(plain, server, cluster, num_jobs),
                OURS: partial(ours, server, namespace, num_jobs),
                RAY_JOB: partial(ray_jobs, server, cluster, num_jobs),
            }
            timings = interleaved(turns, num_rounds)
    title = f"{num_jobs} jobs created at once, until all RayClusters exist"
    bars = [Bar("no slower than KubeRay's RayJob", ratio(timings, OURS, RAY_JOB), 1.0)]
    report.add(of_timings(title, timings, PLAIN, bars))
    report.write(options.json)


if __name__ == "__main__":
    main()
