"""The base class of workers, and the context that each worker is built with.

Workers are plain Python objects and do not use Ray, so each can be built in an ordinary process.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rljob_trainer.dispatch.mesh import MeshPosition
from rljob_trainer.dispatch.register import registrations


@dataclass(frozen=True)
class WorkerContext:
    """The rank, rendezvous address and device of one worker process."""

    rank: int
    world_size: int
    """The number of ranks."""
    local_rank: int
    """This rank's number on its node, from 0."""
    node_rank: int
    """The node's number, from 0. Ranks with the same number run on the same node."""
    master_address: str
    """The address of rank 0, where the ranks meet to form the process group."""
    master_port: int
    device_type: str
    """`cpu` or `cuda`."""
    num_threads: int
    """The number of CPU threads of this process."""
    device_number: int = 0
    """Index of this rank's GPU among those that the process sees, which are all GPUs of its node (see
    `groups.devices`)."""

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return torch.device("cuda", self.device_number) if self.device_type == "cuda" else torch.device("cpu")


class Worker:
    """The base class of workers. A worker is one role on one rank."""

    def __init_subclass__(cls) -> None:
        """Raises DispatchError for registered methods that a group cannot call (see `registrations`)."""
        super().__init_subclass__()
        registrations(cls)

    def __init__(self, context: WorkerContext) -> None:
        self.context = context

    def mesh_position(self, mesh: str) -> MeshPosition:
        """Returns this rank's position in a mesh of the role. By default every rank is a separate data-parallel
        rank."""
        del mesh
        return MeshPosition(self.context.rank, self.context.world_size, is_collected=True)
