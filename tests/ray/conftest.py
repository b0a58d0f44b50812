"""One small Ray cluster for the runs that need not start their own, and the trainer's program in this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rljob_testing.ray_clusters import echo_workers, local_ray
from rljob_testing.training import training_runs
from rljob_trainer.groups.ray_session import ray_session
from rljob_trainer.groups.worker_processes import WorkerProcesses


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Ray cluster with 3 CPUs and no GPU."""
    with local_ray.ray_cluster(3, tmp_path_factory.mktemp("ray") / "ray.log", forks_workers=True) as address:
        yield address


@pytest.fixture(scope="module")
def ray_driver(cluster: str) -> Iterator[None]:
    """This process as a driver of that cluster."""
    with ray_session(cluster, 0, 0):
        yield


@pytest.fixture(scope="module")
def four(ray_driver: None) -> Iterator[WorkerProcesses]:  # noqa: ARG001 - connects
    """Four processes with the roles `first` and `second`."""
    with echo_workers.echo_processes(4) as processes:
        yield processes


@pytest.fixture
def run_trainer(tmp_path: Path) -> training_runs.RunTrainer:
    """Runs `python -m rljob_trainer` to its end, in this process, as the operator would start it."""
    return training_runs.RunTrainer(tmp_path)
