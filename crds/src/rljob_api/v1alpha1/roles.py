"""Which role runs on which pool."""

from __future__ import annotations

from pydantic import Field

from rljob_api.base import WireModel
from rljob_api.scalars import DnsLabel, PositiveCount


class Role(WireModel):
    """A role's place."""

    pool: DnsLabel | None = None
    """Name of the pool; the first pool when unset."""


class RolloutRole(WireModel):
    """The place of generation, and how one model copy is spread over GPUs there."""

    pool: DnsLabel | None = None
    """Name of the pool; the first pool when unset."""
    tensor_parallel: PositiveCount = 1
    """GPUs that hold one copy of the policy together while generating; must divide the GPUs of a node."""


class Roles(WireModel):
    """Roles on one pool share its GPUs. Actor and rollout always do (hybrid engine); ref may have a pool of its own."""

    actor: Role = Field(default_factory=Role)
    rollout: RolloutRole = Field(default_factory=RolloutRole)
    ref: Role = Field(default_factory=Role)


def pool_of_cel(role: str) -> str:
    """CEL for the name of a role's pool, in a rule on the spec."""
    return f"(has(self.roles.{role}.pool) ? self.roles.{role}.pool : self.pools[0].name)"
