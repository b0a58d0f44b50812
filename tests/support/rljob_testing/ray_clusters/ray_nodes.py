"""Several real Ray nodes on this machine, each with its declared GPUs, memory, object store and other resources.

Ray treats addresses of the loopback network (127.0.0.2, 127.0.0.10, ...) as separate nodes; two nodes may also share
one address. Do not use 127.0.0.1, which Ray takes for the machine's own address in some places.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import ray
from ray._private.node import Node
from ray.cluster_utils import Cluster

from rljob_testing.process_tree import descendants
from rljob_testing.settings import inherited_python_path

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
