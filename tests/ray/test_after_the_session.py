"""When the connection to Ray is closed, what is left of worker groups says so and opens no other one."""

from __future__ import annotations

import gc
import threading
import time
from functools import partial

import pytest
import ray

from rljob_testing.echo_groups import PYTHON_PATH, call, mixed_batch
from rljob_testing.echo_worker import EchoWorker, make_echo
from rljob_trainer.cluster.calls import Pending
from rljob_trainer.cluster.fused_worker import RoleSpec
from rljob_trainer.cluster.resource_pool import PoolSettings, ResourcePool
from rljob_trainer.cluster.session import ray_session
from rljob_trainer.cluster.worker_group import spawn
from rljob_trainer.cluster.worker_processes import BuildSettings, start_processes
from rljob_trainer.errors import ResourceError

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180)]


def test_after_the_session_nothing_reaches_for_ray() -> None:
    assert not ray.is_initialized()
    with ray_session(None, num_cpus=2, num_gpus=0):
        pool = ResourcePool(PoolSettings("main", 1, 1, False, 0.1, 60))
        processes = start_processes(pool, {"PYTHONPATH": PYTHON_PATH, "OMP_NUM_THREADS": "1"})
        processes.build(
            pool.slots(), BuildSettings("cpu", 1, None), [RoleSpec("first", EchoWorker, partial(make_echo, "first"))]
        )
        group = spawn(processes)["first"]
        pending = call(group, "add_later", mixed_batch(2))
        assert isinstance(pending, Pending)
    with pytest.raises(ResourceError, match=r"first\.empty: the connection to Ray has been closed"):
        call(group, "empty")
    with pytest.raises(ResourceError, match=r"first\.add_later: the connection to Ray has been closed"):
        pending.result(1.0)
    processes.close()
    pool.release()
    time.sleep(2.5)
    gc.collect()
    assert not ray.is_initialized()
    assert not [thread for thread in threading.enumerate() if thread.name == "liveness"]
