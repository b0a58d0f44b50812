"""One small Ray cluster for the runs that need not start their own, and the trainer's program in this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rljob_testing.ray_cluster import ray_cluster
from rljob_testing.trainer_program import RunTrainer


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Ray cluster with 3 CPUs and no GPU."""
    with ray_cluster(3, tmp_path_factory.mktemp("ray") / "ray.log") as address:
        yield address


@pytest.fixture
def run_trainer(tmp_path: Path) -> RunTrainer:
    """Runs `python -m rljob_trainer` to its end, in this process, as the operator would start it."""
    return RunTrainer(tmp_path)
