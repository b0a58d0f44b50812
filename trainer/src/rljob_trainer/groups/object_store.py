"""Batches in Ray's object store: how a worker keeps what it made, and how a share finds its data again.

What a worker returns stays where it was made. The controller gets columns with one number per row, and a block of
references to the rest; whoever is given the references reads the data from the store: on the same node without a copy,
from another node by one transfer.
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
"""Columns from here on are objects of their own, so that whoever needs one does not move the others."""
INLINE_ARGUMENT_BYTES = 64 << 10
"""Batches below travel with the call; Ray itself inlines arguments below 100 KB."""


@dataclass
class Traffic:
    """Payload of the batches that this process has sent and received, in bytes. In the controller's process that is
    what went through the controller; what workers read from each other's shards is not in it."""

    sent_bytes: int = 0
    received_bytes: int = 0

    def take(self) -> Traffic:
        """What was counted since the last time."""
        taken = Traffic(self.sent_bytes, self.received_bytes)
        self.sent_bytes = self.received_bytes = 0
        return taken


TRAFFIC = Traffic()
"""Of this process."""


@dataclass(frozen=True)
class RayShard(ShardReference):
    """A shard in Ray's object store."""

    reference: ray.ObjectRef

    @classmethod
    def fetch_all(cls, references: Sequence[Self]) -> list[DataProto]:
        """Waits for all and maps them into this process. Raises DataLostError."""
        batches = get_batches([shard.reference for shard in references])
        TRAFFIC.received_bytes += num_batch_bytes(batches)
        return batches


@dataclass(frozen=True)
class StoredArgument:
    """Stands for a batch among the arguments of a call; several ranks read the same one."""

    reference: ray.ObjectRef


def check_travelling(arguments: Sequence[object]) -> None:
    """Raises DispatchError for the first of the arguments that cannot be pickled.

    Looked at are those of which it is not known, before the first rank is called: the others would wait for it."""
    for place, argument in enumerate(arguments):
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
                f"argument {place + 1} ({type(argument).__name__}) cannot travel to the workers: {error}"
            ) from None


def sent_arguments(arguments: Sequence[object]) -> tuple[object, ...]:
    """The arguments as they travel: batches that are large lie in the store, once for all ranks that get them."""
    TRAFFIC.sent_bytes += num_batch_bytes(arguments)
    return tuple(
        StoredArgument(ray.put(argument))
        if isinstance(argument, DataProto) and argument.num_bytes() > INLINE_ARGUMENT_BYTES
        else argument
        for argument in arguments
    )


def num_batch_bytes(values: Sequence[object]) -> int:
    """Payload of the batches among these values."""
    return sum(value.num_bytes() for value in values if isinstance(value, DataProto))


def get_batches(references: Sequence[ray.ObjectRef]) -> list[DataProto]:
    """The batches of these references. Raises DataLostError for what is gone with the process or node that held it,
    and what the call raised that should have made one."""
    try:
        return [_batch(value) for value in ray.get(list(references))]
    except RayTaskError as error:
        if isinstance(error.cause, TrainerError):
            raise error.cause from None
        raise WorkerError(f"the call that should have made this data failed: {error.cause!r}\n{error}") from None
    except RayError as error:
        text = " ".join(str(error).split())
        raise DataLostError(f"data of this step is lost with the process or node that held it ({text:.300})") from error


def stored(batch: DataProto) -> DataProto:
    """The same batch with everything but its one number per row put into the store of this node.

    Columns that are references already stay what they are."""
    light = [name for name, column in batch.tensors.items() if column.dim() == 1]
    heavy = [name for name in batch.column_names() if name not in light and not batch.is_remote(name)]
    kept = batch.without(heavy)
    large = [name for name in heavy if batch.column_bytes(name) >= LARGE_COLUMN_BYTES]
    small = [name for name in heavy if name not in large]
    groups = [*([small] if small else []), *([name] for name in large)]
    shards = [RayShard(ray.put(batch.only(group))) for group in groups]
    TRAFFIC.sent_bytes += batch.only(heavy).num_bytes()
    return kept.with_remote(
        [RemoteBlock.of_shard(shard, group, len(batch)) for shard, group in zip(shards, groups, strict=True)]
    )


def _batch(value: object) -> DataProto:
    assert isinstance(value, DataProto)
    return value
