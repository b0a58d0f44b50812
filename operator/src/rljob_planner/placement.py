"""Where roles are, and how their models are spread over GPUs there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from rljob_planner.gpus import Gpu
from rljob_planner.workload import Role


@dataclass(frozen=True)
class TrainLayout:
    """As the trainer's ParallelLayout: `shard_size` GPUs hold a copy together."""

    num_gpus: int
    shard_size: int
    sequence_parallel: int = 1
    keeps_shard_size: bool = field(default=False, compare=False)
    """Whether the job's file says it: a larger pool then has more copies, and no larger ones."""

    @property
    def is_left_open(self) -> bool:
        """Whether it is that of a role of which a job says nothing."""
        return self.shard_size == self.num_gpus and self.sequence_parallel == 1 and not self.keeps_shard_size

    @property
    def num_replicas(self) -> int:
        """Copies of the model."""
        return self.num_gpus // self.shard_size

    @property
    def num_data_ranks(self) -> int:
        """Parts that batches are split into."""
        return self.num_gpus // self.sequence_parallel


@dataclass(frozen=True)
class RolloutLayout:
    """`tensor_parallel` GPUs hold a copy together."""

    num_gpus: int
    tensor_parallel: int = 1

    @property
    def num_engines(self) -> int:
        """Copies of the model."""
        return self.num_gpus // self.tensor_parallel


@dataclass(frozen=True)
class PlacedPool:
    """Equal nodes, and the roles that share their GPUs."""

    name: str
    nodes: int
    gpus_per_node: int
    gpu: Gpu
    layouts: Mapping[Role, TrainLayout]
    """Of the train roles here."""
    rollout: RolloutLayout | None = None
    """None where the rollout is elsewhere."""

    @property
    def num_gpus(self) -> int:
        """Of all nodes."""
        return self.nodes * self.gpus_per_node

    @property
    def roles(self) -> tuple[Role, ...]:
        """In the order of `Role`."""
        return tuple(role for role in Role if role in self.layouts or (role is Role.ROLLOUT and self.rollout))


class Schedule(StrEnum):
    """What of a step goes on beside what."""

    SYNCHRONOUS = "synchronous"
    ONE_STEP_OFF = "one step off"
    """Generation of the next step beside the training of this one; needs the rollout on a pool of its own."""


@dataclass(frozen=True)
class Placement:
    """All roles of a job."""

    pools: tuple[PlacedPool, ...]
    schedule: Schedule = Schedule.SYNCHRONOUS

    def pool_of(self, role: Role) -> PlacedPool:
        """The one with this role. Raises KeyError."""
        for pool in self.pools:
            if role in pool.roles:
                return pool
        raise KeyError(role)

    @property
    def num_gpus(self) -> int:
        """Of all pools."""
        return sum(pool.num_gpus for pool in self.pools)

    @property
    def runs_today(self) -> bool:
        """Whether this version of the trainer can run it: actor and rollout on one pool, one after the other."""
        return self.schedule is Schedule.SYNCHRONOUS and self.pool_of(Role.ACTOR) is self.pool_of(Role.ROLLOUT)
