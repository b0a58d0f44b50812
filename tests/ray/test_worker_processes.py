"""Processes of worker groups on real Ray: found by name, left behind, killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ray.util import placement_group_table

from rljob_testing.ray_clusters import echo_workers
from rljob_testing.settings import inherited_environment
from rljob_trainer.batch.proto import DataProto
from rljob_trainer.errors import (
    DataLostError,
    ResourceError,
    WorkerDiedError,
)
from rljob_trainer.groups.calls import Pending
from rljob_trainer.groups.worker_group import spawn
from rljob_trainer.groups.worker_processes import (
    WorkerProcesses,
    attach_processes,
)

pytestmark = [pytest.mark.ray]


@pytest.mark.usefixtures("ray_driver")
def test_a_group_can_be_attached_by_its_name() -> None:
    with echo_workers.echo_processes(2, "echoes") as processes:
        mine = [process for _, _, process, _ in echo_workers.describe_ranks(spawn(processes)["second"])]
        other = attach_processes("echoes")
        views = spawn(other)
        assert list(views) == ["first", "second"]
        theirs = [process for _, _, process, _ in echo_workers.describe_ranks(views["second"])]
        assert theirs == mine
        assert echo_workers.call_for_batch(views["first"], "add", echo_workers.mixed_batch(3).only(["number"]))[
            "number"
        ].tolist() == [1, 2, 3]
    with pytest.raises(ResourceError, match="workers nobody: not all of them exist"):
        attach_processes("nobody")


LEAVING_BEHIND = """
import sys
from functools import partial
from rljob_testing.ray_clusters.echo_workers import EchoWorker, make_echo
from rljob_trainer.groups.fused_worker import RoleSpec
from rljob_trainer.pools.resource_pool import PoolSettings, ResourcePool
from rljob_trainer.groups.ray_session import ray_session
from rljob_trainer.groups.worker_processes import BuildSettings, start_processes

with ray_session(sys.argv[1], 0, 0):
    pool = ResourcePool(PoolSettings("left", 1, 2, False, 0.1, 60, is_detached=sys.argv[2] == "named"))
    name = "left" if sys.argv[2] == "named" else None
    processes = start_processes(pool, {"PYTHONPATH": sys.argv[3]}, name)
    role = RoleSpec("only", EchoWorker, partial(make_echo, "only"))
    processes.build(pool.slots(), BuildSettings("cpu", 1, None), [role])
    print("built", flush=True)
    sys.stdin.read()
"""


def leftover_processes(cluster: str, how: str) -> None:
    """Another controller builds a group and is killed."""
    controller = subprocess.Popen(
        [sys.executable, "-c", LEAVING_BEHIND, cluster, how, echo_workers.PYTHON_PATH],
        env=inherited_environment() | {"PYTHONPATH": echo_workers.PYTHON_PATH},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert controller.stdout is not None
    assert controller.stdout.readline() == "built\n"
    controller.kill()
    controller.wait()


def num_reserved() -> int:
    table = placement_group_table()
    return sum(group["state"] != "REMOVED" for group in table.values())


def wait_until_reserved(number: int) -> None:
    deadline = time.monotonic() + 120
    while num_reserved() != number and time.monotonic() < deadline:
        time.sleep(0.2)
    assert num_reserved() == number


@pytest.mark.usefixtures("ray_driver")
def test_a_killed_controller_leaves_only_groups_with_a_name(cluster: str) -> None:
    before = num_reserved()
    leftover_processes(cluster, "unnamed")
    wait_until_reserved(before)

    leftover_processes(cluster, "named")
    time.sleep(1)
    assert num_reserved() == before + 1
    processes = attach_processes("left")
    assert echo_workers.call_for_batch(spawn(processes)["only"], "add", echo_workers.mixed_batch(2).only(["number"]))[
        "number"
    ].tolist() == [1, 2]
    processes.close()
    wait_until_reserved(before)


@pytest.mark.usefixtures("ray_driver")
def test_a_death_is_noticed_without_a_call(tmp_path: Path) -> None:
    with echo_workers.echo_processes(2) as processes, echo_workers.echo_processes(1) as others:
        group, other = spawn(processes)["first"], spawn(others)["first"]
        victim = echo_workers.describe_ranks(group)[1][2]
        # A call to others runs as long as all of them are alive, and no longer.
        end = tmp_path / "end"
        pending = echo_workers.call(
            other, "add_when_file_exists", echo_workers.mixed_batch(1).only(["number"]), str(end)
        )
        assert isinstance(pending, Pending)
        os.kill(victim, signal.SIGKILL)
        with pytest.raises(WorkerDiedError, match=rf"worker rank 1 \(first, second; process {victim} on .*\) died: "):
            echo_workers.raise_if_dead_within(processes, 120)
        assert not pending.done()
        # Busy processes would be waited for.
        end.touch()


def test_a_killed_worker_is_named_with_its_call_and_cause(four_processes: WorkerProcesses) -> None:
    group = spawn(four_processes)["first"]
    kept = echo_workers.call_for_batch(group, "echo", echo_workers.mixed_batch(4, 100_000).only(["x"]))
    with pytest.raises(
        WorkerDiedError,
        match=r"worker rank 2 \(first, second; process \d+ on .*\) died in first\.fail: .*kill -9",
    ):
        echo_workers.call(group, "fail", 2, str(int(signal.SIGKILL)))
    with pytest.raises(WorkerDiedError, match="worker rank 2"):
        echo_workers.call(group, "empty")
    # Objects of the dead process disappear soon after it; objects of the others stay.
    assert kept.rows([0, 3]).fetched()["x"][:, 0].tolist() == [0, 3]
    with pytest.raises(DataLostError, match="data of this step is lost"):
        fetch_for_seconds(kept.rows([2]), 120)


def fetch_for_seconds(batch: DataProto, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        batch.fetched()
        time.sleep(0.2)
