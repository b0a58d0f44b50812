"""The parallel layout: which part of a model each rank holds, and which data it processes.

Ranks that communicate most are neighbors: `num_sequence_ranks` consecutive ranks share the tokens of the same rows, and
`num_shards` consecutive ranks share one replica of the model.

    8 ranks: 2 replicas of 4 shards, 2 sequence ranks
    rank      0  1  2  3 | 4  5  6  7
    shard     0  1  2  3 | 0  1  2  3     parameters, gradients and optimizer moments are split over these
    replica   0  0  0  0 | 1  1  1  1     gradients are summed over these once per update
    data      0  0  1  1 | 2  2  3  3     rows of a batch are split over these
    sequence  0  1  0  1 | 0  1  0  1     tokens of a micro-batch are split over these

The number of data-parallel ranks is a property of the layout; it may be smaller than the world size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import PreTrainedConfig

from rljob_trainer.dispatch.mesh import MeshPosition
from rljob_trainer.engines.train.attention import choose_attention
from rljob_trainer.engines.train.sequence_parallel import SequenceRanks
from rljob_trainer.errors import ConfigurationError

SHARD, REPLICATE = "shard", "replicate"
"""Dimensions of the parameters' mesh: parameters are sharded over SHARD and replicated over REPLICATE."""
DATA, SEQUENCE = "data", "sequence"
"""Dimensions of the tokens' mesh: a batch's rows are split over DATA, the tokens of a micro-batch over SEQUENCE."""


@dataclass(frozen=True)
class ParallelLayout:
    """A layout of `num_replicas` x `num_shards` ranks. `num_sequence_ranks` must divide the number of ranks."""

    num_shards: int
    num_replicas: int = 1
    num_sequence_ranks: int = 1

    @staticmethod
    def of(num_ranks: int, shard_size: int | None = None, sequence_parallel: int = 1) -> ParallelLayout:
        """The layout of `num_ranks` ranks. `shard_size` None: the model is sharded over all ranks.

        Raises ConfigurationError if `shard_size` or `sequence_parallel` does not divide `num_ranks`."""
        num_shards = shard_size or num_ranks
        for name, value in (("shardSize", num_shards), ("sequenceParallel", sequence_parallel)):
            if num_ranks % value:
                raise ConfigurationError(
                    f"spec.roles: {name} must divide the role's {num_ranks} workers (seen: {value}); choose a divisor"
                )
        return ParallelLayout(num_shards, num_ranks // num_shards, sequence_parallel)

    @property
    def num_ranks(self) -> int:
        """The total number of ranks."""
        return self.num_shards * self.num_replicas

    @property
    def num_data_ranks(self) -> int:
        """The number of parts into which a batch is split."""
        return self.num_ranks // self.num_sequence_ranks

    @property
    def gradient_divisor(self) -> int:
        """The number of ranks over which FSDP2 averages gradients. It includes sequence ranks, because each of them has
        only the gradient of its own tokens."""
        return self.num_ranks

    def position(self, rank: int) -> MeshPosition:
        """Which part of a batch a rank processes, and whether the rank returns the results."""
        data_rank, sequence_rank = divmod(rank, self.num_sequence_ranks)
        return MeshPosition(data_rank, self.num_data_ranks, is_collected=sequence_rank == 0)

    def is_first_replica(self, rank: int) -> bool:
        """Whether a rank has a shard of the first replica, which is the one that writes checkpoints."""
        return rank < self.num_shards

    def __str__(self) -> str:
        return f"{self.num_replicas} replicas x {self.num_shards} shards, {self.num_sequence_ranks} sequence ranks"


class LayoutMeshes:
    """The process groups of a layout, among all ranks of the default process group."""

    def __init__(self, layout: ParallelLayout, device_type: str) -> None:
        """Collective."""
        self._layout = layout
        shape = {SHARD: layout.num_shards}
        if layout.num_replicas > 1:
            shape = {REPLICATE: layout.num_replicas, **shape}
        self.parameters: DeviceMesh = init_device_mesh(device_type, tuple(shape.values()), mesh_dim_names=tuple(shape))
        """The mesh that `fully_shard` gets."""
        self._tokens = (
            self.parameters
            if layout.num_sequence_ranks == layout.num_replicas == 1
            else init_device_mesh(
                device_type,
                (layout.num_data_ranks, layout.num_sequence_ranks),
                mesh_dim_names=(DATA, SEQUENCE),
            )
        )

    @cached_property
    def data_group(self) -> ProcessGroup:
        """This rank and the ranks with other rows: one rank for each part of the batch. Sums over a batch use this
        group."""
        return self._tokens.get_group(SHARD if self._tokens is self.parameters else DATA)

    @cached_property
    def sequence_ranks(self) -> SequenceRanks | None:
        """The ranks that share the same rows, including this one; None without sequence parallelism."""
        if self._layout.num_sequence_ranks == 1:
            return None
        return SequenceRanks.of(self._tokens.get_group(SEQUENCE))


def meshes_of(layout: ParallelLayout, device_type: str) -> LayoutMeshes:
    """Collective. The process groups of a layout. All engines of this process with the same layout share them, because
    on GPUs each group needs memory."""
    return _meshes(layout, device_type, dist.group.WORLD)


@lru_cache(maxsize=4)
def _meshes(layout: ParallelLayout, device_type: str, world: ProcessGroup) -> LayoutMeshes:
    """`world` is only a cache key, which distinguishes the default process group from an earlier one."""
    del world
    return LayoutMeshes(layout, device_type)


def check_layout(
    layout: ParallelLayout, config: PreTrainedConfig, field: str = "sequenceParallel in spec.roles"
) -> None:
    """Raises ConfigurationError if the layout has sequence parallelism and a model of this configuration does not
    support it. `field`, for the message: the job's field that requests sequence parallelism."""
    size = layout.num_sequence_ranks
    if size == 1:
        return
    attention = choose_attention(config)
    if not attention.is_flat:
        raise ConfigurationError(
            f"{field}: needs flat rows, but a '{config.model_type}' model needs padded rows, because "
            f"{attention.reason} (seen: {size}); set 1"
        )
    check_heads(field, size, config)


def check_heads(field: str, size: int, config: PreTrainedConfig) -> None:
    """Raises ConfigurationError if the attention heads of this configuration cannot be divided among `size` ranks.
    `field`, for the message: the job's field with this size."""
    text = config.get_text_config()
    num_heads: int = text.num_attention_heads
    num_key_heads: int = text.to_dict().get("num_key_value_heads") or num_heads
    if num_heads % size:
        raise ConfigurationError(
            f"{field}: must divide the model's {num_heads} attention heads (seen: {size}); choose a divisor"
        )
    if num_key_heads % size and size % num_key_heads:
        raise ConfigurationError(
            f"{field}: must divide the model's {num_key_heads} key and value heads or be a multiple of them (seen: "
            f"{size}); choose another number"
        )
