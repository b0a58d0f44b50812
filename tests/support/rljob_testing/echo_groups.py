"""Groups of `EchoWorker`s on the Ray that this process is connected to, and calls of their methods by name."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import cast

import torch

from rljob_testing.echo_worker import EchoWorker, make_echo
from rljob_testing.settings import inherited_python_path
from rljob_trainer.batch.proto import DataProto
from rljob_trainer.batch.ragged import RaggedColumn
from rljob_trainer.groups.fused_worker import RoleSpec
from rljob_trainer.groups.worker_group import WorkerGroup
from rljob_trainer.groups.worker_processes import BuildSettings, WorkerProcesses, start_processes
from rljob_trainer.pools.resource_pool import PoolSettings, ResourcePool

PYTHON_PATH = os.pathsep.join([str(Path(__file__).parents[1]), *inherited_python_path()])
Described = tuple[str, int, int, tuple[str, ...]]
"""What `EchoWorker.whoami` tells."""
ROLES = [RoleSpec(name, EchoWorker, partial(make_echo, name)) for name in ("first", "second")]


@contextmanager
def started_echoes(
    num_workers: int, name: str | None = None, roles: Sequence[RoleSpec] = ROLES
) -> Iterator[WorkerProcesses]:
    """Processes with these roles, `first` and `second` by default, ended afterwards."""
    pool = ResourcePool(PoolSettings("main", 1, num_workers, False, 0.1, 60, is_detached=name is not None))
    try:
        processes = start_processes(pool, {"PYTHONPATH": PYTHON_PATH, "OMP_NUM_THREADS": "1"}, name)
        try:
            processes.build(pool.slots(), BuildSettings("cpu", 1, None), roles)
            yield processes
        finally:
            processes.close()
    finally:
        pool.release()


def call(group: WorkerGroup, method: str, *arguments: object, **named: object) -> object:
    """A method of the group."""
    bound = cast(Callable[..., object], vars(group)[method])
    return bound(*arguments, **named)


def batch_of(group: WorkerGroup, method: str, *arguments: object, **named: object) -> DataProto:
    """A method of the group that gives a batch."""
    result = call(group, method, *arguments, **named)
    assert isinstance(result, DataProto)
    return result


def described(group: WorkerGroup) -> list[Described]:
    """What every rank tells of itself."""
    return cast(list[Described], call(group, "whoami"))


def mixed_batch(num_rows: int, width: int = 3) -> DataProto:
    """A column of every kind; row i has the number i."""
    numbers = torch.arange(num_rows)
    return DataProto(
        {"x": numbers[:, None].repeat(1, width), "number": numbers},
        {"name": tuple(f"row {row}" for row in range(num_rows))},
        {"step": 3},
        {"tokens": RaggedColumn.from_rows([list(range(row)) for row in range(num_rows)], torch.int64)},
    )


def watch_for_seconds(processes: WorkerProcesses, seconds: float) -> None:
    """Raises WorkerDiedError as soon as the watch does."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        processes.raise_if_dead()
        time.sleep(0.05)
