"""Measures the memory of a training engine's state, on the device and on the host. Checks before the first step that
the optimizer state, which the first update creates, will fit on the device."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from rljob_trainer.engines.device_memory import distinct_storages, local_part, num_storage_bytes
from rljob_trainer.engines.host_ledger import POOL_FIELD, HostUse, buffer_bytes
from rljob_trainer.engines.train.offload import OffloadSettings, moments_of
from rljob_trainer.engines.train.settings import TrainEngineSettings
from rljob_trainer.errors import DeviceMemoryError
from rljob_trainer.host_memory import size_text


class EngineMemory:
    """The memory of an engine's state, in bytes: on the device, unless stated otherwise."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """The model's parameters must be shards now, not gathered."""
        self._model = model
        self._optimizer = optimizer
        self._shards = list(model.parameters())
        self.parameter_sizes = [storage.nbytes() for storage in distinct_storages(self._shards)]
        """The sizes of the shards of the parameters, each of which offload copies to a buffer of its own."""
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
        return 2 * sum(map(_size, missing))

    @property
    def trained_sizes(self) -> list[int]:
        """The sizes of the shards of the parameters that are trained. Gradients and each of the two moments have the
        same sizes."""
        return [] if self._optimizer is None else [_size(each) for each in self._shards if each.requires_grad]

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


def engine_uses(settings: TrainEngineSettings, memory: EngineMemory, num_present: int = 0) -> list[HostUse]:
    """The host memory of an engine: what it offloads, and on CPUs the moments in any case. On CPUs offloaded parameters
    need no additional memory. `num_present`: how much of the parameters' is allocated already."""
    offload, on_cpu = settings.offload, settings.device.type == "cpu"

    def use(state: str, field: str, sizes: list[int], present: int = 0) -> HostUse:
        # The field of a frozen model is about its parameters alone.
        field = settings.offload_field + ("" if settings.optimizer is None else f".{field}")
        return HostUse(f"{settings.role}'s {state}", field, buffer_bytes(sizes, is_pinned=not on_cpu), present)

    found = []
    if offload.parameters and not on_cpu:
        found.append(use("parameters", "parameters", memory.parameter_sizes, num_present))
    if offload.gradients:
        found.append(use("gradients", "gradients", memory.trained_sizes))
    if on_cpu:
        found.append(HostUse(f"{settings.role}'s moments", POOL_FIELD, 2 * sum(memory.trained_sizes)))
    elif offload.optimizer:
        found.append(use("moments", "optimizer", 2 * memory.trained_sizes))
    return found


def copies_use(settings: TrainEngineSettings, memory: EngineMemory, *, is_first_replica: bool) -> HostUse:
    """The copies from which the checkpoints of an engine are written: the parameters that are trained, and both
    moments. Only the ranks of the first replica make copies."""
    sizes = 3 * memory.trained_sizes if is_first_replica else []
    num_bytes = buffer_bytes(sizes, is_pinned=settings.device.type != "cpu")
    return HostUse(f"{settings.role}'s copies for checkpoints", POOL_FIELD, num_bytes)


def check_device_memory(memory: EngineMemory, settings: OffloadSettings, device: torch.device) -> None:
    """Collective; call it while the rollout engine is awake. Raises DeviceMemoryError on all ranks if the moments that
    the first update creates do not fit beside the engine on any rank's GPU. Without this check, the second rollout
    would fail. Does nothing on CPUs, where the host's memory is checked (`HostLedger`), and if moments are
    offloaded."""
    if settings.optimizer or device.type == "cpu":
        return
    of_this_rank = (socket.gethostname(), memory.moments_to_come, torch.cuda.mem_get_info(device)[0])
    of_all_ranks = [of_this_rank] * dist.get_world_size()
    dist.all_gather_object(of_all_ranks, of_this_rank)
    for host, needed, available in of_all_ranks:
        if needed > available:
            raise DeviceMemoryError(
                "spec.training.rollout.gpuMemoryUtilization: there is too little memory for the optimizer's moments, "
                f"which need room beside the rollout engine from the second rollout on (on {host}: "
                f"{size_text(needed)} needed, {size_text(available)} available); reduce gpuMemoryUtilization, or use "
                "more GPUs, or set training.model.offload.optimizer: true"
            )


def _size(shard: Tensor) -> int:
    local = local_part(shard)
    return local.numel() * local.itemsize
