"""Which GPUs worker processes see, on a real Ray node that declares GPUs. They do not exist, and nothing uses them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import pytest

from rljob_testing.ray_clusters import echo_workers, local_ray
from rljob_trainer.groups.ray_session import ray_session
from rljob_trainer.groups.worker_group import spawn
from rljob_trainer.groups.worker_processes import WorkerProcesses

pytestmark = [pytest.mark.ray]


@pytest.fixture(scope="module")
def node_with_two_gpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A Ray node that was started with CUDA_VISIBLE_DEVICES=4,5 and declares two GPUs, and a connection to it."""
    log_file = tmp_path_factory.mktemp("ray") / "ray.log"
    with (
        local_ray.ray_cluster(2, log_file, visible_gpus=("4", "5"), forks_workers=True) as address,
        ray_session(address, 0, 0),
    ):
        yield


def devices_of(processes: WorkerProcesses) -> list[tuple[str | None, int]]:
    """The GPUs that each rank sees, and the index of its own."""
    return cast(list[tuple[str | None, int]], echo_workers.call(spawn(processes)["first"], "devices"))


@pytest.mark.usefixtures("node_with_two_gpus")
def test_workers_see_their_own_gpu() -> None:
    with echo_workers.echo_processes(2, use_gpu=True) as processes:
        assert sorted(devices_of(processes)) == [("4", 0), ("5", 0)]


@pytest.mark.usefixtures("node_with_two_gpus")
def test_workers_that_share_a_model_see_all_gpus_of_their_node() -> None:
    with echo_workers.echo_processes(2, use_gpu=True, sees_all_gpus=True) as processes:
        assert sorted(devices_of(processes)) == [("4,5", 0), ("4,5", 1)]
        # Ray does not change the variable again for later calls.
        assert sorted(devices_of(processes)) == [("4,5", 0), ("4,5", 1)]


@pytest.mark.usefixtures("node_with_two_gpus")
def test_workers_of_several_pools_on_a_node_have_different_gpus() -> None:
    with (
        echo_workers.echo_processes(1, use_gpu=True, sees_all_gpus=True) as first,
        echo_workers.echo_processes(1, use_gpu=True, sees_all_gpus=True) as second,
    ):
        assert sorted([*devices_of(first), *devices_of(second)]) == [("4,5", 0), ("4,5", 1)]
