"""Which rank holds what of a model in training, and which data it works on.

Ranks are numbered so that those that talk most are neighbours: `num_sequence_ranks` ranks in a row share the tokens of
the same rows, `num_shards` in a row hold one replica of the model together, and so many again hold the next.

    8 ranks: 2 replicas of 4 shards, 2 sequence ranks
    rank      0  1  2  3 | 4  5  6  7
    shard     0  1  2  3 | 0  1  2  3     parameters, gradients, moments of optimizer are cut over these
    replica   0  0  0  0 | 1  1  1  1     gradients are summed over these once per update
    data      0  0  1  1 | 2  2  3  3     rows of a batch are split over these
    sequence  0  1  0  1 | 0  1  0  1     tokens of a micro-batch are split over these

Whoever needs the number of data-parallel ranks asks the layout, not the world size.
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
from rljob_trainer.errors import ConfigurationError

SHARD, REPLICATE = "shard", "replicate"
"""Dimensions of the mesh of parameters: over which they are cut, and over which they are replicated."""
DATA, SEQUENCE = "data", "sequence"
"""Dimensions of the mesh of tokens."""


@dataclass(frozen=True)
class ParallelLayout:
    """`num_replicas` times `num_shards` ranks; `num_sequence_ranks` divides their number."""

    num_shards: int
    num_replicas: int = 1
    num_sequence_ranks: int = 1

    @staticmethod
    def of(num_ranks: int, shard_size: int | None = None, sequence_parallel: int = 1) -> ParallelLayout:
        """So many ranks; `shard_size` None: all of them hold the model together.

        Raises ConfigurationError where one does not divide `num_ranks`."""
        num_shards = shard_size or num_ranks
        for name, value in (("shardSize", num_shards), ("sequenceParallel", sequence_parallel)):
            if num_ranks % value:
                raise ConfigurationError(
                    f"spec.roles: {name} must divide the role's {num_ranks} workers (seen: {value}); choose a divisor"
                )
        return ParallelLayout(num_shards, num_ranks // num_shards, sequence_parallel)

    @property
    def num_ranks(self) -> int:
        """Processes in all."""
        return self.num_shards * self.num_replicas

    @property
    def num_data_ranks(self) -> int:
        """Parts that a batch is split into."""
        return self.num_ranks // self.num_sequence_ranks

    @property
    def gradient_divisor(self) -> int:
        """Ranks over which FSDP2 averages gradients. Sequence ranks are among them: each has the gradient by its own
        tokens."""
        return self.num_ranks

    def position(self, rank: int) -> MeshPosition:
        """Which part of a batch a rank works on, and whether it answers for it."""
        data_rank, sequence_rank = divmod(rank, self.num_sequence_ranks)
        return MeshPosition(data_rank, self.num_data_ranks, is_collected=sequence_rank == 0)

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
        """What `fully_shard` cuts over."""
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
        """The ranks that have different rows, this one among them. Counts and sums over a batch are over these."""
        return self._tokens.get_group(SHARD if self._tokens is self.parameters else DATA)

    @cached_property
    def sequence_group(self) -> ProcessGroup | None:
        """The ranks that have the same rows, this one among them; None where each has rows of its own."""
        return None if self._layout.num_sequence_ranks == 1 else self._tokens.get_group(SEQUENCE)


def meshes_of(layout: ParallelLayout, device_type: str) -> LayoutMeshes:
    """Collective. The same for all engines of this process that have the layout: on GPUs each group takes memory."""
    return _meshes(layout, device_type, dist.group.WORLD)


@lru_cache(maxsize=4)
def _meshes(layout: ParallelLayout, device_type: str, world: ProcessGroup) -> LayoutMeshes:
    """`world` only tells one default process group from an earlier one."""
    del world
    return LayoutMeshes(layout, device_type)


def check_layout(
    layout: ParallelLayout, config: PreTrainedConfig, field: str = "sequenceParallel in spec.roles"
) -> None:
    """Raises ConfigurationError where sequence ranks cannot share the tokens of a model of this configuration; `field`
    is where the job asks for them."""
    size = layout.num_sequence_ranks
    if size == 1:
        return
    attention = choose_attention(config)
    if not attention.is_flat:
        raise ConfigurationError(
            f"{field}: needs flat rows, and a '{config.model_type}' model gets padded ones, because "
            f"{attention.reason} (seen: {size}); write 1"
        )
    check_heads(field, size, config)


def check_heads(field: str, size: int, config: PreTrainedConfig) -> None:
    """Raises ConfigurationError where `size` ranks cannot share the heads of a model of this configuration."""
    text = config.get_text_config()
    num_heads: int = text.num_attention_heads
    num_key_heads: int = text.to_dict().get("num_key_value_heads") or num_heads
    if num_heads % size:
        raise ConfigurationError(
            f"{field}: must divide the model's {num_heads} heads of attention (seen: {size}); choose a divisor"
        )
    if num_key_heads % size and size % num_key_heads:
        raise ConfigurationError(
            f"{field}: must divide the model's {num_key_heads} key and value heads or be a multiple of them (seen: "
            f"{size}); choose another one"
        )
