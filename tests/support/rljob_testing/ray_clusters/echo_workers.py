"""Workers that compute almost nothing, to observe calls and data, and groups of them on the Ray cluster to which this
process is connected."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import cast

import torch

from rljob_testing.settings import inherited_python_path
from rljob_trainer.batch.proto import DataProto
from rljob_trainer.batch.ragged import RaggedColumn
from rljob_trainer.dispatch.mesh import MeshPosition, mesh_position
from rljob_trainer.dispatch.modes import Dispatch, Execute, register_dispatch_mode
from rljob_trainer.dispatch.register import register
from rljob_trainer.dispatch.split_gather import gather_list, split_one_to_all
from rljob_trainer.dispatch.worker import Worker, WorkerContext
from rljob_trainer.errors import DataError
from rljob_trainer.groups.devices import CUDA_VARIABLE
from rljob_trainer.groups.fused_worker import RoleSpec
from rljob_trainer.groups.worker_group import WorkerGroup
from rljob_trainer.groups.worker_processes import BuildSettings, WorkerProcesses, start_processes
from rljob_trainer.observability.metrics import Metrics
from rljob_trainer.pools.resource_pool import PoolSettings, ResourcePool

TENSOR_PARALLEL_MESH = "tp"
TO_ALL_AGAIN = "TO_ALL_AGAIN"

register_dispatch_mode(TO_ALL_AGAIN, split_one_to_all, gather_list)

CLOSED_BY_PEER = "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.1]:1234"


class EchoWorker(Worker):
    """A worker whose methods return what they receive. In the mesh `tp`, pairs of ranks share a data rank."""

    def __init__(self, context: WorkerContext, name: str = "echo", others: tuple[str, ...] = ()) -> None:
        super().__init__(context)
        self.name = name
        self.others = others

    def mesh_position(self, mesh: str) -> MeshPosition:
        """See Worker.mesh_position."""
        if mesh == TENSOR_PARALLEL_MESH:
            return mesh_position(
                self.context.rank, {"dp": self.context.world_size // 2, "tp": 2}, collected_at={"tp": 1}
            )
        return super().mesh_position(mesh)

    @register(Dispatch.ONE_TO_ALL)
    def empty(self) -> None:
        """Does nothing."""

    @register(Dispatch.ONE_TO_ALL)
    def whoami(self) -> tuple[str, int, int, tuple[str, ...]]:
        """Returns name, rank, process id, and the roles that were built before."""
        return self.name, self.context.rank, os.getpid(), self.others

    @register(Dispatch.ONE_TO_ALL)
    def devices(self) -> tuple[str | None, int]:
        """Returns the list of GPUs that the process sees, None for all, and the index of its own."""
        return os.environ.get(CUDA_VARIABLE), self.context.device_number

    @register(TO_ALL_AGAIN, execute=Execute.RANK_ZERO)
    def only_first(self, value: int) -> int:
        """Returns `value` plus the rank; runs on rank 0 only."""
        return value + self.context.rank

    @register(Dispatch.ONE_TO_ALL)
    async def later(self, value: int) -> int:
        """Returns `value` plus the rank after a short pause."""
        await asyncio.sleep(0.01)
        return value + self.context.rank

    @register(Dispatch.DP_COMPUTE_PROTO)
    def echo(self, batch: DataProto) -> DataProto:
        """Returns its share of the batch."""
        return batch

    @register(Dispatch.DP_COMPUTE_PROTO)
    def add(self, batch: DataProto, number: float = 1.0) -> DataProto:
        """Adds `number` to every tensor column."""
        return DataProto({name: column + number for name, column in batch.tensors.items()}, meta=batch.meta)

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def add_later(self, batch: DataProto, seconds: float = 0.0) -> DataProto:
        """Adds 1 after this number of seconds."""
        time.sleep(seconds)
        return self.add(batch)

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def add_when_file_exists(self, batch: DataProto, file: str) -> DataProto:
        """Creates the file `<file>-rank-<rank>`, and adds 1 as soon as `file` exists."""
        Path(f"{file}-rank-{self.context.rank}").touch()
        while not os.access(file, os.F_OK):  # not os.path.exists: a stack must show this method as its innermost frame
            time.sleep(0.05)
        return self.add(batch)

    @register(Dispatch.DP_COMPUTE_PROTO, mesh=TENSOR_PARALLEL_MESH)
    def ranks(self, batch: DataProto) -> DataProto:
        """Adds to every row the rank whose result was used for it."""
        return DataProto({"rank": torch.full((len(batch), 2), self.context.rank), "x": batch["x"]})

    @register(Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)
    def apply(self, function: Callable[[DataProto], DataProto], batch: DataProto) -> DataProto:
        """Applies the function to its share of the batch."""
        return function(batch)

    @register(Dispatch.DP_COMPUTE_METRIC)
    def sums(self, batch: DataProto) -> Metrics:
        """The sum of every tensor column."""
        return {f"{name}_sum": float(column.double().sum()) for name, column in batch.tensors.items()}

    @register(Dispatch.DP_COMPUTE_PROTO)
    def change_in_place(self, batch: DataProto) -> DataProto:
        """Changes its argument in place, which workers must not do."""
        batch["x"].add_(1)
        return batch

    @register(Dispatch.DP_COMPUTE_PROTO)
    def uneven(self, batch: DataProto) -> DataProto:
        """Rank r returns r + 1 rows."""
        return batch.slice(0, self.context.rank + 1)

    @register(Dispatch.ONE_TO_ALL)
    def fail(self, rank: int, kind: str) -> None:
        """Fails on one rank. The other ranks wait for it, as in a collective, or report a closed connection."""
        if kind == "peers first":
            time.sleep(0.5 if self.context.rank == rank else 0)
            raise ZeroDivisionError("the cause") if self.context.rank == rank else RuntimeError(CLOSED_BY_PEER)
        if kind == "a death that peers report with messages of their own":
            if self.context.rank != rank:
                raise RuntimeError("the remote process closed the stream")
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        if self.context.rank != rank:
            time.sleep(1)
        elif kind == "own":
            raise DataError("a column is missing")
        elif kind == "foreign":
            raise ZeroDivisionError("somebody divided by nothing")
        elif kind == "exit":
            sys.exit(7)
        elif kind == "memory":
            self.hoard = b"x" * 2**30
        else:
            os.kill(os.getpid(), int(kind))


def make_echo(name: str, context: WorkerContext, others: Mapping[str, Worker]) -> EchoWorker:
    """The factory of an EchoWorker role."""
    return EchoWorker(context, name, tuple(others))


PYTHON_PATH = os.pathsep.join([str(Path(__file__).parents[2]), *inherited_python_path()])
Described = tuple[str, int, int, tuple[str, ...]]
"""The result of `EchoWorker.whoami`."""
ROLES = [RoleSpec(name, EchoWorker, partial(make_echo, name)) for name in ("first", "second")]


@contextmanager
def echo_processes(
    num_workers: int,
    name: str | None = None,
    roles: Sequence[RoleSpec] = ROLES,
    *,
    use_gpu: bool = False,
    sees_all_gpus: bool = False,
) -> Iterator[WorkerProcesses]:
    """Worker processes with these roles, by default `first` and `second`. They end with the context. With `use_gpu`
    each has one of the GPUs that the cluster declares, and does not use it. `sees_all_gpus`: see RayWorker."""
    pool = ResourcePool(PoolSettings("main", 1, num_workers, use_gpu, 0.1, 60, is_detached=name is not None))
    try:
        environment = {"PYTHONPATH": PYTHON_PATH, "OMP_NUM_THREADS": "1"}
        processes = start_processes(pool, environment, name, sees_all_gpus=sees_all_gpus)
        try:
            processes.build(pool.slots(), BuildSettings("cpu", 1, None), roles)
            yield processes
        finally:
            processes.close()
    finally:
        pool.release()


def call(group: WorkerGroup, method: str, *arguments: object, **named: object) -> object:
    """Calls a method of the group."""
    bound = cast(Callable[..., object], vars(group)[method])
    return bound(*arguments, **named)


def call_for_batch(group: WorkerGroup, method: str, *arguments: object, **named: object) -> DataProto:
    """Calls a method of the group that returns a batch."""
    result = call(group, method, *arguments, **named)
    assert isinstance(result, DataProto)
    return result


def describe_ranks(group: WorkerGroup) -> list[Described]:
    """The result of `whoami` on every rank."""
    return cast(list[Described], call(group, "whoami"))


def mixed_batch(num_rows: int, width: int = 3) -> DataProto:
    """A batch with a column of every kind; row i holds the number i."""
    numbers = torch.arange(num_rows)
    return DataProto(
        {"x": numbers[:, None].repeat(1, width), "number": numbers},
        {"name": tuple(f"row {row}" for row in range(num_rows))},
        {"step": 3},
        {"tokens": RaggedColumn.from_rows([list(range(row)) for row in range(num_rows)], torch.int64)},
    )


def wait_until_rank_waits(file: Path, rank: int, seconds: float = 120) -> None:
    """Returns when this rank is inside `add_when_file_exists` for this file. Ray names the task earlier: while the
    worker still reads its arguments."""
    deadline = time.monotonic() + seconds
    while not Path(f"{file}-rank-{rank}").exists():
        assert time.monotonic() < deadline, f"rank {rank} did not begin add_when_file_exists within {seconds:g} s"
        time.sleep(0.05)


def raise_if_dead_within(processes: WorkerProcesses, seconds: float) -> None:
    """Raises WorkerDiedError as soon as the processes report a dead worker."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        processes.raise_if_dead()
        time.sleep(0.05)
