"""Memory that tensors share: counted by storage, not by tensor."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, UntypedStorage
from torch.distributed.tensor import DTensor


@torch.no_grad()
def distinct_storages(tensors: Iterable[Tensor]) -> list[UntypedStorage]:
    """Each storage once that holds anything; of a DTensor that of this rank's part."""
    # Without gradients `to_local` makes no new tensor: there are thousands of them in a model.
    parts = (each.to_local() if isinstance(each, DTensor) else each for each in tensors)
    found = {storage._cdata: storage for storage in (each.untyped_storage() for each in parts)}
    return [storage for storage in found.values() if storage.nbytes()]


def num_storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Of what has memory: shared storages count once, emptied ones not at all."""
    return sum(storage.nbytes() for storage in distinct_storages(tensors))


@torch.no_grad()
def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, any other tensor as it is; without its history."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
