"""Our operator with very many jobs: one whole attempt, running jobs, a restart, finished jobs."""

from __future__ import annotations

import base64
import json
import os
import signal
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from rljob_bench.operator_watching import (
    AuditLog,
    counted,
    most_patches_per_25_seconds,
    oldest_lease,
    progress_ages,
)
from rljob_bench.operators import (
    NUM_IN_FLIGHT,
    cpu_seconds,
    create_all,
    install_resources,
    our_operator,
    peak_mib,
    ray_stand_in,
    wait_for_objects,
)
from rljob_bench.processes import is_running
from rljob_testing.cluster.api_server import ApiServer, create_namespace, running_apiserver
from rljob_testing.operator.testbed import cluster_job

GROUP = "/apis/rljob.dev/v1alpha1"
CLUSTERS = "/apis/ray.io/v1/rayclusters"
START_SECONDS = 900.0
SETTLE_SECONDS = 30.0
AFTER_RESTART_SECONDS = 60.0
"""How long writes are counted after a restart: there are two listings and a poll of every dashboard in this time."""
LOOK_SECONDS = 3.0
"""Pause between two looks at a condition. A look can list all jobs."""
NUM_ATTEMPTS = 10
"""Number of attempts that a finished job has had; a status has at most ten."""


@dataclass(frozen=True)
class Sizes:
    """How many jobs there are, and how long they are observed."""

    num_running: int = 1000
    running_seconds: float = 120.0
    num_finished: int = 10_000
    finished_seconds: float = 220.0
    """More than two listings of all objects, which are at least 100 s apart."""
    settle_seconds: float = SETTLE_SECONDS
    after_restart_seconds: float = AFTER_RESTART_SECONDS


@dataclass
class ManyJobs:
    """An API server with an audit log, stand-ins, and our operator from one checkout, which is started by each part."""

    server: ApiServer
    audit: AuditLog
    dashboards: str
    checkout: Path
    folder: Path
    sizes: Sizes
    notes: list[str] = field(default_factory=list)
    """What was counted, for the report."""
    _ended_in: str = ""
    """The namespace of the job of `attempt`, after its end."""
    _process_id: int = 0
    """The operator's process; 0 if it was not started."""
    _num_running: int = 0
    _num_finished: int = 0

    def measured(self, part: str) -> dict[str, float]:
        """The values of a part, which is the name of a method below."""
        parts = {"attempt": self.attempt, "running": self.running, "restart": self.restart, "finished": self.finished}
        return parts[part]()

    def attempt(self) -> dict[str, float]:
        """The writes of one job from its creation to its end."""
        with self._operator():
            namespace, position = create_namespace(self.server), self.audit.position()
            path = self._jobs_of(namespace)
            create_all(self.server, path, [cluster_job("short")])
            self._wait(lambda: "cleanedUpAt" in self._status(f"{path}/short").get("result", {}), "a job ends", 300.0)
            time.sleep(5.0)
        self._ended_in = namespace
        found = [each for each in self.audit.since(position) if each.namespace == namespace]
        writes = [each for each in found if each.is_write]
        self._note("writes of an attempt", counted(writes))
        self._note("reads of an attempt", counted(each for each in found if not each.is_write))
        return {"writes": len(writes), "reads": len(found) - len(writes)}

    def running(self) -> dict[str, float]:
        """Running jobs in the steady state."""
        with self._operator() as process_id:
            self._create_running()
            time.sleep(self.sizes.settle_seconds)
            begin, position, before = time.monotonic(), self.audit.position(), cpu_seconds(process_id)
            with progress_ages(self.server) as ages:
                lease, limit = oldest_lease(self.server, self.sizes.running_seconds)
                seconds, cores = time.monotonic() - begin, cpu_seconds(process_id) - before
                oldest, mean = ages.oldest()
            requests = self.audit.since(position)
            peak = peak_mib(process_id)
        self._note(f"requests to the API server in {seconds:.0f} s", counted(requests))
        patches = [each for each in requests if each.is_progress]
        return {
            "cores": cores / seconds,
            "peak_mib": peak,
            "oldest_progress": oldest,
            "mean_oldest_progress": mean,
            "lease": lease,
            "lease_limit": limit,
            "patches": 25 * len(patches) / seconds / self.sizes.num_running,
            "most_patches": most_patches_per_25_seconds(patches),
        }

    def restart(self) -> dict[str, float]:
        """A crash of the operator, with finished and running jobs: the time from the start of the new process until a
        job that was created meanwhile has its RayCluster, and what the new process writes."""
        self._create_finished()
        with self._operator() as process_id:
            self._create_running()
            time.sleep(self.sizes.settle_seconds)
            os.kill(process_id, signal.SIGKILL)
        namespace = create_namespace(self.server)
        create_all(self.server, self._jobs_of(namespace), [cluster_job("late")])
        position, begin = self.audit.position(), time.monotonic()
        with self._operator(settles=False) as process_id:
            wait_for_objects(self.server, f"/apis/ray.io/v1/namespaces/{namespace}/rayclusters", 1, 180.0)
            seconds = time.monotonic() - begin
            time.sleep(self.sizes.after_restart_seconds)
            peak = peak_mib(process_id)
        requests = self.audit.since(position)
        writes = [each for each in requests if each.is_write and each.namespace != namespace]
        spurious = [each for each in writes if not each.is_progress]
        self._note("requests after the restart", counted(requests))
        self._note("spurious writes", counted(spurious))
        return {"acting": seconds, "spurious": len(spurious), "peak_mib": peak}

    def finished(self) -> dict[str, float]:
        """Finished jobs and nothing else."""
        self._delete_running()
        self._create_finished()
        with self._operator() as process_id:
            time.sleep(self.sizes.settle_seconds)
            begin, position, before = time.monotonic(), self.audit.position(), cpu_seconds(process_id)
            time.sleep(self.sizes.finished_seconds)
            seconds, cores = time.monotonic() - begin, cpu_seconds(process_id) - before
            peak = peak_mib(process_id)
        self._note(f"requests to the API server in {seconds:.0f} s", counted(self.audit.since(position)))
        return {"cores": cores / seconds, "peak_mib": peak}

    @contextmanager
    def _operator(self, *, settles: bool = True) -> Iterator[int]:
        settings = {"RLJOB_OPERATOR_LEADER_ELECTION": "true"}
        with our_operator(
            self.server, self.folder / "operator", self.dashboards, self.checkout, settings
        ) as process_id:
            self._process_id = process_id
            if settles:
                self._wait(lambda: any(each.verb == "list" for each in self.audit.since(0)[-50:]), "a listing", 60.0)
            yield process_id
        self._process_id = 0

    def _create_running(self) -> None:
        """Creates jobs until enough of them are running."""
        if not self._num_running:
            namespace, begin = create_namespace(self.server), time.monotonic()
            jobs = [cluster_job(f"job-{number}") for number in range(self.sizes.num_running)]
            create_all(self.server, self._jobs_of(namespace), jobs)
            self._num_running = len(jobs)
            self._wait(lambda: self._num_with_progress() >= len(jobs), f"{len(jobs)} jobs run", START_SECONDS)
            self._note("running jobs", {"jobs": len(jobs), "s until all were running": time.monotonic() - begin})
            self._note_sizes(namespace)

    def _create_finished(self) -> None:
        """Creates finished jobs: one runs to its end, and the others are copies of it in etcd, with their own names and
        UIDs, and with the records of `NUM_ATTEMPTS` attempts. At the API server, this would take many minutes."""
        if self._num_finished:
            return
        if not self._ended_in:
            self.attempt()
        namespace = self._ended_in
        path = self._jobs_of(namespace)
        with httpx.Client(base_url=self.server.store_url, trust_env=False) as store:
            prefix = f"/registry/rljob.dev/rljobs/{namespace}/"
            key = base64.b64encode(f"{prefix}short".encode()).decode()
            [stored] = store.post("/v3/kv/range", json={"key": key}).raise_for_status().json()["kvs"]
            job: dict[str, Any] = json.loads(base64.b64decode(stored["value"]))
            [attempt] = job["status"]["attempts"]
            job["status"]["attempts"] = [{**attempt, "number": number} for number in range(1, NUM_ATTEMPTS + 1)]

            def put(number: int) -> None:
                name = f"finished-{number:05d}"
                metadata = {**job["metadata"], "name": name, "uid": str(uuid.uuid4())}
                pair = {"key": f"{prefix}{name}", "value": json.dumps({**job, "metadata": metadata})}
                body = {name: base64.b64encode(text.encode()).decode() for name, text in pair.items()}
                store.post("/v3/kv/put", json=body).raise_for_status()

            with ThreadPoolExecutor(NUM_IN_FLIGHT) as pool:
                list(pool.map(put, range(1, self.sizes.num_finished)))
        wait_for_objects(self.server, path, self.sizes.num_finished, START_SECONDS)
        self._num_finished = self.sizes.num_finished
        parts = {name: len(json.dumps(job[name])) / 1024 for name in ("spec", "status")}
        self._note("KiB of a finished job", {"all": len(json.dumps(job)) / 1024, **parts})

    def _delete_running(self) -> None:
        """Deletes all unfinished jobs with their RayClusters, as the garbage collector would; the stand-in deletes the
        pods."""
        if not self._num_running:
            return
        for each in self.server.http.get(f"{GROUP}/rljobs").json()["items"]:
            if "result" not in each.get("status", {}):
                meta = each["metadata"]
                self.server.http.delete(f"{self._jobs_of(meta['namespace'])}/{meta['name']}").raise_for_status()
        for each in self.server.http.get(CLUSTERS).json()["items"]:
            meta = each["metadata"]
            path = f"/apis/ray.io/v1/namespaces/{meta['namespace']}/rayclusters/{meta['name']}"
            self.server.http.delete(path).raise_for_status()
        self._wait(lambda: not self.server.http.get("/api/v1/pods").json()["items"], "all pods are deleted", 180.0)
        self._num_running = 0

    def _num_with_progress(self) -> int:
        query = {"resourceVersion": "0"}
        jobs = self.server.http.get(f"{GROUP}/rljobs", params=query, timeout=60.0).raise_for_status().json()["items"]
        return sum(
            bool(job.get("status", {}).get("progress", {}).get("step")) and "result" not in job["status"]
            for job in jobs
        )

    def _status(self, path: str) -> dict[str, Any]:
        status: dict[str, Any] = self.server.http.get(path).raise_for_status().json().get("status", {})
        return status

    def _jobs_of(self, namespace: str) -> str:
        return f"{GROUP}/namespaces/{namespace}/rljobs"

    def _wait(self, reached: Any, what: str, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not reached():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what}: not after {seconds:.0f} s{self._end_of_log()}")
            if self._process_id and not is_running(self._process_id):
                raise RuntimeError(f"{what}: the operator has ended{self._end_of_log()}")
            time.sleep(LOOK_SECONDS)

    def _end_of_log(self) -> str:
        log = self.folder / "operator" / "operator.log"
        return f"; its log ends with: {log.read_text()[-2000:]}" if log.exists() else ""

    def _note_sizes(self, namespace: str) -> None:
        """Notes how large the objects of a running job are."""
        paths = {
            "job": f"{self._jobs_of(namespace)}/job-0",
            "RayCluster": f"/apis/ray.io/v1/namespaces/{namespace}/rayclusters/job-0-1",
            "head pod": f"/api/v1/namespaces/{namespace}/pods/job-0-1-head-0",
            "worker pod": f"/api/v1/namespaces/{namespace}/pods/job-0-1-main-0",
        }
        sizes = {
            name: len(self.server.http.get(path).raise_for_status().content) / 1024 for name, path in paths.items()
        }
        self._note("KiB of objects of a running job", sizes)

    def _note(self, what: str, counts: dict[str, Any]) -> None:
        parts = (
            f"{value:,.0f} {name}" if value == int(value) else f"{value:.3g} {name}" for name, value in counts.items()
        )
        self.notes.append(f"{what}: {', '.join(parts) or 'none'}")
        print(f"[{time.strftime('%H:%M:%S')}] {self.notes[-1]}", flush=True)


@contextmanager
def many_jobs(checkout: Path, folder: Path, sizes: Sizes) -> Iterator[ManyJobs]:
    """Starts the API server and the stand-ins of one contender."""
    folder.mkdir()
    audit = AuditLog(folder)
    with running_apiserver(*audit.arguments) as server:
        install_resources(server, checkout)
        with ray_stand_in(server, folder) as dashboards:
            yield ManyJobs(server, audit, dashboards, checkout, folder, sizes)
