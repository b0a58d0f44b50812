"""Sharded tensors as plain blocks, for saving and loading.

A block is an axis-aligned box of the whole tensor. Every FSDP2 and tensor-parallel layout consists of such blocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from rljob_trainer.checkpoints.errors import CheckpointError


@dataclass(frozen=True)
class ShardedTensor:
    """One rank's block of a tensor. Only one rank provides a replicated tensor."""

    name: str
    local: torch.Tensor
    """The block; may be empty, on any device."""
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    """Position of the block's first element in the whole tensor."""


def sharded_tensors_from_dtensors(
    named: Iterable[tuple[str, torch.Tensor | DTensor]], rank: int
) -> list[ShardedTensor]:
    """Returns the blocks that this rank has to store, without copying them.

    If a DTensor is replicated over a dimension of its mesh, only the first ranks of that dimension store it. Plain
    tensors (optimizer step counts, buffers) are assumed to be equal on all ranks; rank 0 stores them.
    """
    blocks = []
    for name, tensor in named:
        if isinstance(tensor, DTensor):
            if _is_first_replica(tensor):
                blocks.append(local_block(name, tensor))
        elif rank == 0:
            blocks.append(local_block(name, tensor))
    return blocks


def local_block(name: str, tensor: torch.Tensor | DTensor) -> ShardedTensor:
    """Returns the block of the whole tensor that this process has; it shares memory with the tensor.

    Raises CheckpointError for placements that are not boxes (partial sums, strided shards).
    """
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return ShardedTensor(name, tensor.detach(), shape, (0,) * len(shape))
    for placement in tensor.placements:
        if type(placement) not in (Shard, Replicate):
            raise CheckpointError(f"tensor {name}: placement {placement} cannot be stored; shard or replicate it")
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return ShardedTensor(name, tensor.to_local().detach(), shape, tuple(offsets))


def _is_first_replica(tensor: DTensor) -> bool:
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return False
    placements = zip(tensor.placements, coordinate, strict=True)
    return all(position == 0 for placement, position in placements if isinstance(placement, Replicate))
