"""Fixtures: one small Ray cluster shared by the runs that need no cluster of their own, and the trainer's program run
in this process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from rljob_testing.ray_clusters import echo_workers, fake_nsys, local_ray
from rljob_testing.settings import inherited_environment
from rljob_testing.training import training_runs
from rljob_trainer.groups.ray_session import ray_session
from rljob_trainer.groups.worker_processes import WorkerProcesses


@pytest.fixture(scope="module", autouse=True)
def _no_authentication() -> Iterator[None]:
    """Fails if a module has started a local Ray cluster in this process without RAY_AUTH_MODE=disabled. Ray has then
    turned authentication on, and later modules could not use `cluster`, which has none."""
    yield
    assert os.environ.get("RAY_AUTH_MODE") != "token"


@pytest.fixture(scope="session")
def nsys_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a fake nsys, which the nodes of `cluster` find on their PATH."""
    return fake_nsys.install(tmp_path_factory.mktemp("nsys") / "bin")


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory, nsys_folder: Path) -> Iterator[str]:
    """The address of a Ray cluster with 3 CPUs and no GPU."""
    log_file = tmp_path_factory.mktemp("ray") / "ray.log"
    path = f"{nsys_folder}{os.pathsep}{inherited_environment()['PATH']}"
    with local_ray.ray_cluster(3, log_file, {"PATH": path}, forks_workers=True) as address:
        yield address


@pytest.fixture(scope="module")
def ray_driver(cluster: str) -> Iterator[None]:
    """Connects this process to that cluster as a Ray driver."""
    with ray_session(cluster, 0, 0):
        yield


@pytest.fixture(scope="module")
def four_processes(ray_driver: None) -> Iterator[WorkerProcesses]:  # noqa: ARG001 - connects
    """Four worker processes with the roles `first` and `second`."""
    with echo_workers.echo_processes(4) as processes:
        yield processes


@pytest.fixture
def run_trainer(tmp_path: Path) -> training_runs.RunTrainer:
    """Runs `python -m rljob_trainer` to its end in this process, with the environment that the operator sets."""
    return training_runs.RunTrainer(tmp_path)
