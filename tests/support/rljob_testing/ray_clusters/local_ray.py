"""Ray clusters on this machine: for runs, and as the operator finds them in pods."""

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
from types import MappingProxyType

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
"""Options of a head without the autoscaler process."""
ADDRESS = r"--address='([^']+)'"
"""The address in the output of `ray start --head`."""


@contextmanager
def ray_cluster(
    num_cpus: int,
    log_file: Path,
    variables: Mapping[str, str] = MappingProxyType({}),
    *,
    visible_gpus: Sequence[str] = (),
    forks_workers: bool = False,
) -> Iterator[str]:
    """Starts a cluster, with these environment variables, and yields its address. It declares the `visible_gpus`, which
    need not exist. With `forks_workers`, workers start with torch and transformers loaded and do not compile models
    (see `forked_workers`)."""
    arguments = [*HEAD, "--include-dashboard=false", f"--num-cpus={num_cpus}", f"--num-gpus={len(visible_gpus)}"]
    environment = {"CUDA_VISIBLE_DEVICES": ",".join(visible_gpus), "RAY_AUTH_MODE": "disabled", **variables}
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
    """A cluster with all its nodes, whose logs are in `folder`.

    `variables` are environment variables of all nodes, like those of a pod. Without a token Ray's authentication
    settings stay at their defaults, as with a KubeRay version that does not know authentication. `forks_workers`: see
    `ray_cluster`; it applies to nodes with GPUs.
    """
    environment = {
        **({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token} if token else {}),
        # Otherwise each node waits for its work to move elsewhere before it stops.
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        # The Jobs API runs `python`, which in the image is the trainer's Python.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), inherited_environment()["PATH"]]),
        **variables,
    }
    port = free_port()
    with ExitStack() as stack:
        # Ray's sockets are in this folder, and socket paths must be short.
        session = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rj", ignore_cleanup_errors=True)))
        limits = [f"--object-store-memory={OBJECT_STORE_BYTES}", "--dashboard-agent-listen-port=0"]
        head = [*HEAD, *limits, f"--temp-dir={session}", f"--dashboard-port={port}", "--num-gpus=0", "--num-cpus=1"]
        # KubeRay sets this in the head pod, whatever port Ray has. Drivers get their own address.
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
    """Starts a node. Returns its process and the first group of `announcement` (a regular expression) in its output.

    Tries more than once, because Ray's start can time out on a busy machine.
    """
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
    """Waits for the announcement; None if the start failed."""
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
"""How long Ray waits for a driver that was asked to stop: long enough for a step and a checkpoint on a busy machine."""
Document = dict[str, JsonValue]


@dataclass(frozen=True)
class RayCluster:
    """A cluster whose dashboard listens on a port of this machine."""

    port: int
    token: str
    log_folder: Path
    """Ray's log folder of the newest session."""

    def get(self, path: str, **query: str) -> httpx.Response:
        """Sends a GET request to the dashboard."""
        return self._http("GET", path, query, None)

    def wait_for_nodes(self, num_nodes: int, seconds: float) -> None:
        """Waits until this number of nodes has joined."""
        deadline = time.monotonic() + seconds
        while len(self._alive_nodes()) < num_nodes:
            assert time.monotonic() < deadline, "not all nodes joined the cluster"
            time.sleep(0.2)

    def head_node(self) -> str:
        """The node id of the head."""
        return next(str(node["node_id"]) for node in self._alive_nodes() if node["is_head_node"])

    def submit(self, submission_id: str, start_number: int, **variables: str) -> RayJob:
        """Submits the trainer as the operator does; `variables` are added to the driver's environment."""
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
            # The head may have no job agent yet when it has just started.
            assert time.monotonic() < deadline, answer.text
            time.sleep(0.5)
        return RayJob(self, submission_id)

    def stop(self, submission_id: str) -> None:
        """Asks Ray to stop a job."""
        self._http("POST", f"/api/jobs/{submission_id}/stop", {}, None).raise_for_status()

    def entries(self, kind: str) -> list[Document]:
        """All `actors`, `nodes` or `placement_groups` that Ray lists."""
        answer = self.get(f"/api/v0/{kind}", detail="1", limit="1000").raise_for_status().json()
        return list(answer["data"]["result"]["result"])

    def _alive_nodes(self) -> list[Document]:
        try:
            return [node for node in self.entries("nodes") if node["state"] == "ALIVE"]
        except httpx.HTTPError:
            return []

    def _http(self, method: str, path: str, query: Mapping[str, str], body: object) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        # Without TLS: otherwise the client first loads all certificate authorities of the machine.
        url = f"http://127.0.0.1:{self.port}"
        with httpx.Client(base_url=url, trust_env=False, verify=False, timeout=120) as client:
            return client.request(method, path, params=query, json=body, headers=headers)


@dataclass(frozen=True)
class RayJob:
    """One submitted job."""

    cluster: RayCluster
    submission_id: str

    def info(self) -> Document:
        """Ray's record of the job."""
        document: Document = self.cluster.get(f"/api/jobs/{self.submission_id}").raise_for_status().json()
        return document

    def log_file(self, name: str) -> str:
        """A file in the log folder of the driver's node, read through the dashboard; empty if it does not exist."""
        node = str(self.info()["driver_node_id"])
        answer = self.cluster.get("/api/v0/logs/file", node_id=node, filename=name, lines="-1", format="text")
        return answer.text if answer.status_code == 200 else ""

    def output(self) -> str:
        """The driver's output."""
        return self.log_file(driver_log_file_name(self.submission_id))

    def state(self) -> RunState | None:
        """The run state, read through the dashboard; None if there is none yet."""
        text = self.log_file(run_state_file_name(self.submission_id))
        return load_run_state(text) if text else None

    def wait_for_state(self, condition: Callable[[RunState], bool]) -> RunState:
        """Waits until the run state meets the condition. Fails if the job ends first."""
        deadline = time.monotonic() + END_SECONDS
        while True:
            state = self.state()
            if state is not None and condition(state):
                return state
            assert self.info()["status"] not in ENDED, self.output()
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.2)

    def end(self, seconds: float = END_SECONDS) -> Document:
        """Waits until the job ends and returns Ray's record of it."""
        deadline = time.monotonic() + seconds
        while (info := self.info())["status"] not in ENDED:
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.2)
        return info
