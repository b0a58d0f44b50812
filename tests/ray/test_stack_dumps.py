"""The stacks that are written of a hanging run before anything of it is stopped."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from rljob_testing.ray_clusters import echo_workers
from rljob_testing.ray_clusters.ray_nodes import dumped_stacks
from rljob_testing.settings import inherited_python_path
from rljob_trainer.batch.proto import DataProto
from rljob_trainer.groups.calls import Pending
from rljob_trainer.groups.worker_group import spawn
from rljob_trainer.groups.worker_processes import BuildSettings, start_processes
from rljob_trainer.pools.resource_pool import PoolSettings, ResourcePool

pytestmark = [pytest.mark.ray]


@pytest.fixture(scope="module", autouse=True)
def start_without_ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Future[None]]:
    """Starts a program that finds no Ray. While it waits for Ray, the other test runs."""
    with ThreadPoolExecutor() as executor:
        yield executor.submit(without_ray, tmp_path_factory.mktemp("run"))


def without_ray(folder: Path) -> None:
    with pytest.raises(AssertionError, match="Ray did not list the nodes"):
        dumped_stacks(folder, "127.0.0.1:1", total_seconds=8.0)


@pytest.mark.usefixtures("ray_driver")
def test_stacks_of_a_stopped_worker_and_of_a_waiting_worker_are_written(tmp_path: Path, cluster: str) -> None:
    pool = ResourcePool(PoolSettings("main", 1, 2, False, 0.1, 60))
    support = Path(__file__).parents[1] / "support"
    python_path = os.pathsep.join([str(support), *inherited_python_path()])
    environment = {"PYTHONPATH": python_path, "OMP_NUM_THREADS": "1", "RLJOB_RUN_FOLDER": str(tmp_path)}
    processes = start_processes(pool, environment)
    try:
        processes.build(pool.slots(), BuildSettings("cpu", 1, None), echo_workers.ROLES)
        group = spawn(processes)["first"]
        [waits, stops] = [each[2] for each in echo_workers.describe_ranks(group)]
        end = tmp_path / "end"
        pending = echo_workers.call(
            group, "add_when_file_exists", echo_workers.mixed_batch(2).only(["number"]), str(end)
        )
        assert isinstance(pending, Pending)
        echo_workers.wait_until_rank_waits(end, 0)
        os.kill(stops, signal.SIGSTOP)
        pod_variables = {"RLJOB_ATTEMPT": "3", "RLJOB_POD_NAME": "head-pod", "RLJOB_NODE_NAME": "node-1"}
        dump = dumped_stacks(tmp_path, cluster, total_seconds=200.0, **pod_variables)
        os.kill(stops, signal.SIGCONT)
        assert (dump["silentNodes"], dump["error"]) == ([], None)
        by_id = {process["processId"]: process for process in dump["processes"]}
        assert by_id.keys() == {waits, stops}
        assert (by_id[waits]["role"], by_id[waits]["rank"], by_id[waits]["pod"]) == ("first+second", 0, "head-pod")
        assert by_id[waits]["title"] == "ray::RayWorker.first.add_when_file_exists"
        assert by_id[waits]["innermostFrame"].endswith(" add_when_file_exists")
        assert by_id[stops]["rank"] == 1
        assert by_id[stops]["innermostFrame"].startswith("unknown: the process is stopped by a signal")
        folder = tmp_path / "logs" / "attempt-3"
        assert dump["folder"] == str(folder)
        assert sorted(path.name for path in folder.iterdir()) == sorted(
            f"stacks-head-pod-first+second-{process}.txt" for process in (waits, stops)
        )
        assert "in add_when_file_exists\n" in (folder / by_id[waits]["file"]).read_text()
        # Both continue unchanged afterwards.
        end.touch()
        result = pending.result()
        assert isinstance(result, DataProto)
        assert result["number"].tolist() == [1, 2]
    finally:
        processes.close()
        pool.release()


def test_without_ray_the_stacks_of_local_processes_are_written(start_without_ray: Future[None]) -> None:
    start_without_ray.result()
