"""A resource pool: equal nodes with equally many devices, reserved as placement groups before anything starts."""

from __future__ import annotations

import time
from dataclasses import dataclass

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from rljob_trainer.cluster.placement import check_feasible
from rljob_trainer.errors import ResourceError


@dataclass(frozen=True)
class PoolSettings:
    """What to reserve: `num_nodes` x `num_devices_per_node` bundles, each a device (or, on CPUs, only cores)."""

    name: str
    num_nodes: int
    num_devices_per_node: int
    use_gpu: bool
    num_cpus_per_device: float
    timeout_seconds: float

    @property
    def bundle(self) -> dict[str, float]:
        """Resources of one worker process."""
        return {"CPU": self.num_cpus_per_device, **({"GPU": 1.0} if self.use_gpu else {})}


@dataclass(frozen=True)
class Slot:
    """The place of one worker process."""

    rank: int
    node_rank: int
    local_rank: int
    group: PlacementGroup
    bundle_index: int


class ResourcePool:
    """One placement group per node, all devices of a node in one group."""

    def __init__(self, settings: PoolSettings) -> None:
        """Reserves. Raises ResourceError that says what is missing: at once when the cluster can never fit the pool,
        after the timeout when it does not become free."""
        check_feasible(settings.name, settings.bundle, settings.num_nodes, settings.num_devices_per_node)
        self.settings = settings
        self.groups = [
            placement_group([settings.bundle] * settings.num_devices_per_node, strategy="STRICT_PACK")
            for _ in range(settings.num_nodes)
        ]
        self._wait()

    def slots(self) -> list[Slot]:
        """One per worker, ranks in the order of the nodes' addresses, so that they are the same after a restart."""
        table = ray.util.placement_group_table()
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}

        def address(group: PlacementGroup) -> str:
            return str(addresses[table[group.id.hex()]["bundles_to_node_id"][0]])

        per_node = self.settings.num_devices_per_node
        return [
            Slot(node_rank * per_node + local_rank, node_rank, local_rank, group, local_rank)
            for node_rank, group in enumerate(sorted(self.groups, key=address))
            for local_rank in range(per_node)
        ]

    def release(self) -> None:
        """Gives the reservation back."""
        for group in self.groups:
            remove_placement_group(group)

    def _wait(self) -> None:
        deadline = time.monotonic() + self.settings.timeout_seconds
        for group in self.groups:
            remaining = max(0.0, deadline - time.monotonic())
            if not group.wait(timeout_seconds=remaining):
                self.release()
                raise ResourceError(
                    f"pool {self.settings.name}: {self.settings.num_nodes} x {self.settings.num_devices_per_node} "
                    f"bundles of {self.settings.bundle} were not free within {self.settings.timeout_seconds:.0f} s "
                    f"(free now: {_rounded(ray.available_resources())}); stop what uses them or wait longer"
                )


def _rounded(resources: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 2) for name, value in resources.items() if name in ("CPU", "GPU", "memory")}
