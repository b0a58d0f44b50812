"""Ray's memory monitor kills a worker of a full pod: the error says so, and the operator learns the cause."""

from __future__ import annotations

from pathlib import Path

import pytest

from rljob_api.constants import ErrorCause
from rljob_testing.messages import Mentions
from rljob_testing.ray_clusters import echo_workers
from rljob_testing.ray_clusters.local_ray import ray_cluster
from rljob_trainer.errors import WorkerDiedError
from rljob_trainer.groups.ray_session import ray_session

pytestmark = pytest.mark.ray

ALWAYS_FULL = {"RAY_memory_usage_threshold": "0.001", "RAY_memory_monitor_refresh_ms": "200"}


def test_a_worker_killed_by_the_memory_monitor_is_out_of_memory(tmp_path: Path) -> None:
    with (
        ray_cluster(2, tmp_path / "ray.log", ALWAYS_FULL) as address,
        ray_session(address, 1, 0),
        pytest.raises(WorkerDiedError) as raised,
        echo_workers.echo_processes(1),
    ):
        raise AssertionError("the memory monitor killed no worker")
    assert raised.value.known_cause is ErrorCause.HOST_MEMORY
    assert str(raised.value) == Mentions("out of memory", "memory monitor", "limit", "give its pool more memory")
