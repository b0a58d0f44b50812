"""What every worker knows about its place, and the shape of a worker.

Workers are plain Python objects: nothing here knows Ray, so each can be built in an ordinary process.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rljob_trainer.dispatch.mesh import MeshPosition
from rljob_trainer.dispatch.register import registrations


@dataclass(frozen=True)
class WorkerContext:
    """One rank's place. `device_type` is `cpu` or `cuda`; `num_threads` are CPU threads for this process."""

    rank: int
    world_size: int
    local_rank: int
    node_rank: int
    master_address: str
    master_port: int
    device_type: str
    num_threads: int
    device_number: int = 0
    """Of this rank's GPU among those that the process sees."""

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return torch.device("cuda", self.device_number) if self.device_type == "cuda" else torch.device("cpu")


class Worker:
    """The part of one role that runs on one rank."""

    def __init_subclass__(cls) -> None:
        """Raises DispatchError for registered methods that no group could call (see `registrations`)."""
        super().__init_subclass__()
        registrations(cls)

    def __init__(self, context: WorkerContext) -> None:
        self.context = context

    def mesh_position(self, mesh: str) -> MeshPosition:
        """Where this rank stands in a mesh of the role; by default every rank is a data-parallel rank of its own."""
        del mesh
        return MeshPosition(self.context.rank, self.context.world_size, is_collected=True)
