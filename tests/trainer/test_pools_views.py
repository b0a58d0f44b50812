"""Ranks of pools, and views of them: parts, merged pools, shares of devices."""

from __future__ import annotations

from dataclasses import replace

import pytest
from ray._raylet import JobID, PlacementGroupID
from ray.util.placement_group import PlacementGroup

from rljob_trainer.errors import ResourceError
from rljob_trainer.pools.reservation import ReservedNode
from rljob_trainer.pools.resource_pool import PoolSettings, ResourcePool

SETTINGS = PoolSettings("main", 2, 3, use_gpu=True, num_cpus_per_device=1, timeout_seconds=1)


def reserved(address: str, node_id: str) -> ReservedNode:
    return ReservedNode(node_id, address, PlacementGroup(PlacementGroupID.of(JobID.from_int(1))))


def pool(*addresses: str, settings: PoolSettings = SETTINGS) -> ResourcePool:
    """A pool on nodes whose ids are their addresses."""
    return ResourcePool(settings, nodes=[reserved(address, address) for address in addresses])


def slots_of(pool: ResourcePool) -> list[tuple[int, int, int, str, int]]:
    return [(slot.rank, slot.node_rank, slot.local_rank, slot.address, slot.bundle_index) for slot in pool.slots()]


def test_ranks_follow_numeric_addresses() -> None:
    assert slots_of(pool("10.0.0.10", "10.0.0.9")) == [
        (0, 0, 0, "10.0.0.9", 0),
        (1, 0, 1, "10.0.0.9", 1),
        (2, 0, 2, "10.0.0.9", 2),
        (3, 1, 0, "10.0.0.10", 0),
        (4, 1, 1, "10.0.0.10", 1),
        (5, 1, 2, "10.0.0.10", 2),
    ]


def test_two_nodes_with_one_address_are_two() -> None:
    nodes = [reserved("10.0.0.1", "z"), reserved("10.0.0.1", "a")]
    slots = ResourcePool(SETTINGS, nodes=nodes).slots()
    assert [slot.node_id for slot in slots] == ["a", "a", "a", "z", "z", "z"]
    assert [slot.node_rank for slot in slots] == [0, 0, 0, 1, 1, 1]
    assert slots[0].group.id == nodes[1].group.id


def test_a_split_has_consecutive_ranks_that_start_at_zero() -> None:
    whole = pool("a", "b")
    small, large = whole.split([2, 4])
    assert slots_of(small) == [(0, 0, 0, "a", 0), (1, 0, 1, "a", 1)]
    assert slots_of(large) == [(0, 0, 0, "a", 2), (1, 1, 0, "b", 0), (2, 1, 1, "b", 1), (3, 1, 2, "b", 2)]
    assert [slot.group.id for slot in [*small.slots(), *large.slots()]] == [slot.group.id for slot in whole.slots()]
    assert (small.settings.name, large.settings.name) == ("main[0-1]", "main[2-5]")
    assert (small.world_size, large.world_size, whole.world_size) == (2, 4, 6)


@pytest.mark.parametrize("sizes", [[2, 3], [6, 1], [6, 0], [7, -1], []])
def test_an_invalid_split_is_rejected(sizes: list[int]) -> None:
    with pytest.raises(ResourceError, match=r"pool main: cannot be split into .* \(it has 6\); give sizes"):
        pool("a", "b").split(sizes)


@pytest.mark.parametrize("num_shares", [2, 3, 6, 7, 64])
def test_shares_do_not_exceed_the_device(num_shares: int) -> None:
    settings = replace(SETTINGS, memory_bytes_per_device=1000, custom_resources={"disk": 0.5})
    views = pool("a", "b", settings=settings).shares(num_shares)
    assert len(views) == num_shares
    for name in ("num_gpus", "num_cpus"):
        # In Ray's steps of 1/10,000, and not needlessly less.
        steps = [vars(view.process_resources)[name] * 10_000 for view in views]
        assert all(step == pytest.approx(round(step)) for step in steps)
        assert 10_000 - num_shares < sum(round(step) for step in steps) <= 10_000
    assert sum(view.process_resources.memory_bytes for view in views) <= 1000


def test_a_share_has_all_slots_and_its_part_of_each() -> None:
    whole = pool("a", "b", settings=replace(SETTINGS, memory_bytes_per_device=1000, custom_resources={"disk": 0.5}))
    view = whole.shares(2)[1]
    assert view.slots() == whole.slots()
    assert view.settings.name == "main[2/2]"
    mine = view.process_resources
    assert (mine.num_cpus, mine.num_gpus, mine.memory_bytes, mine.custom_resources) == (0.5, 0.5, 500, {"disk": 0.25})
    part = view.split([1, 5])[0]
    assert part.process_resources == mine
    assert part.shares(2)[0].process_resources.num_gpus == 0.25


def test_a_process_of_a_pool_has_a_whole_device() -> None:
    mine = pool("a", "b").process_resources
    assert (mine.num_cpus, mine.num_gpus, mine.memory_bytes, mine.custom_resources) == (1, 1, 0, {})
    assert pool("a", "b", settings=replace(SETTINGS, use_gpu=False)).process_resources.num_gpus == 0


def test_a_bundle_requests_its_resources() -> None:
    settings = replace(
        SETTINGS,
        memory_bytes_per_device=2**30,
        accelerator_type="A100",
        custom_resources={"disk": 0.5},
        object_store_bytes_per_node=5,
    )
    assert settings.bundle == {
        "CPU": 1,
        "GPU": 1.0,
        "memory": 2.0**30,
        "accelerator_type:A100": 0.001,
        "disk": 0.5,
    }
    # A node provides three times as much, and one object store.
    assert settings.need.per_node["GPU"] == 3
    assert settings.need.per_node["object_store_memory"] == 5
    assert replace(SETTINGS, use_gpu=False).bundle == {"CPU": 1}


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"num_nodes": 0}, r"pool main: the number of nodes must be 1 or more \(seen: 0\)"),
        ({"num_nodes": -1}, r"the number of nodes must be 1 or more \(seen: -1\)"),
        ({"num_devices_per_node": 1.5}, r"the number of devices per node must be 1 or more \(seen: 1.5\)"),
        ({"num_cpus_per_device": -1}, r"CPUs per device must be 0 or more \(seen: -1\)"),
        ({"num_cpus_per_device": 1e-5}, r"CPUs per device must be 0.0001 or more, or 0 with a GPU \(seen: 1e-05\)"),
        ({"num_cpus_per_device": 0, "use_gpu": False}, r"CPUs per device must be 0.0001 or more, or 0 with a GPU"),
        ({"memory_bytes_per_device": -1}, r"memory per device must be 0 or more \(seen: -1\)"),
        ({"timeout_seconds": float("nan")}, r"timeout must be 0 or more \(seen: nan\)"),
        ({"custom_resources": {"fast": -1}}, r"fast must be 0 or more \(seen: -1\)"),
        ({"custom_resources": {"CPU": 1}}, r"CPU is not a custom resource"),
    ],
)
def test_impossible_settings_are_rejected(wrong: dict[str, object], problem: str) -> None:
    with pytest.raises(ResourceError, match=problem):
        replace(SETTINGS, **wrong)  # type: ignore[arg-type]


def test_fractions_that_ray_does_not_support_are_rejected() -> None:
    for num_shares in (0, 20_000):
        with pytest.raises(ResourceError, match=rf"cannot be shared by {num_shares} processes; .* 0.0001"):
            pool("10.0.0.1").shares(num_shares)


def test_pools_and_parts_of_pools_are_merged() -> None:
    first, second = pool("b"), pool("a", settings=replace(SETTINGS, name="other"))
    merged = ResourcePool.merged("all", [first, second])
    assert slots_of(merged) == [
        *((rank, 0, rank, "a", rank) for rank in range(3)),
        *((3 + rank, 1, rank, "b", rank) for rank in range(3)),
    ]
    assert (merged.settings.name, merged.group_ids, merged.world_size) == ("all", [], 6)
    whole = pool("a", "b")
    parts = whole.split([1, 4, 1])
    assert slots_of(ResourcePool.merged("again", parts[::-1])) == slots_of(whole)
    ends = ResourcePool.merged("ends", [parts[0], parts[2]])
    assert slots_of(ends) == [(0, 0, 0, "a", 0), (1, 1, 0, "b", 2)]


def test_pools_that_cannot_be_merged_are_rejected() -> None:
    whole = pool("a")
    with pytest.raises(ResourceError, match="pool none: there is no pool to merge"):
        ResourcePool.merged("none", [])
    with pytest.raises(ResourceError, match="pool twice: two of the pools have the same slot"):
        ResourcePool.merged("twice", [whole, whole.split([1, 2])[0]])
    other = pool("b", settings=replace(SETTINGS, name="other", num_cpus_per_device=2))
    with pytest.raises(ResourceError, match="pool mixed: the processes of main and other have different resources"):
        ResourcePool.merged("mixed", [whole, other])
    detached = pool("b", settings=replace(SETTINGS, name="kept", is_detached=True))
    with pytest.raises(ResourceError, match="pool mixed: only one of main and kept is detached"):
        ResourcePool.merged("mixed", [whole, detached])
    assert ResourcePool.merged("both", [detached, pool("c", settings=detached.settings)]).settings.is_detached
