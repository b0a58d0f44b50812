"""Workers that do what workers must not do, or rarely do, to test how calls handle it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from ray.exceptions import GetTimeoutError

from rljob_trainer.batch.proto import DataProto
from rljob_trainer.dispatch.mesh import MeshPosition
from rljob_trainer.dispatch.modes import Dispatch, Execute, register_dispatch_mode
from rljob_trainer.dispatch.register import register
from rljob_trainer.dispatch.split_gather import Arguments, SplitCall, gather_batches, split_batches
from rljob_trainer.dispatch.worker import Worker, WorkerContext
from rljob_trainer.errors import AlgorithmFunctionError, DataError, TrainerError

LAST_SHARE_FIRST = "LAST_SHARE_FIRST"


def split_backwards(positions: Sequence[MeshPosition], arguments: Arguments) -> SplitCall:
    """A dispatch mode that gives the last share to the first rank."""
    call = split_batches(positions, arguments)
    return SplitCall(call.shares[::-1], call.share_of_rank, call.num_padded_rows)


register_dispatch_mode(LAST_SHARE_FIRST, split_backwards, gather_batches, by_data_rank=True, keeps_data=True)


class TwoArgumentsError(Exception):
    """Cannot be unpickled: pickle calls the class with the message only."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


class TwoArgumentsTrainerError(TrainerError):
    """An error of our hierarchy that cannot be unpickled."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


class FaultyWorker(Worker):
    """A worker with misbehaving methods."""

    def mesh_position(self, mesh: str) -> MeshPosition:
        """Raises DataError for the mesh `unknown`."""
        if mesh == "unknown":
            raise DataError("there is no such mesh")
        return super().mesh_position(mesh)

    @register(blocking=False)
    def make(self, batch: DataProto) -> DataProto:
        """Returns its rank in a column of every kind."""
        rank = torch.full((len(batch),), self.context.rank)
        return DataProto(
            {
                "light": rank,
                "graph": torch.ones(len(batch), requires_grad=True) * 2,
                "heavy": rank[:, None].repeat(1, 4),
            },
            {"list": tuple([0] for _ in range(len(batch))), "text": ("a",) * len(batch)},
        )

    @register(blocking=False)
    def make_when_file_exists(self, batch: DataProto, file: str) -> DataProto:
        """Does the same as soon as this file exists."""
        _wait_for(file)
        return self.make(batch)

    @register(blocking=False)
    def make_some(self, batch: DataProto) -> DataProto:
        """Returns only the first r rows on rank r."""
        return batch.slice(0, self.context.rank)

    @register(blocking=False)
    def fail(self, batch: DataProto) -> DataProto:
        """Always raises DataError."""
        raise DataError(f"failed on {self.context.rank} with {len(batch)} rows")

    @register()
    def read(self, batch: DataProto) -> DataProto:
        """Returns what it read from its argument: per row, the light column, the length of the list, and whether
        gradients are required."""
        lists = [float(len(value)) for value in batch.object_column("list") if isinstance(value, list)]
        return DataProto(
            {
                "light": batch["light"].double(),
                "length": torch.tensor(lists),
                "needs_gradient": torch.full((len(batch),), batch["graph"].requires_grad),
            }
        )

    @register()
    def append(self, batch: DataProto) -> DataProto:
        """Changes the lists of its argument in place."""
        for value in batch.object_column("list"):
            assert isinstance(value, list)
            value.append(1)
        return batch.only(["light"])

    @register()
    def add_to_light(self, batch: DataProto) -> DataProto:
        """Changes a light column of its argument in place."""
        batch["light"].add_(1000)
        return batch.only(["light"])

    @register()
    def both(self, first: DataProto, second: DataProto) -> DataProto:
        """Returns the number of rows of each argument."""
        return DataProto({"rows": torch.tensor([len(first), len(second)])})

    @register(LAST_SHARE_FIRST)
    def backwards(self, batch: DataProto) -> DataProto:
        """Returns the light column of its share."""
        return batch.only(["light"])

    @register(execute=Execute.RANK_ZERO)
    def first_share(self, batch: DataProto) -> DataProto:
        """Returns the share of rank 0."""
        return batch

    @register(mesh="unknown")
    def nowhere(self, batch: DataProto) -> DataProto:
        """Cannot be called, because its mesh does not exist."""
        return batch

    @register(Dispatch.ONE_TO_ALL)
    def sum_over_ranks(self, value: float) -> float:
        """Sums the value over all ranks in a collective."""
        total = torch.tensor(value)
        dist.all_reduce(total)
        return float(total)

    @register(Dispatch.ALL_TO_ALL)
    def barrier(self, value: object) -> object:
        """Returns the value after a barrier over all ranks."""
        dist.barrier()
        return value

    @register(Dispatch.ONE_TO_ALL)
    def fail_with(self, how: str) -> object:
        """Fails on rank 0 in one of several ways."""
        if self.context.rank:
            return None
        match how:
            case "timeout":
                raise GetTimeoutError("somebody else's")
            case "two arguments":
                raise TwoArgumentsError("this", "that")
            case "ours with two arguments":
                raise TwoArgumentsTrainerError("this", "that")
            case "lock":
                error = ValueError("holds a lock")
                error.lock = threading.Lock()  # type: ignore[attr-defined]
                raise error
            case "long":
                raise ValueError("x" * 5_000_000)
            case "device memory":
                raise torch.OutOfMemoryError("CUDA out of memory")
            case "device memory in a library":
                raise RuntimeError("cannot start") from torch.OutOfMemoryError("CUDA out of memory")
            case "device memory in a function":
                raise AlgorithmFunctionError("my loss failed") from torch.OutOfMemoryError("CUDA out of memory")
            case "host memory":
                raise MemoryError
            case "generator":
                return (number for number in range(3))
            case "result":
                return Unreadable()
        raise AssertionError(how)

    @register(Dispatch.ONE_TO_ALL)
    def wait(self, begun: str, end: str) -> None:
        """Creates the file `begun` and waits until `end` exists."""
        Path(begun).touch()
        _wait_for(end)

    @register(Dispatch.ONE_TO_ALL)
    def rank(self) -> int:
        """Returns the rank of this worker."""
        return self.context.rank


def _wait_for(file: str) -> None:
    while not Path(file).exists():
        time.sleep(0.02)


class Unreadable:
    """Can be pickled, but not unpickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return _unread, ()


def _unread() -> Iterator[None]:
    raise OSError("cannot be read here")


def make_faulty(context: WorkerContext, _others: Mapping[str, Worker]) -> FaultyWorker:
    """The factory of the role."""
    return FaultyWorker(context)
