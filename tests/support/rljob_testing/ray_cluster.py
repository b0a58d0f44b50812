"""Ray clusters on this machine, for runs that are given one instead of starting their own.

`ray_cluster` is one small node. `pod_cluster` is what KubeRay makes for a job, without the pods: a head without GPUs,
worker nodes with one declared GPU each, token authentication, and the Jobs API.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rljob_testing import forked_workers
from rljob_testing.ports import free_port
from rljob_testing.ray_jobs import RayCluster
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
    program: Sequence[str] = RAY
    if forks_workers:
        program = (str(Path(forked_workers.__file__)),)
        environment |= worker_environment("cpu", 1)
    process, address = _started(arguments, environment, log_file, ADDRESS, program)
    try:
        if forks_workers:
            assert _announced(process, log_file, f"({forked_workers.READY})"), log_file.read_text()
        yield address
    finally:
        _stop(process)


@contextmanager
def pod_cluster(
    folder: Path, token: str, variables: Mapping[str, str], *, num_workers: int = NUM_POD_WORKERS
) -> Iterator[RayCluster]:
    """The cluster with all its nodes, whose logs are in `folder`. `variables` are in the environment of all nodes, as
    those of a pod are. Without a token nothing is said about authentication, as by a KubeRay that does not know it."""
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
            process, _ = _started(worker, environment, folder / f"worker-{number}.log", "(Ray runtime started)")
            stack.callback(_stop, process)
        cluster.wait_for_nodes(1 + num_workers, START_SECONDS)
        yield cluster


def _started(
    arguments: list[str],
    environment: Mapping[str, str],
    log_file: Path,
    announcement: str,
    program: Sequence[str] = RAY,
) -> tuple[subprocess.Popen[bytes], str]:
    """The process of a node, and what the group of `announcement` (a regular expression) found in what it printed.

    On a machine with much else to do Ray's own start can time out, so there is more than one try."""
    for _ in range(MAX_STARTS):
        process = _start([*program, *OF_START, *arguments], environment, log_file)
        found = _announced(process, log_file, announcement)
        if found is not None:
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
