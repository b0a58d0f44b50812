"""Measures the memory of a training engine's state, and checks before the first step that the optimizer state, which
the first update creates, will fit."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from rljob_trainer.engines.device_memory import local_part, num_storage_bytes
from rljob_trainer.engines.train.offload import NO_OFFLOAD, OffloadSettings, moments_of
from rljob_trainer.engines.train.settings import TrainEngineSettings
from rljob_trainer.errors import DeviceMemoryError, HostMemoryError
from rljob_trainer.host_memory import HOST_MEMORY
from rljob_trainer.observability.memory import MEBIBYTE

GIBIBYTE = 1024 * MEBIBYTE


class EngineMemory:
    """The device memory of an engine's state, in bytes."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """The model's parameters must be shards now, not gathered."""
        self._model = model
        self._optimizer = optimizer
        self._shards = list(model.parameters())
        self._units = [module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)]

    @property
    def parameters(self) -> int:
        """The shards of the parameters."""
        return num_storage_bytes(self._shards)

    @property
    def gathered(self) -> int:
        """The parameters that are gathered (unsharded) now. After a forward pass without backward, these are the
        parameters of the root, but not those of the layers."""
        return num_storage_bytes(each for each in self._model.parameters() if not isinstance(each, DTensor))

    @property
    def gradients(self) -> int:
        """The shards of gradients, and the gradients that are not yet summed over ranks."""
        return num_storage_bytes(self._gradients())

    @property
    def moments(self) -> int:
        """The optimizer's moments."""
        return num_storage_bytes(moments_of(self._optimizer))

    @property
    def moments_to_come(self) -> int:
        """The moments that the first update will create."""
        if self._optimizer is None:
            return 0
        missing = [each for each in self._shards if each.requires_grad and each not in self._optimizer.state]
        return 2 * sum(shard.numel() * shard.itemsize for shard in map(local_part, missing))

    def _gradients(self) -> Iterator[Tensor]:
        yield from (shard.grad for shard in self._shards if shard.grad is not None)
        # Private attributes of FSDP2 (torch 2.11 to 2.13) with gradients that are not yet summed over shards or over
        # replicas. If they are renamed, the test of deferred reduction's memory fails.
        for unit in self._units:
            group = unit._fsdp_param_group
            if group is None:
                continue
            if group._partial_reduce_output is not None:
                yield group._partial_reduce_output
            for parameter in group.fsdp_params:
                if parameter.unsharded_accumulated_grad is not None:
                    yield parameter.unsharded_accumulated_grad
                elif hasattr(parameter, "_unsharded_param") and parameter._unsharded_param.grad is not None:
                    yield parameter._unsharded_param.grad


def check_host_memory(settings: TrainEngineSettings, memory: EngineMemory) -> None:
    """Collective. Raises ResourceError on all ranks if a machine has too little memory for the state that its ranks
    offload. On CPUs offloaded parameters need no additional memory."""
    offload = settings.offload
    if offload == NO_OFFLOAD:
        return
    moments = memory.moments_to_come
    needed = {
        "parameters": memory.parameters if offload.parameters and settings.device.type == "cuda" else 0,
        # A gradient has the size of one of the two moments.
        "gradients": moments // 2 if offload.gradients else 0,
        "optimizer": moments if offload.optimizer else 0,
    }
    needed = {name: num_bytes for name, num_bytes in needed.items() if num_bytes}
    check_memory(
        sum(needed.values()),
        HOST_MEMORY.available_bytes(),
        f"{settings.offload_field}: the host has too little memory for the {settings.role}'s {' and '.join(needed)}",
        "increase the pool's memory, or offload less",
    )


def check_device_memory(memory: EngineMemory, settings: OffloadSettings, device: torch.device) -> None:
    """Collective; call it while the rollout engine is awake. Raises ResourceError on all ranks if the moments that the
    first update creates do not fit beside the engine. Without this check, the second rollout would fail. Does nothing
    on a GPU from which moments are offloaded."""
    if settings.optimizer and device.type == "cuda":
        return
    field, num_free_bytes, other_advice = "cpuKvCache", HOST_MEMORY.available_bytes(), "increase the pool's memory"
    if device.type == "cuda":
        field, num_free_bytes, other_advice = (
            "gpuMemoryUtilization",
            torch.cuda.mem_get_info(device)[0],
            "use more GPUs, or set training.model.offload.optimizer: true",
        )
    check_memory(
        memory.moments_to_come,
        num_free_bytes,
        f"spec.training.rollout.{field}: there is too little memory for the optimizer's moments, which need room "
        "beside the rollout engine from the second rollout on",
        f"reduce {field}, or {other_advice}",
        is_shared=device.type == "cpu",
    )


def check_memory(needed: int, available: int | None, problem: str, advice: str, *, is_shared: bool = True) -> None:
    """Collective. Raises ResourceError on all ranks if any rank needs more bytes than are available. With `is_shared`
    the ranks of a machine share the available memory (of the host), so the sum of their needs counts; otherwise each
    rank has memory of its own (of its device). `available` None means unknown, and counts as enough. `problem` and
    `advice` begin and end the message."""
    of_this_rank = (socket.gethostname(), needed, available)
    of_all_ranks: list[tuple[str, int, int | None]] = [of_this_rank] * dist.get_world_size()
    dist.all_gather_object(of_all_ranks, of_this_rank)
    for host, rank_needs, rank_has in of_all_ranks:
        total = sum(each for other_host, each, _ in of_all_ranks if other_host == host) if is_shared else rank_needs
        if rank_has is not None and total > rank_has:
            kind = HostMemoryError if is_shared else DeviceMemoryError
            raise kind(f"{problem} (on {host}: {_shown(total)} needed, {_shown(rank_has)} available); {advice}")


def _shown(num_bytes: int) -> str:
    return f"{num_bytes / GIBIBYTE:.1f} GiB" if num_bytes >= GIBIBYTE else f"{num_bytes / MEBIBYTE:.1f} MiB"
