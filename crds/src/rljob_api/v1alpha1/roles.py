"""Which role runs on which pool."""

from __future__ import annotations

from pydantic import Field

from rljob_api.base import WireModel
from rljob_api.scalars import DnsLabel, Flag, PositiveCount


class TrainRole(WireModel):
    """The place of a model that is trained or scored with, and its layout there. Layouts change speed and memory, not
    what is learned."""

    pool: DnsLabel | None = None
    """Name of the pool; the first pool when unset."""
    shard_size: PositiveCount | None = None
    """GPUs that hold one copy of parameters, gradients and optimizer state together (hybrid shard); the pool's other
    GPUs hold further copies, which add up their gradients once per update. All GPUs of the pool when unset (full
    shard). Must divide them."""
    sequence_parallel: PositiveCount | None = None
    """GPUs that share the tokens of the same rows (Ulysses), for rows that are too long for one; each has rows of its
    own when unset. Must divide the pool's GPUs and the model's heads of attention."""

    @property
    def num_sequence_ranks(self) -> int:
        """1 where each GPU has rows of its own."""
        return self.sequence_parallel or 1


class ActorRole(TrainRole):
    """The place and layout of the model in training."""

    defer_gradient_reduction: Flag = False
    """Gradients are reduced once per update instead of once per micro-batch: less communication, but every GPU keeps
    whole gradients, in 32 bits, until the last micro-batch."""


class RolloutRole(WireModel):
    """The place of generation, and how one model copy is spread over GPUs there."""

    pool: DnsLabel | None = None
    """Name of the pool; the first pool when unset."""
    tensor_parallel: PositiveCount = 1
    """GPUs that hold one copy of the policy together while generating; must divide the GPUs of a node."""


class Roles(WireModel):
    """Roles on one pool share its GPUs. Actor and rollout always do (hybrid engine); ref, critic and rewardModel may
    have pools of their own, or one together."""

    actor: ActorRole = Field(default_factory=ActorRole)
    rollout: RolloutRole = Field(default_factory=RolloutRole)
    ref: TrainRole = Field(default_factory=TrainRole)
    critic: TrainRole = Field(default_factory=TrainRole)
    reward_model: TrainRole = Field(default_factory=TrainRole)

    def train_role(self, name: str) -> TrainRole:
        """That of one of TRAIN_ROLES."""
        places = {"actor": self.actor, "ref": self.ref, "critic": self.critic, "rewardModel": self.reward_model}
        return places[name]


TRAIN_ROLES = ("actor", "ref", "critic", "rewardModel")


def sequence_ranks_cel(role: str) -> str:
    """CEL for the number of GPUs that share rows."""
    return f"(has(self.roles.{role}.sequenceParallel) ? self.roles.{role}.sequenceParallel : 1)"


def pool_of_cel(role: str) -> str:
    """CEL for the name of a role's pool, in a rule on the spec."""
    return f"(has(self.roles.{role}.pool) ? self.roles.{role}.pool : self.pools[0].name)"
