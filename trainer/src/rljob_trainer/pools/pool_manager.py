"""Reserves the job's `pools`, and assigns its `roles` to worker processes.

Roles on the same pool share the pool's processes (fused roles). If some roles of a pool must be apart from the others,
they have processes of their own on the same devices, and all processes of a device get equal shares of it.
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
    """Roles that share one process per device, in the order in which they are built."""

    pool: str
    roles: tuple[str, ...]


@dataclass(frozen=True)
class RolePlan:
    """The assignment of all roles to pools and processes."""

    groups: tuple[FusedRoles, ...]
    """The groups of fused roles, in the order in which their first roles are built."""

    def group_of(self, role: str) -> FusedRoles:
        """Returns the group of a role. Raises ConfigurationError if the role has no pool."""
        for group in self.groups:
            if role in group.roles:
                return group
        others = ", ".join(role for group in self.groups for role in group.roles)
        raise ConfigurationError(
            f"spec.roles.{role}.pool: this role has no pool (roles with a pool: {others}); name one of spec.pools"
        )

    def groups_on(self, pool: str) -> list[FusedRoles]:
        """Returns the groups whose processes share the devices of a pool."""
        return [group for group in self.groups if group.pool == pool]


def plan_roles(
    pools: Sequence[str], role_pools: Mapping[str, str | None], apart: Sequence[Sequence[str]] = ()
) -> RolePlan:
    """Assigns roles to pools. `role_pools`: the pool of each role, in the order in which the roles are built. `apart`:
    each entry lists roles of one pool that are fused with each other but with no other role.

    Raises ConfigurationError, naming the field, for a role without a pool or on an unknown pool, a pool without a role,
    and an entry of `apart` with roles of different pools or with a role of another entry."""
    for role, pool in role_pools.items():
        if pool not in pools:
            wrong = "this role has no pool" if pool is None else f"unknown pool (seen: {pool})"
            raise ConfigurationError(f"spec.roles.{role}.pool: {wrong}; name one of spec.pools ({', '.join(pools)})")
    for index, pool in enumerate(pools):
        if pool not in role_pools.values():
            raise ConfigurationError(
                f"spec.pools[{index}].name: no role of this run uses this pool, so its devices would be idle (seen: "
                f"{pool}); remove the pool, or assign a role to it"
            )
    entry_of: dict[str, int] = {}
    for number, roles in enumerate(apart):
        pools_of_roles = {role_pools.get(role) for role in roles}
        if len(pools_of_roles) != 1 or None in pools_of_roles or entry_of.keys() & set(roles):
            raise ConfigurationError(
                f"spec.roles: {', '.join(roles)} cannot share processes apart from other roles (pools: "
                f"{', '.join(f'{role} {role_pools.get(role)}' for role in roles)}); put them on the same pool, and "
                "name each role once"
            )
        entry_of |= dict.fromkeys(roles, number)
    groups: dict[tuple[str | None, int | None], list[str]] = {}
    for role, pool in role_pools.items():
        groups.setdefault((pool, entry_of.get(role)), []).append(role)
    return RolePlan(tuple(FusedRoles(str(pool), tuple(roles)) for (pool, _), roles in groups.items()))


def pool_settings_of(
    spec: RLJobSpec, *, num_cpus_per_device: float, cluster_resources: Mapping[str, float]
) -> list[PoolSettings]:
    """Returns what to reserve for the job's pools. `cluster_resources`: total resources of the cluster, by Ray's names.
    GPUs are reserved if the cluster has any. If the cluster has the resource of a pool (`rljob-pool-<name>`), only
    nodes with this resource are used for the pool."""
    resources = {pool.name: f"{POOL_RESOURCE_PREFIX}{pool.name}" for pool in spec.pools}
    return [
        PoolSettings(
            name=pool.name,
            num_nodes=pool.nodes,
            num_devices_per_node=pool.gpus_per_node,
            use_gpu=cluster_resources.get("GPU", 0) > 0,
            num_cpus_per_device=num_cpus_per_device,
            custom_resources={resources[pool.name]: 1.0} if resources[pool.name] in cluster_resources else {},
            timeout_seconds=spec.run_policy.provisioning_deadline_seconds,
        )
        for pool in spec.pools
    ]


class ResourcePoolManager:
    """The pools of a run. A `with` statement reserves all pools at its start and releases them at its end."""

    def __init__(self, settings: Sequence[PoolSettings], plan: RolePlan, report: Report = log_progress) -> None:
        self.settings = settings
        self.plan = plan
        self.report = report
        self.pools: dict[str, ResourcePool] = {}
        self._views: dict[FusedRoles, ResourcePool] = {}

    @property
    def num_devices(self) -> int:
        """Number of devices of all pools."""
        return sum(each.num_nodes * each.num_devices_per_node for each in self.settings)

    def __enter__(self) -> Self:
        """Reserves all pools, or none. Raises ResourceError."""
        for each in self.settings:
            if not self.plan.groups_on(each.name):
                raise ResourceError(f"pool {each.name}: no role uses it; remove it")
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
        """Returns the pool with the slots of a role's processes; a view of it if the pool's devices are shared by
        several processes. Raises ConfigurationError for a role without a pool."""
        return self._views[self.plan.group_of(role)]
