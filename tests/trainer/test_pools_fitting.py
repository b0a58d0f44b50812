"""Which nodes pools get, and the errors for pools that do not fit, or not yet."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_testing.messages import Mentions
from rljob_trainer.errors import ResourceError
from rljob_trainer.pools import fitting
from rljob_trainer.pools.fitting import (
    ClusterNode,
    PoolNeed,
    check_feasible,
    find_placement,
    free_nodes,
    node_order,
    timeout_text,
    waiting_text,
)

GIB = float(2**30)
ADVICE = f"; {fitting._ADVICE}"


def node(address: str, free: dict[str, float] | None = None, node_id: str = "", **total: float) -> ClusterNode:
    return ClusterNode(node_id or f"id-of-{address}", address, total, total if free is None else {**total, **free})


def need(pool: str, num_nodes: int, num_bundles: int = 1, object_store: float = 0, **bundle: float) -> PoolNeed:
    return PoolNeed(pool, num_nodes, num_bundles, bundle, object_store)


def error_of(needs: list[PoolNeed], nodes: list[ClusterNode]) -> str:
    with pytest.raises(ResourceError) as raised:
        check_feasible(needs, nodes)
    return str(raised.value)


def test_nodes_are_ordered_by_numeric_address() -> None:
    nodes = [
        ("10.0.0.10", "a"),
        ("node-b", "c"),
        ("10.0.0.9", "z"),
        ("10.0.0.9", "y"),
        ("fd00::2", "f"),
        ("9.0.0.1", ""),
    ]
    assert [address for address, _ in sorted(nodes, key=lambda address_and_id: node_order(*address_and_id))] == [
        *("9.0.0.1", "10.0.0.9", "10.0.0.9", "10.0.0.10", "fd00::2", "node-b")
    ]
    assert node_order("10.0.0.9", "y") < node_order("10.0.0.9", "z")


def test_each_node_lists_what_it_lacks_and_equal_ones_are_grouped() -> None:
    nodes = [
        node("10.0.0.1", CPU=8, GPU=4),
        node("10.0.0.2", CPU=2, GPU=1),
        node("10.0.0.3", CPU=8, GPU=2),
        node("10.0.0.4", CPU=8, GPU=2),
    ]
    text = error_of([need("main", 2, 4, CPU=1, GPU=1)], nodes)
    assert text == Mentions("pool main:", "2 nodes", "CPU 4, GPU 4", "1 of 4 nodes")
    both, single = re.findall(r"10\.0\.0\.[^;]*", text)
    assert both == Mentions("10.0.0.3, 10.0.0.4", "GPU (4 needed, 2 there)", without=["CPU"])
    assert single == Mentions("10.0.0.2", "CPU (4 needed, 2 there)", "GPU (4 needed, 1 there)")
    assert text.endswith(ADVICE)


def test_memory_object_store_accelerator_and_custom_resources_are_reported() -> None:
    total = {"CPU": 1.0, "GPU": 1.0, "memory": 8 * GIB, "object_store_memory": GIB / 2, "accelerator_type:T4": 1.0}
    wanted = {"CPU": 1.0, "GPU": 1.0, "memory": 16 * GIB, "accelerator_type:A100": 0.001, "disk": 0.5}
    text = error_of([PoolNeed("main", 1, 1, wanted, GIB)], [ClusterNode("x", "a", total, total)])
    resources = "CPU 1, GPU 1, memory 16 GiB, accelerator type A100, disk 0.5, object store 1 GiB"
    assert text == Mentions("pool main:", "1 node", resources, "0 of 1 node")
    assert text == Mentions("memory (16 GiB needed, 8 GiB there)", "accelerator type A100 (T4 there)")
    assert text == Mentions("disk (0.5 needed, 0 there)", "object store (1 GiB needed, 0.5 GiB there)")
    assert "CPU (" not in text
    assert text.endswith(ADVICE)


def test_too_few_nodes_are_reported() -> None:
    text = error_of([need("main", 3, CPU=1)], [node("a", CPU=1), node("b", CPU=1)])
    assert text == Mentions("pool main:", "3 nodes", "CPU 1", "2 of 2 nodes", "only 2 nodes")
    assert text.endswith(ADVICE)


def test_two_nodes_with_one_address_are_distinguished() -> None:
    nodes = [node("a", node_id="0123456789", CPU=1), node("a", node_id="abcdefghij", CPU=4)]
    text = error_of([need("main", 2, CPU=2)], nodes)
    assert text == Mentions("1 of 2 nodes", "a (01234567)", "CPU (2 needed, 1 there)", without=["abcdefgh"])


def test_only_some_of_many_nodes_are_listed() -> None:
    nodes = [node(f"10.0.0.{i}", CPU=1, GPU=i) for i in range(1, 21)]
    text = error_of([need("main", 1, GPU=64)], nodes)
    assert text == Mentions("10.0.0.8", "GPU (64 needed, 8 there)", "12 more")
    assert "10.0.0.9 " not in text


def test_pools_that_fit_only_separately_are_reported() -> None:
    nodes = [node("a", CPU=8, GPU=4), node("b", CPU=8)]
    text = error_of([need("actor", 1, 4, CPU=1, GPU=1), need("critic", 1, 2, CPU=1, GPU=1)], nodes)
    assert text == Mentions("pools actor, critic:", "fits alone", "not all together", "GPU is missing")
    assert text == Mentions("actor 1 node with CPU 4, GPU 4", "critic 1 node with CPU 2, GPU 2")
    assert text == Mentions("a CPU 8, GPU 4", "b CPU 8, GPU 0")
    assert text.endswith(ADVICE)


def test_pools_that_lack_two_resources_together_are_reported() -> None:
    nodes = [node("a", CPU=4, GPU=4)]
    text = error_of([need("x", 1, 3, CPU=1, GPU=1), need("y", 1, 3, CPU=1, GPU=1)], nodes)
    assert text == Mentions("not all together", "CPU or GPU is missing")


def test_three_pools_that_lack_resources_in_sum_or_have_no_known_placement_are_reported() -> None:
    needs = [need("x", 1, 2, GPU=1), need("y", 1, 2, GPU=1), need("z", 1, 2, GPU=1)]
    assert error_of(needs, [node("a", GPU=5)]) == Mentions("fits alone", "not all together", "GPU is missing")
    text = error_of(needs, [node("a", GPU=3), node("b", GPU=3)])
    assert text == Mentions("fits alone", "no placement", "x 1 node with GPU 2")


def test_pools_may_share_a_node() -> None:
    check_feasible([need("actor", 1, 4, GPU=1), need("critic", 1, 4, GPU=1)], [node("a", GPU=8)])


Need = tuple[int, Mapping[str, float]]
NAMES = ("CPU", "GPU")
# Small numbers, so that pools often only just fit or only just do not.
AMOUNTS = st.fixed_dictionaries({name: st.integers(0, 4).map(float) for name in NAMES})
ROOMS = st.lists(AMOUNTS, min_size=0, max_size=4)


def some_needs(most: int) -> st.SearchStrategy[list[Need]]:
    return st.lists(st.tuples(st.integers(1, 3), AMOUNTS), min_size=1, max_size=most)


def is_valid(needs: Sequence[Need], rooms: Sequence[Mapping[str, float]], placement: Sequence[Sequence[int]]) -> bool:
    left = [dict(room) for room in rooms]
    for (num_nodes, amounts), nodes in zip(needs, placement, strict=True):
        if len(set(nodes)) != num_nodes:
            return False
        for index, name in product(nodes, NAMES):
            left[index][name] -= amounts[name]
    return all(amount >= 0 for room in left for amount in room.values())


def any_way(needs: Sequence[Need], rooms: Sequence[Mapping[str, float]]) -> bool:
    """Finds a placement by trying all."""
    choices = [list(combinations(range(len(rooms)), num_nodes)) for num_nodes, _ in needs]
    return any(is_valid(needs, rooms, placement) for placement in product(*choices))


@given(some_needs(2), ROOMS)
def test_two_pools_are_placed_whenever_possible(needs: list[Need], rooms: list[dict[str, float]]) -> None:
    placement = find_placement(needs, rooms)
    if placement is None:
        assert not any_way(needs, rooms)
    else:
        assert is_valid(needs, rooms, placement)


def test_three_and_four_pools_are_placed_in_known_cases() -> None:
    """The cases are fixed: in one of many thousand others a placement may be missed."""
    pick = random.Random(1)
    num_with_a_way = 0
    for _ in range(1_500):
        rooms = [dict.fromkeys(NAMES, 0.0) | {name: pick.randint(0, 4) for name in NAMES} for _ in range(4)]
        needs = [(pick.randint(1, 2), {name: pick.randint(0, 3) for name in NAMES}) for _ in range(pick.choice([3, 4]))]
        placement = find_placement(needs, rooms)
        if placement is None:
            assert not any_way(needs, rooms)
        else:
            num_with_a_way += 1
            assert is_valid(needs, rooms, placement)
    assert num_with_a_way > 100


@given(some_needs(5), ROOMS)
def test_no_node_is_overcommitted(needs: list[Need], rooms: list[dict[str, float]]) -> None:
    placement = find_placement(needs, rooms)
    assert placement is None or is_valid(needs, rooms, placement)


@pytest.mark.parametrize(
    ("needs", "rooms", "placement"),
    [
        pytest.param([(2, {"GPU": 4})], [{"GPU": 4.0}] * 3, [[0, 1]], id="equal nodes in order"),
        pytest.param(
            [(1, {"GPU": 2}), (1, {"GPU": 3}), (1, {"GPU": 8})],
            [{"GPU": 8.0}, {"GPU": 4.0}, {"GPU": 2.0}, {"GPU": 2.0}],
            [[2], [1], [0]],
            id="nodes that other pools could use are left to them",
        ),
        pytest.param(
            [(1, {"GPU": 4}), (1, {"GPU": 8})],
            [{"GPU": 8.0}, {"GPU": 4.0}],
            [[1], [0]],
            id="two pools on unequal nodes",
        ),
        pytest.param(
            [(1, {"CPU": 1})], [{"GPU": 1.0, "CPU": 1.0}, {"CPU": 64.0}], [[1]], id="no GPU node without need"
        ),
        pytest.param(
            [(1, {"GPU": 4}), (1, {"GPU": 2, "A100": 1})],
            [{"GPU": 8.0, "A100": 1.0}, {"GPU": 4.0}],
            [[1], [0]],
            id="a small pool that needs the special node",
        ),
        pytest.param(
            [(2, {"GPU": 2, "CPU": 8}), (1, {"GPU": 8, "CPU": 2}), (1, {"GPU": 2, "CPU": 1})],
            [{"GPU": 8.0, "CPU": 16.0}, {"GPU": 8.0, "CPU": 8.0}, {"GPU": 2.0, "CPU": 8.0}],
            [[0, 2], [1], [0]],
            id="three pools in another order",
        ),
        pytest.param(
            [(1, {"GPU": 2, "CPU": 8}), (1, {"CPU": 4}), (1, {"GPU": 4, "CPU": 2}), (1, {"GPU": 2, "CPU": 8})],
            [{"GPU": 8.0, "CPU": 8.0}, {"GPU": 4.0, "CPU": 16.0}],
            [[1], [0], [0], [1]],
            id="four pools in another order",
        ),
        pytest.param(
            [(3, {"GPU": 2}), (3, {"GPU": 1}), (3, {"GPU": 1})],
            [{"GPU": 3.0}, {"GPU": 3.0}, {"GPU": 4.0}, {"GPU": 3.0}],
            [[0, 1, 2], [0, 2, 3], [1, 2, 3]],
            id="the emptiest nodes first",
        ),
        pytest.param(
            [(1, {"GPU": 0.1 * 3})], [{"GPU": 0.3}], [[0]], id="fractions of a device add up without rounding"
        ),
        pytest.param([(1, {"GPU": 0.3001})], [{"GPU": 0.3}], None, id="a little too much"),
        pytest.param([(1, {"GPU": 1})], [], None, id="no nodes"),
    ],
)
def test_pools_get_their_number_of_nodes(
    needs: list[Need], rooms: list[dict[str, float]], placement: list[list[int]] | None
) -> None:
    assert find_placement(needs, rooms) == placement


def test_eight_pools_are_placed_on_a_large_cluster() -> None:
    rooms = [{"GPU": 8.0, "CPU": 96.0, "memory": 1e12 + i} for i in range(512)]
    rooms += [{"GPU": 4.0, "CPU": 48.0, "memory": 5e11 + i} for i in range(256)] + [{"CPU": 64.0}] * 32
    needs = [(100 - i, {"GPU": 8 - i, "CPU": 8 - i, "memory": 1e11 * (8 - i)}) for i in range(8)]
    placement = find_placement(needs, rooms)
    assert placement is not None
    assert [len(set(nodes)) for nodes in placement] == [100 - i for i in range(8)]


def test_nodes_that_are_free_now_are_chosen() -> None:
    nodes = [node("a", {"GPU": 1}, GPU=2), node("b", GPU=2), node("c", GPU=2)]
    assert free_nodes([need("main", 2, 2, GPU=1)], nodes) == [[nodes[1], nodes[2]]]
    assert free_nodes([need("main", 3, 2, GPU=1)], nodes) is None


def test_the_object_store_has_to_exist_and_may_be_in_use() -> None:
    small = node("a", CPU=1, object_store_memory=GIB)
    busy = node("b", {"object_store_memory": 0}, CPU=1, object_store_memory=4 * GIB)
    assert free_nodes([need("main", 1, object_store=2 * GIB, CPU=1)], [small, busy]) == [[busy]]


NODES = [
    node("10.0.0.1", {"CPU": 1}, CPU=1),
    node("10.0.0.2", {"GPU": 0, "CPU": 6}, CPU=8, GPU=2),
    node("10.0.0.3", CPU=8, GPU=2),
]


def test_a_waiting_pool_names_the_resource_and_what_is_free() -> None:
    text = waiting_text([need("main", 2, 2, CPU=1, GPU=1)], NODES)
    assert text == Mentions("pool main:", "1 of 2 nodes", "waiting for GPU", "1 node")
    assert text == Mentions("10.0.0.2 CPU 6 of 8, GPU 0 of 2", "10.0.0.3 CPU 8 of 8, GPU 2 of 2", without=["10.0.0.1"])


def test_several_pools_that_wait_for_each_other_are_reported() -> None:
    pools = [need("x", 1, 2, CPU=1, GPU=1), need("y", 1, 1, CPU=1, GPU=1)]
    text = waiting_text(pools, NODES)
    assert text == Mentions("pools x, y:", "each pool alone", "not all together", "GPU is missing", "10.0.0.2")


def test_the_deadline_error_names_who_uses_what() -> None:
    text = timeout_text([need("main", 2, 2, CPU=1, GPU=1)], NODES, {"id-of-10.0.0.2": ["other/0", "4711"]}, 30.0)
    assert text == Mentions("pool main:", "1 of 2 nodes", "waiting for GPU", "1 node", "timed out after 30 s")
    assert text == Mentions("10.0.0.2 CPU 6 of 8, GPU 0 of 2", "10.0.0.3 CPU 8 of 8, GPU 2 of 2")
    assert text == Mentions("in use: 10.0.0.2 CPU 2, GPU 2 by placement groups other/0, 4711")
    assert text == Mentions("timeout", "spec.runPolicy.provisioningDeadlineSeconds")
