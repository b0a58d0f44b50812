"""Measures the device memory of tensors. Also releases the freed memory that is cached after one engine of a process
(training or rollout) has run, so that the process's other engine can use it.

Tensors may share memory, so storages are counted, not tensors.
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
    """The storages of the tensors, each once, without empty storages; for a DTensor the storage of this rank's part."""
    # Under no_grad `to_local` creates no new tensor, which matters for the thousands of tensors of a model.
    parts = (each.to_local() if isinstance(each, DTensor) else each for each in tensors)
    found = {storage._cdata: storage for storage in (each.untyped_storage() for each in parts)}
    return [storage for storage in found.values() if storage.nbytes()]


def num_storage_bytes(tensors: Iterable[Tensor]) -> int:
    """The size in bytes of the tensors' storages. A storage that several tensors share counts once."""
    return sum(storage.nbytes() for storage in distinct_storages(tensors))


@torch.no_grad()
def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, or the tensor itself; detached from the graph."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


class DeviceMemory:
    """The device memory of one process. Freed memory is cached: on a GPU by torch's allocator, on CPUs by the C
    library."""

    def __init__(self, context: WorkerContext) -> None:
        """Collective over all ranks."""
        self.device_type = context.device_type
        self.node_peers = _node_peers(context)
        self.num_node_ranks = 1 if self.node_peers is None else dist.get_world_size(self.node_peers)

    def return_free_memory(self) -> None:
        """Releases the freed memory of a GPU that torch's allocator caches, so that the other engine can use it. Does
        nothing on CPUs."""
        if self.device_type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()

    def give_back_after_loading(self) -> None:
        """Releases the memory that was only needed while models were loaded; on CPUs, too."""
        self.return_free_memory()
        if self.device_type == "cpu":
            HOST_MEMORY.return_free_memory()

    def make_room_for_cache(self, num_bytes: int) -> None:
        """Collective over the ranks of a node. Each rank calls it before it wakes its KV cache of `num_bytes`."""
        if self.node_peers is not None:
            # The ranks of a node share its memory. So all of them must have freed their buffers of the weight sync
            # before one wakes its cache.
            dist.barrier(self.node_peers)
        if self.device_type == "cpu":
            # The C library keeps the memory that updates have freed, but vLLM allocates the cache directly from the
            # system.
            HOST_MEMORY.return_free_memory_if_below(self.num_node_ranks * num_bytes)


def _node_peers(context: WorkerContext) -> dist.ProcessGroup | None:
    """Collective over all ranks. The process group of the ranks on this rank's node; None if no other rank runs
    there."""
    nodes = [0] * context.world_size
    dist.all_gather_object(nodes, context.node_rank)
    found: dist.ProcessGroup | None = None
    for node in sorted(set(nodes)):
        ranks = [rank for rank, each in enumerate(nodes) if each == node]
        # torch requires that all ranks create all groups.
        group = dist.new_group(ranks, backend="gloo") if len(ranks) > 1 else None
        found = group if node == context.node_rank else found
    return found
