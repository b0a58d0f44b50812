"""What the state of a training engine takes of its device, in bytes of live storages, and whether there is room for
what the first update will make: that is found out before the first step, not in the second."""

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
from rljob_trainer.errors import ResourceError
from rljob_trainer.host_memory import HOST_MEMORY
from rljob_trainer.observability.memory import MEBIBYTE

GIBIBYTE = 1024 * MEBIBYTE


class EngineMemory:
    """Of a model whose parameters are all shards when this is built."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        self._model = model
        self._optimizer = optimizer
        self._shards = list(model.parameters())
        self._units = [module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)]

    @property
    def parameters(self) -> int:
        """Shards."""
        return num_storage_bytes(self._shards)

    @property
    def gathered(self) -> int:
        """Parameters that are whole at the moment: after a pass without backward those of no layer."""
        return num_storage_bytes(each for each in self._model.parameters() if not isinstance(each, DTensor))

    @property
    def gradients(self) -> int:
        """Shards, and what is not reduced yet."""
        return num_storage_bytes(self._gradients())

    @property
    def moments(self) -> int:
        """Of the optimizer."""
        return num_storage_bytes(moments_of(self._optimizer))

    @property
    def moments_to_come(self) -> int:
        """What the first update will make of moments."""
        if self._optimizer is None:
            return 0
        missing = [each for each in self._shards if each.requires_grad and each not in self._optimizer.state]
        return 2 * sum(shard.numel() * shard.itemsize for shard in map(local_part, missing))

    def _gradients(self) -> Iterator[Tensor]:
        yield from (shard.grad for shard in self._shards if shard.grad is not None)
        # No public names: what FSDP2 (torch 2.11 to 2.13) keeps of micro-batches that were not reduced, over ranks of a
        # copy or over replicas. The test of deferred reduction's memory fails when these are other names.
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


def check_host_room(settings: TrainEngineSettings, memory: EngineMemory) -> None:
    """Collective. Raises ResourceError, on all ranks alike, where a machine's memory has no room for what its ranks
    would send there. On CPUs parameters need none: there they only move."""
    offload = settings.offload
    if offload == NO_OFFLOAD:
        return
    moments = memory.moments_to_come
    needed = {
        "parameters": memory.parameters if offload.parameters and settings.device.type == "cuda" else 0,
        "gradients": moments // 2 if offload.gradients else 0,
        "optimizer": moments if offload.optimizer else 0,
    }
    needed = {name: num_bytes for name, num_bytes in needed.items() if num_bytes}
    refuse_too_much(
        sum(needed.values()),
        HOST_MEMORY.available_bytes(),
        f"{settings.offload_field}: there is too little memory on the host for the {settings.role}'s "
        f"{' and '.join(needed)}",
        "give the pool more memory, or let less leave the device",
    )


def check_device_room(memory: EngineMemory, settings: OffloadSettings, device: torch.device) -> None:
    """Collective; while the rollout engine is awake. Raises ResourceError, on all ranks alike, where the moments that
    the first update makes have no room beside it: the first rollout would work, and the second would not."""
    if settings.optimizer and device.type == "cuda":
        return
    field, free, more = "cpuKvCache", HOST_MEMORY.available_bytes(), "give the pool more memory"
    if device.type == "cuda":
        field, free, more = (
            "gpuMemoryUtilization",
            torch.cuda.mem_get_info(device)[0],
            "take more GPUs, or write training.model.offload.optimizer: true",
        )
    refuse_too_much(
        memory.moments_to_come,
        free,
        f"spec.training.rollout.{field}: from the second rollout on the optimizer's moments are in memory beside the "
        "rollout engine, and there is too little",
        f"lower it, or {more}",
        is_shared=device.type == "cpu",
    )


def refuse_too_much(needed: int, available: int | None, wrong: str, advice: str, *, is_shared: bool = True) -> None:
    """Collective. Raises ResourceError on all ranks where the bytes that ranks need are more than there are; memory
    `is_shared` by the ranks of a machine, or each has its own. What nobody knows is taken to be enough."""
    mine = (socket.gethostname(), needed, available)
    found: list[tuple[str, int, int | None]] = [mine] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    for host, rank_needs, rank_has in found:
        wanted = sum(each for place, each, _ in found if place == host) if is_shared else rank_needs
        if rank_has is not None and wanted > rank_has:
            raise ResourceError(f"{wrong} (on {host}: {_shown(wanted)} needed, {_shown(rank_has)} available); {advice}")


def _shown(num_bytes: int) -> str:
    return f"{num_bytes / GIBIBYTE:.1f} GiB" if num_bytes >= GIBIBYTE else f"{num_bytes / MEBIBYTE:.1f} MiB"
