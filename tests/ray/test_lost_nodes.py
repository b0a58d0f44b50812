"""A node that is lost or frozen is noticed within the time limit that the clusters of jobs have."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster

from rljob_api.constants import RAY_HEALTH_CHECK
from rljob_testing.ray_clusters import echo_workers, ray_nodes
from rljob_testing.running_clock import RunningClock
from rljob_trainer.errors import WorkerDiedError
from rljob_trainer.groups import worker_failure
from rljob_trainer.groups.fused_worker import RoleSpec
from rljob_trainer.groups.worker_processes import BuildSettings, WorkerProcesses, start_processes
from rljob_trainer.pools.resource_pool import PoolSettings, ResourcePool

pytestmark = [pytest.mark.ray, pytest.mark.long]

NODE_LOST_SECONDS = 37
"""How long a node may be silent, by `RAY_HEALTH_CHECK`, before its processes count as dead."""
ROLES = [RoleSpec("only", echo_workers.EchoWorker, partial(echo_workers.make_echo, "only"))]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in RAY_HEALTH_CHECK.items():
            patch.setenv(name, value)
        with ray_nodes.ray_nodes([ray_nodes.RayNode("127.0.0.2", num_cpus=1)]) as cluster:
            yield cluster


@dataclass(frozen=True)
class OneNode:
    """A node of its own with one worker, and the processes on that node."""

    address: str
    processes: WorkerProcesses
    victims: list[int]

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to all of them."""
        for victim in self.victims:
            os.kill(victim, number)

    def seconds_until_missed(self) -> float:
        """Seconds from now until a call to the worker fails. Time in which the machine itself stands still is not
        counted."""
        clock = RunningClock()
        expected = rf"worker rank 0 \(only; process \d+ on {self.address}\) died: .*node"
        with pytest.raises(WorkerDiedError, match=expected):
            echo_workers.raise_if_dead_within(self.processes, 120)
        return clock.seconds


@contextmanager
def one_node(cluster: Cluster, address: str, run_folder: Path) -> Iterator[OneNode]:
    node = cluster.add_node(**ray_nodes.RayNode(address, num_cpus=1, num_gpus=1).arguments())
    pool = ResourcePool(PoolSettings("main", 1, 1, True, 0.1, 60))
    processes = start_processes(pool, {"OMP_NUM_THREADS": "1", "RLJOB_RUN_FOLDER": str(run_folder)})
    processes.build(pool.slots(), BuildSettings("cpu", 1, None), ROLES)
    victims = ray_nodes.process_ids(node)
    assert processes.record.infos[0].process_id in victims
    try:
        yield OneNode(address, processes, victims)
    finally:
        for victim in victims:
            end(victim)
        processes.close()
        pool.release()


@dataclass(frozen=True)
class FrozenNode:
    """A node whose processes are stopped, so that it no longer responds and closes no connection."""

    seconds_until_missed: Future[float]
    dump: Future[ray_nodes.Dump]
    """The stacks that are written of its run."""


@pytest.fixture(scope="module")
def frozen(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrozenNode]:
    """Freezes the node early: noticing it takes a while, and other tests run meanwhile."""
    folder = tmp_path_factory.mktemp("frozen")
    with one_node(cluster, "127.0.0.4", folder) as node, ThreadPoolExecutor(2) as threads:
        node.send(signal.SIGSTOP)
        missed = threads.submit(node.seconds_until_missed)
        yield FrozenNode(missed, threads.submit(ray_nodes.dumped_stacks, folder, cluster.address))


@pytest.mark.usefixtures("frozen")
def test_a_lost_node_is_noticed_at_once(cluster: Cluster, tmp_path: Path) -> None:
    with one_node(cluster, "127.0.0.3", tmp_path) as lost:
        lost.send(signal.SIGKILL)
        assert lost.seconds_until_missed() < 25, "sooner than a silent node"


@pytest.mark.usefixtures("frozen")
def test_the_node_of_a_killed_worker_is_asked_for_the_cause(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A process has to start there, which can take longer on a busy machine than the limit allows.
    monkeypatch.setattr(worker_failure, "COUNTER_TIMEOUT_SECONDS", 240.0)
    with one_node(cluster, "127.0.0.5", tmp_path) as node:
        end(node.processes.record.infos[0].process_id)
        with pytest.raises(WorkerDiedError, match=r"on 127.0.0.5\) died: .*not out of memory.*kill -9"):
            echo_workers.raise_if_dead_within(node.processes, 300)


def test_a_frozen_node_is_noticed_within_the_limit(frozen: FrozenNode) -> None:
    assert frozen.seconds_until_missed.result() < NODE_LOST_SECONDS + 10
    dump = frozen.dump.result()
    # Nodes of the other tests may be in the list, too.
    assert {"node": "127.0.0.4", "reason": "did not respond in time"} in dump["silentNodes"]
    assert [process["state"] for process in dump["processes"]] == ["T (stopped by a signal)"]


def end(process_id: int) -> None:
    try:
        os.kill(process_id, signal.SIGKILL)
    except ProcessLookupError:
        return
