"""Memory that tensors share: counted by storage, not by tensor."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, UntypedStorage
from torch.distributed.tensor import DTensor


def distinct_storages(tensors: Iterable[Tensor]) -> list[UntypedStorage]:
    """Each storage once that holds anything; of a DTensor that of this rank's part."""
    found = {storage._cdata: storage for storage in (local_part(each).untyped_storage() for each in tensors)}
    return [storage for storage in found.values() if storage.nbytes()]


def num_storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Of what has memory: shared storages count once, emptied ones not at all."""
    return sum(storage.nbytes() for storage in distinct_storages(tensors))


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, any other tensor as it is; without its history."""
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached
