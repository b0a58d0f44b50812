"""Several real Ray nodes on this machine, each with its declared GPUs, memory, object store and other resources; and
the program that dumps the stacks of their processes.

Ray treats addresses of the loopback network (127.0.0.2, 127.0.0.10, ...) as separate nodes; two nodes may also share
one address. Do not use 127.0.0.1, which Ray takes for the machine's own address in some places.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict

import ray
from ray._private.node import Node
from ray.cluster_utils import Cluster

from rljob_testing.process_tree import descendants
from rljob_testing.settings import inherited_environment, inherited_python_path
from rljob_trainer.pod.dump_stacks import TOTAL_SECONDS

OBJECT_STORE_BYTES = 80_000_000
MAX_STARTS = 3
SUPPORT = Path(__file__).parents[2]


@dataclass(frozen=True)
class RayNode:
    """The resources that a node declares."""

    address: str
    num_cpus: int = 1
    num_gpus: int = 0
    memory_bytes: int = 1_000_000_000
    object_store_bytes: int = OBJECT_STORE_BYTES
    resources: Mapping[str, float] = field(default_factory=dict)

    def arguments(self) -> dict[str, object]:
        """The arguments of Ray's `Cluster.add_node`."""
        return {
            "node_ip_address": self.address,
            "num_cpus": self.num_cpus,
            "num_gpus": self.num_gpus,
            "memory": self.memory_bytes,
            "object_store_memory": self.object_store_bytes,
            "resources": dict(self.resources),
        }


class LocationReporter:
    """As a Ray actor, reports where it runs."""

    def locate(self) -> tuple[str, list[int]]:
        """Returns its node's id and the indices of its GPUs."""
        return ray.get_runtime_context().get_node_id(), ray.get_gpu_ids()


@contextmanager
def ray_nodes(nodes: Sequence[RayNode]) -> Iterator[Cluster]:
    """Starts a cluster of these nodes, of which the first is the head, and connects this process to it as a driver."""
    # Ray's sockets are in this folder, and socket paths must be short.
    with tempfile.TemporaryDirectory(prefix="rj", ignore_cleanup_errors=True) as folder:
        cluster = _started(nodes, folder)
        try:
            ray.init(
                address=cluster.address,
                log_to_driver=False,
                logging_level=logging.ERROR,
                # Lets workers import what the tests define here.
                runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join([str(SUPPORT), *inherited_python_path()])}},
            )
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()


def process_ids(node: Node) -> list[int]:
    """Process ids of a node: its raylet and all processes below it."""
    [raylet] = [info.process.pid for info in node.all_processes["raylet"]]
    return [raylet, *(process.pid for process in descendants(raylet))]


def _started(nodes: Sequence[RayNode], folder: str) -> Cluster:
    """Starts the nodes. Tries more than once, because Ray gives a node 30 s to start, and a busy machine can need
    more."""
    for start in range(1, MAX_STARTS + 1):
        cluster = Cluster()
        try:
            cluster.add_node(**nodes[0].arguments(), temp_dir=folder, include_dashboard=False, no_monitor=True)
            for node in nodes[1:]:
                cluster.add_node(**node.arguments())
        except Exception:
            cluster.shutdown()
            if start == MAX_STARTS:
                raise
        else:
            break
    return cluster


SECONDS_TO_START = 60.0
"""Time for the start on a busy machine, beyond the program's own limit. Ray's own timeouts are minutes."""
PROGRAM = """
import sys
from rljob_trainer.pod import dump_stacks
dump_stacks.TOTAL_SECONDS, dump_stacks.HERE_SECONDS = {total}, {total} / 4
sys.exit(dump_stacks.main())
"""


class DumpedProcess(TypedDict):
    """The entry of one process in the summary."""

    pod: str | None
    node: str | None
    host: str
    processId: int
    role: str
    rank: int | None
    title: str
    state: str
    innermostFrame: str
    innermostUserFrame: str
    file: str


class Dump(TypedDict):
    """The summary that the program prints."""

    processes: list[DumpedProcess]
    silentNodes: list[dict[str, str]]
    folder: str | None
    error: str | None


def dumped_stacks(run_folder: Path, ray_address: str, total_seconds: float = TOTAL_SECONDS, **variables: str) -> Dump:
    """Runs the program, checks that it ends in time, and returns its last line.

    `total_seconds`: its time limit. A quarter of it is for the processes of its own node.
    """
    environment = inherited_environment() | {
        "RLJOB_RUN_FOLDER": str(run_folder),
        "RAY_ADDRESS": ray_address,
        **variables,
    }
    began = time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(total=total_seconds)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert time.monotonic() - began < total_seconds + SECONDS_TO_START
    assert ended.returncode == 0, ended.stdout + ended.stderr
    dump: Dump = json.loads(ended.stdout.splitlines()[-1])
    return dump
