"""From the job's `pools` and `roles` to reserved pools, and to the roles that share processes.

Roles on one pool share its processes, in the order in which they are built (fused), unless some of them are to be apart
from the rest: these then have processes of their own on the same devices, of which each process gets an equal share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from rljob_api.constants import POOL_RESOURCE_PREFIX
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_trainer.errors import ConfigurationError, ResourceError
from rljob_trainer.pools.reservation import Report, log_progress
from rljob_trainer.pools.resource_pool import PoolSettings, ResourcePool, reserve_pools


@dataclass(frozen=True)
class FusedRoles:
    """Roles that share one process per device, in the order in which they are built there."""

    pool: str
    roles: tuple[str, ...]


@dataclass(frozen=True)
class RolePlan:
    """Where all roles run."""

    groups: tuple[FusedRoles, ...]
    """In the order in which their first roles are built."""

    def group_of(self, role: str) -> FusedRoles:
        """Raises ConfigurationError for a role that has no pool."""
        for group in self.groups:
            if role in group.roles:
                return group
        placed = ", ".join(role for group in self.groups for role in group.roles)
        raise ConfigurationError(
            f"spec.roles.{role}.pool: this role runs on no pool (roles that do: {placed}); name one of spec.pools"
        )

    def groups_on(self, pool: str) -> list[FusedRoles]:
        """Those whose processes share the devices of a pool."""
        return [group for group in self.groups if group.pool == pool]


def plan_roles(
    pools: Sequence[str], role_pools: Mapping[str, str | None], apart: Sequence[Sequence[str]] = ()
) -> RolePlan:
    """Puts roles (in the order in which they are to be built) on pools. Each entry of `apart` are roles of one pool
    that are fused with each other and with no other.

    Raises ConfigurationError that names the field: a role without a pool or on one that is not there, a pool without a
    role, roles kept apart that are on different pools, or that are in two entries."""
    for role, pool in role_pools.items():
        if pool not in pools:
            wrong = "this role has no pool" if pool is None else f"there is no pool of this name (seen: {pool})"
            raise ConfigurationError(f"spec.roles.{role}.pool: {wrong}; name one of spec.pools ({', '.join(pools)})")
    for index, pool in enumerate(pools):
        if pool not in role_pools.values():
            raise ConfigurationError(
                f"spec.pools[{index}].name: no role of this run is on this pool, whose devices would stay idle (seen: "
                f"{pool}); remove it, or put a role there"
            )
    entry_of: dict[str, int] = {}
    for number, roles in enumerate(apart):
        places = {role_pools.get(role) for role in roles}
        if len(places) != 1 or None in places or entry_of.keys() & set(roles):
            raise ConfigurationError(
                f"spec.roles: {', '.join(roles)} cannot share processes of their own (on pools: "
                f"{', '.join(f'{role} {role_pools.get(role)}' for role in roles)}); name roles of one pool, each once"
            )
        entry_of |= dict.fromkeys(roles, number)
    groups: dict[tuple[str | None, int | None], list[str]] = {}
    for role, pool in role_pools.items():
        groups.setdefault((pool, entry_of.get(role)), []).append(role)
    return RolePlan(tuple(FusedRoles(str(pool), tuple(roles)) for (pool, _), roles in groups.items()))


def pool_settings_of(
    spec: RLJobSpec, *, num_cpus_per_device: float, cluster_resources: Mapping[str, float]
) -> list[PoolSettings]:
    """What to reserve for the job's pools on a cluster that has these resources in all: GPUs where it has any, and a
    pool's own nodes where it tells them apart."""
    marks = {pool.name: f"{POOL_RESOURCE_PREFIX}{pool.name}" for pool in spec.pools}
    return [
        PoolSettings(
            name=pool.name,
            num_nodes=pool.nodes,
            num_devices_per_node=pool.gpus_per_node,
            use_gpu=cluster_resources.get("GPU", 0) > 0,
            num_cpus_per_device=num_cpus_per_device,
            custom_resources={marks[pool.name]: 1.0} if marks[pool.name] in cluster_resources else {},
            timeout_seconds=spec.run_policy.provisioning_deadline_seconds,
        )
        for pool in spec.pools
    ]


class ResourcePoolManager:
    """The pools of a run, reserved together and released together. Used in a `with` statement, which does both."""

    def __init__(self, settings: Sequence[PoolSettings], plan: RolePlan, report: Report = log_progress) -> None:
        self.settings = settings
        self.plan = plan
        self.report = report
        self.pools: dict[str, ResourcePool] = {}
        self._views: dict[FusedRoles, ResourcePool] = {}

    @property
    def num_devices(self) -> int:
        """Of all pools."""
        return sum(each.num_nodes * each.num_devices_per_node for each in self.settings)

    def __enter__(self) -> Self:
        """Reserves all pools, or none. Raises ResourceError."""
        for each in self.settings:
            if not self.plan.groups_on(each.name):
                raise ResourceError(f"pool {each.name}: no role is on it; leave it out")
        self.pools = {pool.settings.name: pool for pool in reserve_pools(self.settings, self.report)}
        try:
            for name, pool in self.pools.items():
                groups = self.plan.groups_on(name)
                self._views |= dict(zip(groups, pool.shares(len(groups)) if groups[1:] else [pool], strict=True))
        except BaseException:
            self._release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Releases all pools."""
        self._release()

    def _release(self) -> None:
        for pool in self.pools.values():
            pool.release()

    def pool_of(self, role: str) -> ResourcePool:
        """The slots of the processes that a role runs in. Raises ConfigurationError for a role without a pool."""
        return self._views[self.plan.group_of(role)]
