"""Joins and leaves the process group of all ranks of a worker group, and exchanges tensors in it."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from rljob_api.constants import ENV_DEVICE
from rljob_trainer.dispatch.worker import WorkerContext
from rljob_trainer.errors import ResourceError
from rljob_trainer.host_memory import HOST_MEMORY
from rljob_trainer.settings import export_rank

COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""A collective that waits longer than this for another rank fails."""


def join_process_group(context: WorkerContext) -> None:
    """Collective over all ranks. Joins the default process group: gloo on CPUs; on GPUs NCCL, and gloo for CPU tensors.
    Also sets the rank's environment variables (RANK, WORLD_SIZE, ...), the number of threads, and the current GPU.

    Raises ResourceError if a GPU was assigned but torch does not find it."""
    # Exported as LOCAL_RANK, which vLLM uses as the number of the device among the visible ones.
    device_number = context.device_number if context.device_type == "cuda" else context.local_rank
    export_rank(context.rank, context.world_size, device_number, context.master_address, context.master_port)
    torch.set_num_threads(context.num_threads)
    if context.device_type == "cuda":
        if not torch.cuda.is_available():
            raise ResourceError(
                f"worker rank {context.rank}: torch finds no usable GPU on this node; check the GPU driver and that "
                f"the image's torch was built for this GPU, or set {ENV_DEVICE}=cpu if GPUs are declared but do not "
                "exist"
            )
        if context.device_number >= torch.cuda.device_count():
            raise _missing_gpu(context, f"torch finds {torch.cuda.device_count()}")
        try:
            # The process may see its neighbours' GPUs, too: without this, memory would be allocated on GPU 0.
            torch.cuda.set_device(context.device)
        except RuntimeError as error:
            # With MIG devices torch counts whole GPUs, but CUDA can use only one MIG device in a process.
            raise _missing_gpu(context, f"it cannot be used ({str(error).splitlines()[0]})") from error
    else:
        HOST_MEMORY.keep_freed()
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if context.device_type == "cuda" else "gloo",
        rank=context.rank,
        world_size=context.world_size,
        timeout=COLLECTIVE_TIMEOUT,
    )


def _missing_gpu(context: WorkerContext, fault: str) -> ResourceError:
    return ResourceError(
        f"worker rank {context.rank}: Ray has assigned GPU {context.device_number} (counted from 0), but {fault}; "
        "declare to Ray as many GPUs as the node has, and with MIG devices set gpusPerNode: 1 and "
        "roles.rollout.tensorParallel: 1"
    )


def all_gather_flat(gathered: Tensor, own_part: Tensor, group: dist.ProcessGroup | None) -> None:
    """Collective over the group. Fills `gathered` with `own_part` of every rank, in the order of the ranks."""
    # torch 2.11 has `all_gather_into_tensor`; later versions deprecate that name.
    has_new_name = "all_gather_single" in vars(dist)
    gather = dist.all_gather_single if has_new_name else dist.all_gather_into_tensor
    gather(gathered, own_part, group=group)


def group_of_model_ranks(context: WorkerContext, size: int, timeout: timedelta) -> dist.ProcessGroup | None:
    """Collective over all ranks. Returns a new gloo group of the ranks that share a copy of a model with this one:
    `size` consecutive ranks. None if `size` is 1. Other threads may use other groups at the same time."""
    if size == 1:
        return None
    found: dist.ProcessGroup | None = None
    for first in range(0, context.world_size, size):
        # All ranks must create all groups, in the same order.
        group = dist.new_group(list(range(first, first + size)), timeout=timeout, backend="gloo")
        if first <= context.rank < first + size:
            found = group
    return found


def max_over_all_ranks(value: float, device: torch.device) -> float:
    """Collective over all ranks. The maximum of their values."""
    values = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return float(values.item())


def leave_process_group() -> None:
    """Destroys the process group if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
