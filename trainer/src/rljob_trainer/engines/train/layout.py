"""Which rank holds what of a model in training, and which data it works on.

Today every layout is a full shard: each rank holds a part of every parameter and works on rows of its own. Whoever
needs the number of data-parallel ranks asks the layout, not the world size: with sequence parallelism the two differ.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rljob_trainer.dispatch.mesh import MeshPosition

SHARD = "shard"
"""The dimension of the mesh over which parameters are cut."""


@dataclass(frozen=True)
class ParallelLayout:
    """`num_shards` ranks hold a model together."""

    num_shards: int

    @staticmethod
    def full_shard(num_ranks: int) -> ParallelLayout:
        """All ranks hold the model together, and each has rows of its own."""
        return ParallelLayout(num_shards=num_ranks)

    @property
    def num_ranks(self) -> int:
        """Processes in all."""
        return self.num_shards

    @property
    def num_data_ranks(self) -> int:
        """Parts that a batch is split into."""
        return self.num_shards

    @property
    def gradient_divisor(self) -> int:
        """Ranks over which FSDP2 averages gradients."""
        return self.num_shards

    def position(self, rank: int) -> MeshPosition:
        """Which part of a batch a rank works on, and whether it answers for it."""
        return MeshPosition(data_rank=rank, num_data_ranks=self.num_data_ranks, is_collected=True)

    def mesh(self, device_type: str) -> DeviceMesh:
        """Collective. The mesh over which `fully_shard` cuts."""
        return init_device_mesh(device_type, (self.num_shards,), mesh_dim_names=(SHARD,))

    def data_group(self, mesh: DeviceMesh) -> ProcessGroup:
        """Of `mesh`: the ranks that have different rows. Counts and sums over a batch are over these."""
        return mesh.get_group(SHARD)
