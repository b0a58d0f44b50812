"""Batches in Ray's object store: how workers store their results, and how later calls read them.

A worker's result stays on its node. The controller gets the columns with one number per row, and references to the
other columns. A worker that gets the references reads the data from the store: without a copy if the data is on the
same node, else with one transfer between the nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import ray
import torch
from ray.exceptions import RayError, RayTaskError

from rljob_trainer.batch.proto import DataProto
from rljob_trainer.batch.remote import RemoteBlock, ShardReference
from rljob_trainer.errors import DataLostError, DispatchError, TrainerError, WorkerError

LARGE_COLUMN_BYTES = 1 << 20
"""A column of at least this size becomes an object of its own, so that it can be read without the other columns. All
smaller columns of a batch are in one object."""
INLINE_ARGUMENT_BYTES = 64 << 10
"""Batches up to this size are sent with the call, larger ones are put into the store. (Ray itself sends arguments below
100 KB with the call.)"""


@dataclass
class Traffic:
    """The payload of the batches that this process has sent and received, in bytes. The controller's counts do not
    include what workers read directly from each other's shards."""

    sent_bytes: int = 0
    received_bytes: int = 0

    def take(self) -> Traffic:
        """Returns the counts since the last call, and resets them."""
        taken = Traffic(self.sent_bytes, self.received_bytes)
        self.sent_bytes = self.received_bytes = 0
        return taken


TRAFFIC = Traffic()
"""The counters of this process."""


@dataclass(frozen=True)
class RayShard(ShardReference):
    """A reference to a shard (a part of a batch) in Ray's object store."""

    reference: ray.ObjectRef

    @classmethod
    def fetch_all(cls, references: Sequence[Self]) -> list[DataProto]:
        """Waits for all shards and maps them into this process. Raises the errors of `get_batches`."""
        batches = get_batches([shard.reference for shard in references])
        TRAFFIC.received_bytes += num_batch_bytes(batches)
        return batches


@dataclass(frozen=True)
class StoredArgument:
    """A placeholder for a batch argument that is in the store. Several ranks may read the same object."""

    reference: ray.ObjectRef


def check_picklable(arguments: Sequence[object]) -> None:
    """Raises DispatchError for the first argument that cannot be pickled.

    This is checked before the first rank is called. Otherwise, the ranks that were already called would wait for the
    other ranks. Types that are known to be picklable are not tried."""
    for index, argument in enumerate(arguments):
        match argument:
            case None | bool() | int() | float() | str() | bytes() | torch.Tensor() | ray.ObjectRef():
                continue
            case np.ndarray() if argument.dtype.kind != "O":
                continue
            case DataProto() if not argument.objects:
                continue
        try:
            ray.cloudpickle.dumps(dict(argument.objects) if isinstance(argument, DataProto) else argument)
        except Exception as error:
            raise DispatchError(
                f"argument {index + 1} ({type(argument).__name__}) cannot be sent to the workers, because it cannot be "
                f"pickled ({error}); pass plain values, tensors or a DataProto instead"
            ) from None


def sent_arguments(arguments: Sequence[object]) -> tuple[object, ...]:
    """Returns the arguments in the form in which they are sent. Large batches are put into the store, once for all
    ranks that read them."""
    TRAFFIC.sent_bytes += num_batch_bytes(arguments)
    return tuple(
        StoredArgument(ray.put(argument))
        if isinstance(argument, DataProto) and argument.num_bytes() > INLINE_ARGUMENT_BYTES
        else argument
        for argument in arguments
    )


def num_batch_bytes(values: Sequence[object]) -> int:
    """Returns the payload of the batches among these values, in bytes."""
    return sum(value.num_bytes() for value in values if isinstance(value, DataProto))


def get_batches(references: Sequence[ray.ObjectRef]) -> list[DataProto]:
    """Reads the batches of these references.

    Raises DataLostError if the process or node that held a batch has died. If the call that should have computed a
    batch has failed, raises the call's TrainerError, or a WorkerError for any other error."""
    try:
        return [_batch(value) for value in ray.get(list(references))]
    except RayTaskError as error:
        if isinstance(error.cause, TrainerError):
            raise error.cause from None
        raise WorkerError(f"the call that should have computed this data failed: {error.cause!r}\n{error}") from None
    except RayError as error:
        text = " ".join(str(error).split())
        raise DataLostError(
            f"data of this step is lost, because the process or node that held it died ({text:.300})"
        ) from error


def stored(batch: DataProto) -> DataProto:
    """Puts the columns of a batch into this node's object store, except those with one number per row. Returns the
    batch with references to the stored columns. Columns that already are references stay as they are."""
    one_number_per_row = [name for name, column in batch.tensors.items() if column.dim() == 1]
    to_store = [name for name in batch.column_names() if name not in one_number_per_row and not batch.is_remote(name)]
    large = [name for name in to_store if batch.column_bytes(name) >= LARGE_COLUMN_BYTES]
    small = [name for name in to_store if name not in large]
    columns_of_objects = [*([small] if small else []), *([name] for name in large)]
    shards = [RayShard(ray.put(batch.only(names))) for names in columns_of_objects]
    TRAFFIC.sent_bytes += batch.only(to_store).num_bytes()
    return batch.without(to_store).with_remote(
        [
            RemoteBlock.of_shard(shard, names, len(batch))
            for shard, names in zip(shards, columns_of_objects, strict=True)
        ]
    )


def _batch(value: object) -> DataProto:
    assert isinstance(value, DataProto)
    return value
