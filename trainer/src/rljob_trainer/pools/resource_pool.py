"""Resource pools: equal nodes with equally many devices, reserved as placement groups before anything starts; and views
of pools: some of their ranks, several pools as one, or a share of each device.

A pool owns its reservation. A view has slots on the same placement groups and owns nothing: only the pool releases the
groups.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from types import TracebackType
from typing import Self

from ray.util.placement_group import PlacementGroup

from rljob_trainer.errors import ResourceError
from rljob_trainer.pools.fitting import ACCELERATOR_PREFIX, MEMORY, OBJECT_STORE, UNITS, PoolNeed, node_order
from rljob_trainer.pools.reservation import Report, ReservedNode, log_progress, release, reserve

ACCELERATOR_PART = 0.001
"""Amount of the resource `accelerator_type:NAME` that each device requests: a node has only 1 for all of its
devices."""


@dataclass(frozen=True)
class PoolSettings:
    """What to reserve: `num_nodes` x `num_devices_per_node` bundles, each with one device (or, on CPUs, only cores)."""

    name: str
    num_nodes: int
    num_devices_per_node: int
    use_gpu: bool
    num_cpus_per_device: float
    timeout_seconds: float
    memory_bytes_per_device: int = 0
    """Host memory that Ray reserves per device, in bytes; 0 for none."""
    object_store_bytes_per_node: int = 0
    """Required size of each node's object store, in bytes."""
    accelerator_type: str | None = None
    """Ray's name of the accelerator type, such as `A100`; None: any type."""
    custom_resources: Mapping[str, float] = field(default_factory=dict)
    """Custom Ray resources per device, such as `{"rljob-pool-train": 1.0}`."""
    is_detached: bool = False
    """Whether the reservation outlives this process. Then the caller must release it (`group_ids`, `release_by_id`)."""

    def __post_init__(self) -> None:
        """Raises ResourceError for invalid amounts."""
        for what, number in {"nodes": self.num_nodes, "devices per node": self.num_devices_per_node}.items():
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise ResourceError(f"pool {self.name}: the number of {what} must be 1 or more (seen: {number!r})")
        amounts = {
            "CPUs per device": self.num_cpus_per_device,
            "memory per device": self.memory_bytes_per_device,
            "object store per node": self.object_store_bytes_per_node,
            "timeout": self.timeout_seconds,
            **self.custom_resources,
        }
        for what, amount in amounts.items():
            if not 0 <= amount < math.inf:
                raise ResourceError(f"pool {self.name}: {what} must be 0 or more (seen: {amount:g})")
        if 0 < self.num_cpus_per_device < 1 / UNITS or not (self.use_gpu or self.num_cpus_per_device):
            raise ResourceError(
                f"pool {self.name}: CPUs per device must be {1 / UNITS:g} or more, or 0 with a GPU (seen: "
                f"{self.num_cpus_per_device:g})"
            )
        for name in self.custom_resources:
            if name in ("CPU", "GPU", MEMORY, OBJECT_STORE):
                raise ResourceError(f"pool {self.name}: {name} is not a custom resource; use the pool's setting for it")

    @property
    def bundle(self) -> dict[str, float]:
        """The resources of one device."""
        return {
            "CPU": self.num_cpus_per_device,
            **({"GPU": 1.0} if self.use_gpu else {}),
            **({MEMORY: float(self.memory_bytes_per_device)} if self.memory_bytes_per_device else {}),
            **({f"{ACCELERATOR_PREFIX}{self.accelerator_type}": ACCELERATOR_PART} if self.accelerator_type else {}),
            **self.custom_resources,
        }

    @property
    def need(self) -> PoolNeed:
        """The resources that the pool needs from the cluster."""
        return PoolNeed(
            self.name, self.num_nodes, self.num_devices_per_node, self.bundle, float(self.object_store_bytes_per_node)
        )


@dataclass(frozen=True)
class Slot:
    """Where one worker process runs: its rank, and its bundle of a placement group."""

    rank: int
    node_rank: int
    """The number of the node, from 0, among the nodes of the pool or view."""
    local_rank: int
    """The number of the slot, from 0, among the slots on its node."""
    group: PlacementGroup
    bundle_index: int
    """The number of the bundle, from 0, in the placement group."""
    node_id: str = ""
    address: str = ""


@dataclass(frozen=True)
class ProcessResources:
    """The resources of one process, named like the options of a Ray actor."""

    num_cpus: float
    num_gpus: float
    memory_bytes: int
    custom_resources: Mapping[str, float]


class ResourcePool:
    """A pool of equal nodes, reserved with one placement group per node, which has all devices of the node."""

    def __init__(
        self, settings: PoolSettings, report: Report = log_progress, nodes: Sequence[ReservedNode] | None = None
    ) -> None:
        """Reserves the pool, unless `nodes` were already reserved together with other pools (`reserve_pools`).

        Raises ResourceError that says what is missing: immediately if the pool can never fit the cluster, else after
        the timeout. `report` is called with messages about what the reservation waits for."""
        self.settings = settings
        self.num_shares = 1
        """Number of processes that share a device."""
        if nodes is None:
            [nodes] = reserve([settings.need], settings.timeout_seconds, [settings.is_detached], report)
        self.groups: list[PlacementGroup] = [node.group for node in nodes]
        unnumbered = [
            Slot(0, 0, 0, node.group, index, node.node_id, node.address)
            for node in nodes
            for index in range(settings.num_devices_per_node)
        ]
        self._slots = _numbered(unnumbered)

    def slots(self) -> list[Slot]:
        """Returns one slot per worker process. Ranks follow the order of the nodes' addresses, so they are the same
        after a restart on the same nodes."""
        return list(self._slots)

    @property
    def group_ids(self) -> list[str]:
        """Ray's ids of the placement groups that this pool owns; empty for a view, and after `release`."""
        return [group.id.hex() for group in self.groups]

    @property
    def world_size(self) -> int:
        """Number of slots."""
        return len(self._slots)

    @property
    def process_resources(self) -> ProcessResources:
        """The resources that each process may request, so that all processes that share a device fit."""
        settings = self.settings
        custom = {name: _share(amount, self.num_shares) for name, amount in settings.custom_resources.items()}
        return ProcessResources(
            num_cpus=_share(settings.num_cpus_per_device, self.num_shares),
            num_gpus=_share(1.0, self.num_shares) if settings.use_gpu else 0.0,
            memory_bytes=settings.memory_bytes_per_device // self.num_shares,
            custom_resources={name: amount for name, amount in custom.items() if amount > 0},
        )

    def shares(self, num_shares: int) -> list[PoolView]:
        """Returns `num_shares` views, each with all slots. The processes of the views share each device in equal parts.
        Raises ResourceError for a number below 1, and for parts that are smaller than Ray's unit."""
        smallest = min(amount for name, amount in self.settings.bundle.items() if name in ("CPU", "GPU") and amount > 0)
        if num_shares < 1 or not _share(smallest, self.num_shares * num_shares):
            raise ResourceError(
                f"pool {self.settings.name}: a device cannot be shared by {num_shares} processes; use 1 or more, and "
                f"so few that each gets at least {1 / UNITS:g} of a CPU or GPU (Ray's smallest unit)"
            )
        return [
            PoolView(self._named(f"{index + 1}/{num_shares}"), self._slots, self.num_shares * num_shares)
            for index in range(num_shares)
        ]

    def split(self, sizes: Sequence[int]) -> list[PoolView]:
        """Returns views of consecutive ranks, one per size. Raises ResourceError unless the sizes add up to all
        ranks."""
        if sum(sizes) != len(self._slots) or any(size < 1 for size in sizes):
            raise ResourceError(
                f"pool {self.settings.name}: cannot be split into {list(sizes)} ranks (it has {len(self._slots)}); "
                "give sizes of at least 1 that add up to its number of ranks"
            )
        return [
            PoolView(self._named(f"{first}-{end - 1}"), self._slots[first:end], self.num_shares)
            for first, end in pairwise([0, *accumulate(sizes)])
        ]

    @staticmethod
    def merged(name: str, pools: Sequence[ResourcePool]) -> PoolView:
        """Returns one view with all slots of several pools or views. Raises ResourceError without pools, for a slot
        that occurs twice, for pools with different resources per process, and if only some pools are detached."""
        if not pools:
            raise ResourceError(f"pool {name}: there is no pool to merge; give one or more")
        slots = [slot for pool in pools for slot in pool.slots()]
        if len({(slot.group.id, slot.bundle_index) for slot in slots}) < len(slots):
            raise ResourceError(f"pool {name}: two of the pools have the same slot; name each pool or view once")
        for pool in pools:
            if pool.process_resources != pools[0].process_resources:
                raise ResourceError(
                    f"pool {name}: the processes of {pools[0].settings.name} and {pool.settings.name} have different "
                    f"resources ({pools[0].process_resources} and {pool.process_resources}); merge only equal pools"
                )
            if pool.settings.is_detached != pools[0].settings.is_detached:
                raise ResourceError(
                    f"pool {name}: only one of {pools[0].settings.name} and {pool.settings.name} is detached (outlives "
                    "this process); merge only equal pools"
                )
        return PoolView(replace(pools[0].settings, name=name), slots, pools[0].num_shares)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Releases the reservation."""
        self.release()

    def release(self) -> None:
        """Releases the reservation; a view releases nothing."""
        groups, self.groups = self.groups, []
        release(groups)

    def _named(self, part: str) -> PoolSettings:
        return replace(self.settings, name=f"{self.settings.name}[{part}]")


class PoolView(ResourcePool):
    """A view: slots on the reservations of one or several pools. Its settings are those of the (first) pool, with
    another name."""

    def __init__(self, settings: PoolSettings, slots: Sequence[Slot], num_shares: int) -> None:
        self.settings = settings
        self.groups = []
        self.num_shares = num_shares
        self._slots = _numbered(slots)


def reserve_pools(settings: Sequence[PoolSettings], report: Report = log_progress) -> list[ResourcePool]:
    """Reserves all pools, or none. The shortest timeout applies to all of them. Raises ResourceError as `ResourcePool`
    does, and for duplicate names."""
    if not settings:
        return []
    names = [each.name for each in settings]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ResourceError(f"pools: duplicate names {', '.join(twice)}; give each pool its own name")
    reserved = reserve(
        [each.need for each in settings],
        min(each.timeout_seconds for each in settings),
        [each.is_detached for each in settings],
        report,
    )
    return [ResourcePool(each, report, nodes) for each, nodes in zip(settings, reserved, strict=True)]


def _numbered(slots: Sequence[Slot]) -> list[Slot]:
    """Returns the slots with ranks, ordered by node address, then by placement group, then by device."""
    groups = {group: number for number, group in enumerate(dict.fromkeys(slot.group.id for slot in slots))}
    ordered = sorted(
        slots, key=lambda slot: (node_order(slot.address, slot.node_id), groups[slot.group.id], slot.bundle_index)
    )
    node_ranks = {node_id: rank for rank, node_id in enumerate(dict.fromkeys(slot.node_id for slot in ordered))}
    num_on_node: Counter[str] = Counter()
    numbered = []
    for rank, slot in enumerate(ordered):
        local_rank = num_on_node[slot.node_id]
        numbered.append(replace(slot, rank=rank, node_rank=node_ranks[slot.node_id], local_rank=local_rank))
        num_on_node[slot.node_id] += 1
    return numbered


def _share(amount: float, num_shares: int) -> float:
    """Returns one share of an amount, rounded down to Ray's smallest unit, so that the sum does not exceed the
    amount."""
    return math.floor(amount * UNITS / num_shares + 1e-6) / UNITS
