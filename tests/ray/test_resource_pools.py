"""Pools on a real Ray cluster of four nodes: placement, order, shares of a device, parts of a pool, waiting, and
cleanup."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rljob_testing.messages import Mentions
from rljob_testing.ray_clusters.ray_nodes import LocationReporter, RayNode, ray_nodes
from rljob_trainer.errors import ResourceError
from rljob_trainer.pools import reservation
from rljob_trainer.pools.pool_manager import ResourcePoolManager, plan_roles
from rljob_trainer.pools.reservation import release_by_id
from rljob_trainer.pools.resource_pool import PoolSettings, ResourcePool, reserve_pools

pytestmark = [pytest.mark.ray]

MIB = 2**20
NODES = (
    RayNode("127.0.0.3", num_cpus=1),
    RayNode("127.0.0.10", num_cpus=4, num_gpus=2, resources={"accelerator_type:A100": 1}),
    RayNode("127.0.0.9", num_cpus=4, num_gpus=2, memory_bytes=512 * MIB, resources={"disk": 1}),
    RayNode("127.0.0.9", num_cpus=4, num_gpus=4, object_store_bytes=100 * MIB),
)


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[Cluster]:
    with ray_nodes(NODES) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def _nothing_is_reserved() -> Iterator[None]:
    yield
    assert held_groups() == []
    # Ray reports it a moment late, and the next test starts from what Ray reports.
    wait_until(lambda: all(node.free == node.total for node in reservation.cluster_nodes()))


def held_groups() -> list[str]:
    """Names of the placement groups that hold resources or wait for them."""
    return sorted(group["name"] for group in placement_group_table().values() if group["state"] != "REMOVED")


def settings(name: str, num_nodes: int, num_devices: int, *, timeout: float = 20, **others: object) -> PoolSettings:
    values = {"use_gpu": True, "num_cpus_per_device": 1, **others}
    return PoolSettings(name, num_nodes, num_devices, timeout_seconds=timeout, **values)  # type: ignore[arg-type]


@contextmanager
def reserved(*wanted: PoolSettings) -> Iterator[list[ResourcePool]]:
    pools = reserve_pools(wanted)
    try:
        yield pools
    finally:
        for pool in pools:
            pool.release()


@contextmanager
def occupied(address: str, **resources: float) -> Iterator[Callable[[], None]]:
    """Occupies part of a node until the returned function is called."""
    node = next(node for node in reservation.cluster_nodes() if node.address == address)
    group = placement_group(
        [{**resources}], name="somebody-else", bundle_label_selector=[{"ray.io/node-id": node.node_id}]
    )
    assert group.wait(20)
    wait_until(lambda: any(entry.free != entry.total for entry in reservation.cluster_nodes()))
    try:
        yield lambda: remove_placement_group(group)
    finally:
        remove_placement_group(group)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def where_processes_are(pool: ResourcePool) -> list[tuple[str, list[int]]]:
    """Node id and devices of a process in each slot."""
    resources = pool.process_resources
    actors = [
        ray.remote(LocationReporter)
        .options(
            num_cpus=resources.num_cpus,
            num_gpus=resources.num_gpus,
            memory=resources.memory_bytes or None,
            scheduling_strategy=PlacementGroupSchedulingStrategy(slot.group, slot.bundle_index),
        )
        .remote()
        for slot in pool.slots()
    ]
    return ray.get([actor.locate.remote() for actor in actors], timeout=120)  # type: ignore[no-any-return]


def test_ranks_follow_the_order_of_node_addresses_on_every_start() -> None:
    orders = []
    for _ in range(2):
        with reserved(settings("main", 3, 2)) as [pool]:
            slots = pool.slots()
            assert [slot.address for slot in slots] == ["127.0.0.9"] * 4 + ["127.0.0.10"] * 2
            assert slots[0].node_id < slots[2].node_id
            assert [(slot.rank, slot.node_rank, slot.local_rank) for slot in slots] == [
                *((0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1), (4, 2, 0), (5, 2, 1))
            ]
            table = placement_group_table()
            for slot in slots:
                entry = table[slot.group.id.hex()]
                assert (entry["strategy"], entry["bundles_to_node_id"][slot.bundle_index]) == (
                    "STRICT_PACK",
                    slot.node_id,
                )
            orders.append([slot.node_id for slot in slots])
    assert orders[0] == orders[1]


def test_shares_of_a_device_run_on_that_device() -> None:
    """Two roles that are not fused, on two devices each. A process that finds no free device raises an error."""
    wanted = settings("main", 1, 2, accelerator_type="A100", memory_bytes_per_device=100 * MIB)
    plan = plan_roles(["main"], {"actor": "main", "ref": "main", "reward": "main"}, [["reward"]])
    with ResourcePoolManager([wanted], plan) as manager:
        actor, reward = manager.pool_of("actor"), manager.pool_of("reward")
        assert manager.pool_of("ref") is actor
        assert (actor.process_resources.num_gpus, actor.process_resources.memory_bytes) == (0.5, 50 * MIB)
        assert {slot.address for slot in actor.slots()} == {"127.0.0.10"}
        node_id = actor.slots()[0].node_id
        first = where_processes_are(actor)
        assert sorted(first) == [(node_id, [0]), (node_id, [1])]
        assert where_processes_are(reward) == first


def test_parts_run_on_the_pools_reservation_and_do_not_release_it() -> None:
    with reserved(settings("main", 2, 2, num_cpus_per_device=0.5)) as [pool]:
        names = held_groups()
        left, right = pool.split([1, 3])
        assert held_groups() == names
        nodes = [slot.node_id for slot in pool.slots()]
        assert [node for node, _ in where_processes_are(right)] == nodes[1:]
        for view in (left, right):
            view.release()
        assert held_groups() == names


def test_pools_are_packed_together() -> None:
    """Each pool alone would find its nodes; the small one must not take the only node with four GPUs."""
    with reserved(settings("small", 2, 2), settings("large", 1, 4)) as [small, large]:
        assert {slot.node_id for slot in small.slots()}.isdisjoint(slot.node_id for slot in large.slots())
    # Four GPUs are left, enough for one of them only.
    with pytest.raises(ResourceError, match=r"^pools x, y: .*not all together: GPU is missing"):
        reserve_pools([settings("x", 1, 4), settings("y", 1, 3)])


def test_pools_without_gpus_avoid_nodes_with_gpus() -> None:
    with reserved(settings("cores", 1, 1, use_gpu=False)) as [pool]:
        assert [slot.address for slot in pool.slots()] == ["127.0.0.3"]


@pytest.mark.parametrize(
    ("wanted", "lacking"),
    [
        (settings("p", 1, 8), r"127.0.0.9 \(\w{8}\) lacks CPU \(8 needed, 4 there\), GPU \(8 needed, 4 there\)"),
        (settings("p", 3, 1, memory_bytes_per_device=768 * MIB), r"memory \(0.75 GiB needed, 0.5 GiB there\)"),
        (settings("p", 2, 1, object_store_bytes_per_node=99 * MIB), r"object store \(0.0966797 GiB needed, 0.0745058"),
        (settings("p", 1, 1, accelerator_type="H100"), r"127.0.0.10 lacks accelerator type H100 \(A100 there\)"),
        (settings("p", 1, 2, custom_resources={"disk": 1}), r"disk \(2 needed, 1 there\)"),
    ],
)
def test_impossible_pools_are_rejected_at_once(wanted: PoolSettings, lacking: str) -> None:
    with pytest.raises(ResourceError, match=f"^pool p: needs .*{lacking}.*; add nodes "):
        ResourcePool(wanted)


def test_all_resources_of_a_node_can_be_reserved() -> None:
    wanted = settings("p", 1, 1, memory_bytes_per_device=500 * MIB, custom_resources={"disk": 1})
    with reserved(wanted) as [pool]:
        assert [slot.address for slot in pool.slots()] == ["127.0.0.9"]


def test_waiting_is_logged_and_ends_when_resources_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reservation, "REPORT_SECONDS", 0.5)
    logged: list[str] = []
    with occupied("127.0.0.10", GPU=2) as give_back:

        def record(text: str) -> None:
            logged.append(text)
            # Logged at once, and then every half second.
            if len(logged) == 3:
                give_back()

        ResourcePool(settings("main", 3, 2, timeout=300), record).release()
    assert len(logged) >= 3
    assert logged[0] == Mentions("pool main:", "2 of 3 nodes", "waiting for GPU", "127.0.0.9")
    assert logged[0] == Mentions("127.0.0.10 CPU 4 of 4, GPU 0 of 2")


def test_the_deadline_error_reports_what_was_free_and_who_held_the_rest() -> None:
    with occupied("127.0.0.10", GPU=2, CPU=1):
        start = time.monotonic()
        with pytest.raises(ResourceError) as raised:
            ResourcePool(settings("main", 3, 2, timeout=1))
        assert time.monotonic() - start >= 1
        assert held_groups() == ["somebody-else"]
    text = str(raised.value)
    assert text == Mentions("pool main:", "2 of 3 nodes", "waiting for GPU", "timed out after 1 s")
    assert text == Mentions("127.0.0.10 CPU 3 of 4, GPU 0 of 2")
    assert text == Mentions("in use: 127.0.0.10 CPU 1, GPU 2 by placement groups somebody-else")
    assert text == Mentions("spec.runPolicy.provisioningDeadlineSeconds")


def test_a_reservation_that_another_program_takes_first_is_retried() -> None:
    """Ray reports free resources a moment late: the other reservation is not visible before our own is requested."""
    node = next(node for node in reservation.cluster_nodes() if node.address == "127.0.0.10")
    groups: list[PlacementGroup] = []

    def take_first(*arguments: object, **options: object) -> PlacementGroup:
        if not groups:
            selector = [{"ray.io/node-id": node.node_id}]
            groups.append(placement_group([{"GPU": 2}], name="fast", bundle_label_selector=selector))
            assert groups[0].wait(20)
            threading.Timer(reservation.GRANT_SECONDS + 1, remove_placement_group, [groups[0]]).start()
        return placement_group(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reservation, "placement_group", take_first)
        start = time.monotonic()
        pool = ResourcePool(settings("main", 3, 2))
    assert time.monotonic() - start > reservation.GRANT_SECONDS
    assert len(held_groups()) == 3
    assert len(pool.slots()) == 6
    pool.release()


def test_ctrl_c_while_waiting_leaves_no_reservation() -> None:
    with occupied("127.0.0.10", GPU=2):
        threading.Timer(1.0, os.kill, [os.getpid(), signal.SIGINT]).start()
        with pytest.raises(KeyboardInterrupt):
            ResourcePool(settings("main", 3, 2))
        assert held_groups() == ["somebody-else"]


def test_ctrl_c_just_after_a_group_was_created_leaves_no_reservation(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[PlacementGroup] = []

    def interrupted(*arguments: object, **options: object) -> PlacementGroup:
        made.append(placement_group(*arguments, **options))
        if len(made) == 2:
            raise KeyboardInterrupt
        return made[-1]

    monkeypatch.setattr(reservation, "placement_group", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ResourcePool(settings("main", 3, 2))
    assert len(made) == 2


def test_a_failed_run_releases_all_pools() -> None:
    pools = [settings("left", 1, 2), settings("right", 1, 2)]
    plan = plan_roles(["left", "right"], {"actor": "left", "critic": "right"})

    def run() -> None:
        with ResourcePoolManager(pools, plan) as manager:
            assert manager.num_devices == 4
            assert [slot.group.id for slot in manager.pool_of("critic").slots()] == [
                slot.group.id for slot in manager.pools["right"].slots()
            ]
            assert len(held_groups()) == 2
            raise ValueError("of the run")

    with pytest.raises(ValueError, match="of the run"):
        run()


OTHER_PROCESS = """
import sys
import ray
from rljob_trainer.pools.resource_pool import PoolSettings, reserve_pools
ray.init(address=sys.argv[1], log_to_driver=False)
ended, kept = reserve_pools(
    [PoolSettings("ended", 1, 1, True, 1, 20), PoolSettings("kept", 2, 2, True, 1, 20, is_detached=True)]
)
print(*kept.group_ids)
"""


def test_detached_pools_survive_their_process(cluster: Cluster) -> None:
    command = [sys.executable, "-c", OTHER_PROCESS, str(cluster.address)]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    group_ids = output.split()
    assert len(group_ids) == 2
    wait_until(lambda: len(held_groups()) == 2)
    assert all(name.startswith("kept/") for name in held_groups())
    release_by_id(group_ids)
    assert held_groups() == []
    # Releasing them twice is no error.
    release_by_id(group_ids)


def test_a_lost_node_is_not_waited_for(cluster: Cluster) -> None:
    extra = cluster.add_node(**RayNode("127.0.0.11", num_cpus=4, num_gpus=2).arguments())
    with occupied("127.0.0.10", GPU=2):
        removal = threading.Timer(1.0, cluster.remove_node, [extra])
        removal.start()
        with pytest.raises(
            ResourceError, match=r"^pool main: needs 4 nodes with CPU 2, GPU 2 each, but only 3 of 4 nodes"
        ):
            ResourcePool(settings("main", 4, 2, timeout=300))
        # Otherwise the cluster's teardown removes the node a second time.
        removal.join()
