"""The cost of running jobs: requests to their dashboards and to the API server, and the operator's CPU time.

    PYTHONPATH=tests/support python bench/running_jobs.py [--quick] [--before CHECKOUT] [--json PATH]

It runs on a real API server, with stand-ins for KubeRay and Ray's dashboards. Every job makes a step in five seconds,
which the operator writes into its status. With --before the operator of another checkout of this repository is also
measured, on an API server with its own definition.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rljob_bench.operators import (
    CRDS,
    REPOSITORY,
    cpu_seconds,
    create_all,
    our_operator,
    read_yaml,
    resident_mib,
)
from rljob_bench.report import OURS, Bar, Measurement, Report
from rljob_testing.cluster.api_server import ApiServer, create_namespace, running_apiserver
from rljob_testing.cluster.kubectl import wait_for
from rljob_testing.operator import scripts
from rljob_testing.operator.kuberay_stand_in import install_ray_cluster_resource, kuberay_stand_in
from rljob_testing.operator.ray_dashboard_stand_in import ray_dashboard_stand_in
from rljob_testing.operator.testbed import cluster_job

NUM_JOBS, SECONDS, START_SECONDS = 20, 120.0, 120.0
STEP_SECONDS = 5.0
COUNTER = re.compile(
    r'^apiserver_flowcontrol_dispatched_requests_total\{.*flow_schema="service-accounts".*\} ([0-9.e+]+)$', re.MULTILINE
)
"""Counts requests of service accounts. Only the operator uses one; all other clients are administrators."""


def trains(age: float, environment: dict[str, object]) -> scripts.RunMoment:
    """A step every `STEP_SECONDS`, without end."""
    step = 1 + int(age / STEP_SECONDS)
    progress = {"step": step, "totalSteps": 1000, "rewardMean": 0.5, "tokensPerSecond": 100.0, "etaSeconds": 1000}
    now = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
    return scripts.RunMoment(
        run_state=scripts.run_state(environment, "Running", 1, now, progress=progress | {"updatedAt": now})
    )


def measured(checkout: Path, num_jobs: int, seconds: float) -> tuple[float, float, float, float]:
    """Requests to dashboards, requests to the API server, and milliseconds of CPU time, each per job and minute; and
    the process's memory in MiB."""
    with running_apiserver() as server, tempfile.TemporaryDirectory(prefix="rljob-bench-") as folder:
        server.http.post(CRDS, json=read_yaml(checkout / "crds" / "rljobs.yaml")).raise_for_status()
        install_ray_cluster_resource(server.http)
        path = "/apis/rljob.dev/v1alpha1/rljobs"
        wait_for(lambda: server.http.get(path).status_code == 200, "RLJobs are served", START_SECONDS, 0.2)
        namespace = create_namespace(server)
        jobs = [cluster_job(f"job-{number}") for number in range(num_jobs)]
        with (
            kuberay_stand_in(server),
            ray_dashboard_stand_in(server) as dashboards,
            our_operator(server, Path(folder), [namespace], dashboards.url_template, checkout) as process_id,
        ):
            asked = [dashboards.cluster(namespace, f"job-{number}-1") for number in range(num_jobs)]
            for each in asked:
                each.life = trains
            create_all(server, f"/apis/rljob.dev/v1alpha1/namespaces/{namespace}/rljobs", jobs)
            wait_for(lambda: all_run(server, path, num_jobs), f"{num_jobs} jobs run", START_SECONDS, 0.2)
            time.sleep(10)
            before = sum(each.num_requests for each in asked), num_requests(server), cpu_seconds(process_id)
            begin = time.monotonic()
            time.sleep(seconds)
            after = sum(each.num_requests for each in asked), num_requests(server), cpu_seconds(process_id)
            job_minutes = num_jobs * (time.monotonic() - begin) / 60
            memory = resident_mib(process_id)
    dashboard, api, processor = (late - early for early, late in zip(before, after, strict=True))
    return dashboard / job_minutes, api / job_minutes, 1e3 * processor / job_minutes, memory


def all_run(server: ApiServer, path: str, num_jobs: int) -> bool:
    """Whether this number of jobs has reported a step."""
    jobs: list[dict[str, Any]] = server.http.get(path).raise_for_status().json()["items"]
    return sum(bool(job.get("status", {}).get("progress", {}).get("step")) for job in jobs) == num_jobs


def num_requests(server: ApiServer) -> float:
    """The operator's requests so far, without open watches."""
    return sum(map(float, COUNTER.findall(server.http.get("/metrics").raise_for_status().text)))


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few jobs and a few seconds, only to check the program")
    parser.add_argument("--before", type=Path, metavar="CHECKOUT", help="also measure this checkout's operator")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the results to this file")
    options = parser.parse_args()
    num_jobs, seconds = (2, 10.0) if options.quick else (NUM_JOBS, SECONDS)
    report = Report("bench/running_jobs.py", {})
    if options.quick:
        report.notes.append("--quick only checks that the program works; its numbers have no meaning")
    report.print_head()
    checkouts = {OURS: REPOSITORY} | ({"before": options.before.resolve()} if options.before else {})
    rows = {name: measured(checkout, num_jobs, seconds) for name, checkout in checkouts.items()}
    header = ("dashboard requests", "API requests", "processor, ms", "memory of the process, MiB")
    report.add(Measurement(f"A minute of one of {num_jobs} running jobs", header, rows, bars(rows)))
    report.write(options.json)


def bars(rows: dict[str, tuple[float, float, float, float]]) -> tuple[Bar, ...]:
    """The bars: one poll every 4 seconds, with one request each."""
    return (Bar("at most 16 requests to a dashboard in a minute", rows[OURS][0], 16.0),)


if __name__ == "__main__":
    main()
