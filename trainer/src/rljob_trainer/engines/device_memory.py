"""What tensors take of a device, and what two engines of one process leave each other of it.

Memory that tensors share is counted by storage, not by tensor.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, UntypedStorage
from torch.distributed.tensor import DTensor

from rljob_trainer.dispatch.worker import WorkerContext
from rljob_trainer.host_memory import HOST_MEMORY


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


class DeviceMemory:
    """Of one process. On a GPU it is torch's allocator that holds memory in reserve, on CPUs the C library's."""

    def __init__(self, context: WorkerContext) -> None:
        """Collective."""
        self.device_type = context.device_type
        self.node_peers = _node_peers(context)
        self.num_node_ranks = 1 if self.node_peers is None else dist.get_world_size(self.node_peers)

    def give_back(self) -> None:
        """Returns what torch's allocator holds in reserve, so that the other engine can have it."""
        if self.device_type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()

    def give_back_after_loading(self) -> None:
        """Likewise, and what loading has left on CPUs."""
        self.give_back()
        if self.device_type == "cpu":
            HOST_MEMORY.give_back()

    def make_room_for_cache(self, num_bytes: int) -> None:
        """Collective over a node, before each of its ranks wakes a KV cache of so many bytes."""
        if self.node_peers is not None:
            # The host's memory is shared: no cache is woken while a peer still holds buckets.
            dist.barrier(self.node_peers)
        if self.device_type == "cpu":
            # The cache is no tensor that finds room in what updates have left.
            HOST_MEMORY.make_room(self.num_node_ranks * num_bytes)


def _node_peers(context: WorkerContext) -> dist.ProcessGroup | None:
    """Collective. The ranks on this rank's node; None where it is alone there."""
    nodes = [0] * context.world_size
    dist.all_gather_object(nodes, context.node_rank)
    found: dist.ProcessGroup | None = None
    for node in sorted(set(nodes)):
        ranks = [rank for rank, each in enumerate(nodes) if each == node]
        # All ranks make all groups.
        group = dist.new_group(ranks, backend="gloo") if len(ranks) > 1 else None
        found = group if node == context.node_rank else found
    return found
