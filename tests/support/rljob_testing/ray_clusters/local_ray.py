"""Ray clusters on this machine, as runs and the operator see them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from pydantic import JsonValue

from rljob_api.constants import (
    ENV_ATTEMPT,
    ENV_RUN_STATE_FILE,
    ENV_START_NUMBER,
    TRAINER_ENTRYPOINT,
    driver_log_file_name,
    run_state_file_name,
)
from rljob_api.contract_documents import load_run_state
from rljob_api.run_state import RunState
from rljob_testing.local_servers import free_port
from rljob_testing.process_tree import signal_when_parent_dies
from rljob_testing.ray_clusters import forked_workers
from rljob_testing.settings import inherited_environment
from rljob_trainer.settings import worker_environment

MAX_STARTS = 3
START_SECONDS = 300.0
NUM_POD_WORKERS = 2
OBJECT_STORE_BYTES = 100_000_000
RAY = ("-m", "ray.scripts.scripts")
OF_START = (
    *("start", "--block", "--disable-usage-stats", "--include-log-monitor=false"),
    *("--min-worker-port=0", "--max-worker-port=0"),
)
HEAD = ("--head", "--port=0", "--no-monitor")
"""Without the process of an autoscaler."""
ADDRESS = r"--address='([^']+)'"
"""What a head says about itself."""


@contextmanager
def ray_cluster(num_cpus: int, log_file: Path, *, forks_workers: bool = False) -> Iterator[str]:
    """Its address. With `forks_workers` workers come with torch and transformers loaded, in the environment of workers
    that compile nothing: see `forked_workers`."""
    arguments = [*HEAD, "--include-dashboard=false", f"--num-cpus={num_cpus}", "--num-gpus=0"]
    environment = {"CUDA_VISIBLE_DEVICES": "", "RAY_AUTH_MODE": "disabled"}
    process, address = _started(arguments, environment, log_file, ADDRESS, forks_workers=forks_workers)
    try:
        yield address
    finally:
        _stop(process)


@contextmanager
def pod_cluster(
    folder: Path,
    token: str,
    variables: Mapping[str, str],
    *,
    num_workers: int = NUM_POD_WORKERS,
    forks_workers: bool = False,
) -> Iterator[RayCluster]:
    """The cluster with all its nodes, whose logs are in `folder`. `variables` are in the environment of all nodes, as
    those of a pod are. Without a token nothing is said about authentication, as by a KubeRay that does not know it.
    `forks_workers`: see `ray_cluster`; of the nodes with GPUs."""
    environment = {
        **({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token} if token else {}),
        # Else each node takes its time to let work move elsewhere.
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        # The Jobs API starts `python`, which is the trainer's in its image.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), inherited_environment()["PATH"]]),
        **variables,
    }
    port = free_port()
    with ExitStack() as stack:
        # Ray's sockets are below this folder, and the names of sockets are short.
        session = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rj", ignore_cleanup_errors=True)))
        limits = [f"--object-store-memory={OBJECT_STORE_BYTES}", "--dashboard-agent-listen-port=0"]
        head = [*HEAD, *limits, f"--temp-dir={session}", f"--dashboard-port={port}", "--num-gpus=0", "--num-cpus=1"]
        # KubeRay sets this in the head, whatever Ray is told about ports; drivers get an address of their own.
        head_environment = {**environment, "RAY_ADDRESS": "127.0.0.1:6379"}
        process, address = _started(head, head_environment, folder / "head.log", ADDRESS)
        stack.callback(_stop, process)
        cluster = RayCluster(port, token, session / "session_latest" / "logs")
        for number in range(num_workers):
            worker = [*limits, f"--address={address}", "--num-gpus=1", "--num-cpus=2"]
            log_file = folder / f"worker-{number}.log"
            process, _ = _started(worker, environment, log_file, "(Ray runtime started)", forks_workers=forks_workers)
            stack.callback(_stop, process)
        cluster.wait_for_nodes(1 + num_workers, START_SECONDS)
        yield cluster


def _started(
    arguments: list[str],
    environment: Mapping[str, str],
    log_file: Path,
    announcement: str,
    *,
    forks_workers: bool = False,
) -> tuple[subprocess.Popen[bytes], str]:
    """The process of a node, and what the group of `announcement` (a regular expression) found in what it printed.

    On a machine with much else to do Ray's own start can time out, so there is more than one try."""
    program: Sequence[str] = RAY
    if forks_workers:
        program = (str(Path(forked_workers.__file__)),)
        environment = {**worker_environment("cpu", 1), **environment}
    for _ in range(MAX_STARTS):
        process = _start([*program, *OF_START, *arguments], environment, log_file)
        found = _announced(process, log_file, announcement)
        if found is not None:
            if forks_workers:
                assert _announced(process, log_file, f"({forked_workers.READY})"), log_file.read_text()
            return process, found
        _stop(process)
    raise AssertionError(f"Ray did not start:\n{log_file.read_text()}")


def _start(arguments: list[str], environment: Mapping[str, str], log_file: Path) -> subprocess.Popen[bytes]:
    with log_file.open("w") as output:
        return subprocess.Popen(
            [sys.executable, *arguments],
            env={**inherited_environment(), **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            preexec_fn=signal_when_parent_dies(signal.SIGTERM),
        )


def _announced(process: subprocess.Popen[bytes], log_file: Path, announcement: str) -> str | None:
    """Waits for it; None when the start failed."""
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        found = re.search(announcement, log_file.read_text())
        if found:
            return found[1]
        time.sleep(0.1)
    return None


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(timeout=60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


ENDED = ("SUCCEEDED", "FAILED", "STOPPED")
END_SECONDS = 480.0
STOP_WAIT_SECONDS = 240
"""Ray's, from its stop of a driver to the end of its patience: a step and a checkpoint on a busy machine."""
Document = dict[str, JsonValue]


@dataclass(frozen=True)
class RayCluster:
    """The cluster whose dashboard listens on a port of this machine."""

    port: int
    token: str
    log_folder: Path
    """Ray's, of the newest session."""

    def get(self, path: str, **query: str) -> httpx.Response:
        """An answer of the dashboard."""
        return self._http("GET", path, query, None)

    def wait_for_nodes(self, num_nodes: int, seconds: float) -> None:
        """Waits until so many nodes have joined."""
        deadline = time.monotonic() + seconds
        while len(self._alive_nodes()) < num_nodes:
            assert time.monotonic() < deadline, "the cluster is not complete"
            time.sleep(0.2)

    def head_node(self) -> str:
        """The head's node id."""
        return next(str(node["node_id"]) for node in self._alive_nodes() if node["is_head_node"])

    def submit(self, submission_id: str, start_number: int, **variables: str) -> RayJob:
        """Submits the trainer as the operator does; `variables` are added to the environment of its driver."""
        state_file = self.log_folder / run_state_file_name(submission_id)
        environment = {
            ENV_ATTEMPT: "1",
            ENV_START_NUMBER: str(start_number),
            ENV_RUN_STATE_FILE: str(state_file),
            "RAY_JOB_STOP_WAIT_TIME_S": str(STOP_WAIT_SECONDS),
            **variables,
        }
        body = {
            "entrypoint": TRAINER_ENTRYPOINT,
            "submission_id": submission_id,
            "runtime_env": {"env_vars": environment},
            "metadata": {"uid": "of-the-job"},
        }
        deadline = time.monotonic() + 120
        while (answer := self._http("POST", "/api/jobs/", {}, body)).status_code != 200:
            # A head that has just started may have no agent for jobs yet.
            assert time.monotonic() < deadline, answer.text
            time.sleep(0.5)
        return RayJob(self, submission_id)

    def stop(self, submission_id: str) -> None:
        """Asks Ray to stop a job."""
        self._http("POST", f"/api/jobs/{submission_id}/stop", {}, None).raise_for_status()

    def entries(self, kind: str) -> list[Document]:
        """All `actors`, `nodes` or `placement_groups` that Ray knows of."""
        answer = self.get(f"/api/v0/{kind}", detail="1", limit="1000").raise_for_status().json()
        return list(answer["data"]["result"]["result"])

    def _alive_nodes(self) -> list[Document]:
        try:
            return [node for node in self.entries("nodes") if node["state"] == "ALIVE"]
        except httpx.HTTPError:
            return []

    def _http(self, method: str, path: str, query: Mapping[str, str], body: object) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        # By plain HTTP; else the client reads all authorities of this machine first.
        url = f"http://127.0.0.1:{self.port}"
        with httpx.Client(base_url=url, trust_env=False, verify=False, timeout=120) as client:
            return client.request(method, path, params=query, json=body, headers=headers)


@dataclass(frozen=True)
class RayJob:
    """One submission."""

    cluster: RayCluster
    submission_id: str

    def info(self) -> Document:
        """What Ray says about it."""
        document: Document = self.cluster.get(f"/api/jobs/{self.submission_id}").raise_for_status().json()
        return document

    def log_file(self, name: str) -> str:
        """A file of the log folder of the driver's node, through the dashboard; empty where there is none."""
        node = str(self.info()["driver_node_id"])
        answer = self.cluster.get("/api/v0/logs/file", node_id=node, filename=name, lines="-1", format="text")
        return answer.text if answer.status_code == 200 else ""

    def output(self) -> str:
        """What the driver has printed."""
        return self.log_file(driver_log_file_name(self.submission_id))

    def state(self) -> RunState | None:
        """RunState through the dashboard; None where there is none yet."""
        text = self.log_file(run_state_file_name(self.submission_id))
        return load_run_state(text) if text else None

    def wait_for_state(self, condition: Callable[[RunState], bool]) -> RunState:
        """Waits until RunState says so; fails when the job ends before."""
        deadline = time.monotonic() + END_SECONDS
        while True:
            state = self.state()
            if state is not None and condition(state):
                return state
            assert self.info()["status"] not in ENDED, self.output()
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.2)

    def end(self, seconds: float = END_SECONDS) -> Document:
        """Waits for the end; what Ray says then."""
        deadline = time.monotonic() + seconds
        while (info := self.info())["status"] not in ENDED:
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.2)
        return info
