"""What the state of a training engine takes of its device, in bytes of live storages."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from rljob_trainer.engines.storages import local_part, num_storage_bytes
from rljob_trainer.engines.train.offload import moments_of


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
