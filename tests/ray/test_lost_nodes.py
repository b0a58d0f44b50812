"""A node that is lost or frozen is noticed within the limit that jobs' clusters are given."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster

from rljob_api.constants import RAY_HEALTH_CHECK, RAY_NODE_LOST_SECONDS
from rljob_testing.echo_groups import watch_for_seconds
from rljob_testing.echo_worker import EchoWorker, make_echo
from rljob_testing.processes import descendants
from rljob_testing.ray_nodes import RayNode, ray_nodes
from rljob_testing.stack_dumps import dumped_stacks
from rljob_trainer.errors import WorkerDiedError
from rljob_trainer.groups import death
from rljob_trainer.groups.fused_worker import RoleSpec
from rljob_trainer.groups.worker_processes import BuildSettings, WorkerProcesses, start_processes
from rljob_trainer.pools.resource_pool import PoolSettings, ResourcePool

pytestmark = [pytest.mark.ray, pytest.mark.long]

ROLES = [RoleSpec("only", EchoWorker, partial(make_echo, "only"))]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in RAY_HEALTH_CHECK.items():
            patch.setenv(name, value)
        with ray_nodes([RayNode("127.0.0.2", num_cpus=1)]) as cluster:
            yield cluster


class RunningClock:
    """Counts the seconds in which this process runs, and not those in which the machine stands still."""

    def __init__(self) -> None:
        self.seconds = 0.0
        threading.Thread(target=self._tick, daemon=True).start()

    def _tick(self) -> None:
        while True:
            began = time.monotonic()
            time.sleep(0.1)
            self.seconds += min(0.5, time.monotonic() - began)


@dataclass(frozen=True)
class OneNode:
    """A node of its own with one worker, and all processes there."""

    processes: WorkerProcesses
    victims: list[int]


@contextmanager
def one_node(cluster: Cluster, address: str, run_folder: Path) -> Iterator[OneNode]:
    node = cluster.add_node(**RayNode(address, num_cpus=1, num_gpus=1).arguments())
    [raylet] = [info.process.pid for info in node.all_processes["raylet"]]
    pool = ResourcePool(PoolSettings("main", 1, 1, True, 0.1, 60))
    processes = start_processes(pool, {"OMP_NUM_THREADS": "1", "RLJOB_RUN_FOLDER": str(run_folder)})
    processes.build(pool.slots(), BuildSettings("cpu", 1, None), ROLES)
    victims = [raylet, *(process.pid for process in descendants(raylet))]
    assert processes.record.infos[0].process_id in victims
    try:
        yield OneNode(processes, victims)
    finally:
        for victim in victims:
            end(victim)
        processes.close()
        pool.release()


def test_nodes_that_do_not_answer_any_more(cluster: Cluster, tmp_path: Path) -> None:
    """One is lost and one frozen, at the same time: that is noticed by waiting."""
    lost_folder, frozen_folder = tmp_path / "lost", tmp_path / "frozen"
    with one_node(cluster, "127.0.0.3", lost_folder) as lost, one_node(cluster, "127.0.0.4", frozen_folder) as frozen:
        for each, number in ((frozen, signal.SIGSTOP), (lost, signal.SIGKILL)):
            for victim in each.victims:
                os.kill(victim, number)
        # A machine that stands still meanwhile notices nothing then.
        clock = RunningClock()
        told = r"worker rank 0 \(only; process \d+ on {}\) died: .*node"
        with pytest.raises(WorkerDiedError, match=told.format("127.0.0.3")):
            watch_for_seconds(lost.processes, 120)
        assert clock.seconds < 25, "sooner than by silence"
        dump = dumped_stacks(frozen_folder, cluster.address)
        assert dump["silentNodes"] == [{"node": "127.0.0.4", "reason": "did not answer in time"}]
        assert [process["state"] for process in dump["processes"]] == ["T (stopped by a signal)"]
        with pytest.raises(WorkerDiedError, match=told.format("127.0.0.4")):
            watch_for_seconds(frozen.processes, 120)
        assert clock.seconds < RAY_NODE_LOST_SECONDS + 10


def test_the_node_of_a_killed_worker_is_asked_for_the_cause(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    # A process has to start there, which can take longer on a busy machine than anybody should wait for it.
    monkeypatch.setattr(death, "ASK_SECONDS", 240.0)
    node = cluster.add_node(**RayNode("127.0.0.5", num_cpus=1, num_gpus=1).arguments())
    pool = ResourcePool(PoolSettings("main", 1, 1, True, 0.1, 60))
    processes = start_processes(pool, {"OMP_NUM_THREADS": "1"})
    try:
        processes.build(pool.slots(), BuildSettings("cpu", 1, None), ROLES)
        end(processes.record.infos[0].process_id)
        cause = "the kernel killed nothing there for lack of memory, so somebody killed it"
        with pytest.raises(WorkerDiedError, match=rf"on 127.0.0.5\) died: its process ended without a word; {cause}"):
            watch_for_seconds(processes, 300)
    finally:
        processes.close()
        pool.release()
        cluster.remove_node(node)


def end(process_id: int) -> None:
    try:
        os.kill(process_id, signal.SIGKILL)
    except ProcessLookupError:
        return
