"""Which role runs on which pool."""

from __future__ import annotations

from pydantic import Field

from rljob_api.base import Contract
from rljob_api.scalars import DnsLabel, PositiveCount


class Role(Contract):
    """A role's place."""

    pool: DnsLabel | None = None
    """Name of the pool; the first pool when unset."""


class RolloutRole(Contract):
    """The place of generation, and how one model copy is spread over GPUs there."""

    pool: DnsLabel | None = None
    """Name of the pool; the first pool when unset."""
    tensor_parallel: PositiveCount = 1
    """GPUs that hold one copy of the policy together while generating; must divide the GPUs of a node."""


class Roles(Contract):
    """Roles on one pool share its GPUs. Actor and rollout always do (hybrid engine); ref may have a pool of its own."""

    actor: Role = Field(default_factory=Role)
    rollout: RolloutRole = Field(default_factory=RolloutRole)
    ref: Role = Field(default_factory=Role)
