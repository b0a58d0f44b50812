"""Whether there is room for what the first update will make: found out before the first step, not in the second."""

from __future__ import annotations

import socket

import torch
import torch.distributed as dist

from rljob_trainer.engines.train.engine_memory import EngineMemory
from rljob_trainer.engines.train.offload import NO_OFFLOAD, OffloadSettings
from rljob_trainer.engines.train.settings import TrainEngineSettings
from rljob_trainer.errors import ResourceError
from rljob_trainer.host_memory import available_host_bytes

GIB = 1 << 30
MIB = 1 << 20


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
        available_host_bytes(),
        f"{settings.offload_field}: there is too little memory on the host for the {settings.role}'s "
        f"{' and '.join(needed)}",
        "give the pool more memory, or let less leave the device",
    )


def check_device_room(memory: EngineMemory, settings: OffloadSettings, device: torch.device) -> None:
    """Collective; while the rollout engine is awake. Raises ResourceError, on all ranks alike, where the moments that
    the first update makes have no room beside it: the first rollout would work, and the second would not."""
    if settings.optimizer and device.type == "cuda":
        return
    field, free, more = "cpuKvCache", available_host_bytes(), "give the pool more memory"
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
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:.1f} MiB"
