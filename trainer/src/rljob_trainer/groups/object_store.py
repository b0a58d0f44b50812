"""Batches in Ray's object store: how workers store their results, and how later calls read them.

A worker's result stays on its node. The controller gets the columns with one number per row, and references to the
others. A worker that gets the references reads the data from the store: without a copy on the same node, with one
transfer from another node.
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
"""Columns of at least this size become separate objects, so that reading one does not transfer the others."""
INLINE_ARGUMENT_BYTES = 64 << 10
"""Batches up to this size are sent with the call; Ray itself inlines arguments below 100 KB."""


@dataclass
class Traffic:
    """Payload of the batches that this process has sent and received, in bytes. In the controller's process it excludes
    what workers read directly from each other's shards."""

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
    """A shard in Ray's object store."""

    reference: ray.ObjectRef

    @classmethod
    def fetch_all(cls, references: Sequence[Self]) -> list[DataProto]:
        """Waits for all shards and maps them into this process. Raises DataLostError."""
        batches = get_batches([shard.reference for shard in references])
        TRAFFIC.received_bytes += num_batch_bytes(batches)
        return batches


@dataclass(frozen=True)
class StoredArgument:
    """A placeholder for a batch argument that is in the store; several ranks read the same one."""

    reference: ray.ObjectRef


def check_picklable(arguments: Sequence[object]) -> None:
    """Raises DispatchError for the first argument that cannot be pickled.

    This is checked before the first rank is called, because ranks that were already called would wait for the others.
    Types that are known to be picklable are skipped."""
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
                f"pickled: {error}"
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
    """Reads the batches of these references. Raises DataLostError if the process or node that held one has died, and
    the error of the call that should have computed one."""
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
    batch with references. Columns that already are references stay as they are."""
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
