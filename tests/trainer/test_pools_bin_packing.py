"""Pools on nodes: a way is found exactly when there is one, and it is a sparing one."""

from __future__ import annotations

import time
from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_trainer.pools import bin_packing
from rljob_trainer.pools.bin_packing import NodeNeed, SearchExhausted, pack

NAMES = ("CPU", "GPU")
# Small numbers, so that pools often just fit and just do not.
AMOUNTS = st.fixed_dictionaries({name: st.integers(0, 4).map(float) for name in NAMES})
NEEDS = st.lists(st.builds(NodeNeed, st.integers(1, 3), AMOUNTS), min_size=1, max_size=3)
ROOMS = st.lists(AMOUNTS, min_size=0, max_size=4)


def is_valid(needs: list[NodeNeed], rooms: list[dict[str, float]], places: list[list[int]]) -> bool:
    left = [dict(room) for room in rooms]
    for need, nodes in zip(needs, places, strict=True):
        if len(set(nodes)) != need.num_nodes:
            return False
        for node, name in product(nodes, NAMES):
            left[node][name] -= need.amounts[name]
    return all(amount >= 0 for room in left for amount in room.values())


def any_way(needs: list[NodeNeed], rooms: list[dict[str, float]]) -> bool:
    """By trying everything."""
    choices = [[list(nodes) for nodes in combinations(range(len(rooms)), need.num_nodes)] for need in needs]
    return any(is_valid(needs, rooms, list(places)) for places in product(*choices))


@given(NEEDS, ROOMS)
def test_a_way_is_found_when_there_is_one(needs: list[NodeNeed], rooms: list[dict[str, float]]) -> None:
    places = pack(needs, rooms)
    if places is None:
        assert not any_way(needs, rooms)
    else:
        assert is_valid(needs, rooms, places)


def test_equal_nodes_are_taken_in_their_order() -> None:
    assert pack([NodeNeed(2, {"GPU": 4})], [{"GPU": 4.0}, {"GPU": 4.0}, {"GPU": 4.0}]) == [[0, 1]]


def test_nodes_that_other_pools_could_use_are_left_to_them() -> None:
    rooms = [{"GPU": 8.0}, {"GPU": 4.0}, {"GPU": 2.0}, {"GPU": 2.0}]
    assert pack([NodeNeed(1, {"GPU": 2}), NodeNeed(1, {"GPU": 3}), NodeNeed(1, {"GPU": 8})], rooms) == [[2], [1], [0]]


def test_a_pool_without_gpus_keeps_off_nodes_with_gpus() -> None:
    assert pack([NodeNeed(1, {"CPU": 1})], [{"GPU": 1.0, "CPU": 1.0}, {"CPU": 64.0}]) == [[1]]


def test_the_order_of_the_pools_does_not_decide() -> None:
    """First come first served would give the node with eight to the small pool."""
    rooms = [{"GPU": 8.0}, {"GPU": 4.0}]
    assert pack([NodeNeed(1, {"GPU": 4}), NodeNeed(1, {"GPU": 8})], rooms) == [[1], [0]]


def test_going_back_is_needed_and_done() -> None:
    """Each pool has two nodes to choose from; the first choice of the first leaves none for the last."""
    rooms = [{"a": 1.0, "b": 1.0}, {"a": 1.0, "c": 1.0}, {"b": 1.0, "c": 1.0}]
    needs = [NodeNeed(1, {"a": 1, "b": 1}), NodeNeed(1, {"a": 1}), NodeNeed(1, {"b": 1}), NodeNeed(2, {"c": 1})]
    assert pack(needs, rooms) == [[0], [1], [2], [1, 2]]


def test_parts_of_a_device_add_up_without_rounding() -> None:
    assert pack([NodeNeed(1, {"GPU": 0.1 * 3})], [{"GPU": 0.3}]) == [[0]]
    assert pack([NodeNeed(1, {"GPU": 0.3001})], [{"GPU": 0.3}]) is None


def test_eight_pools_on_a_large_cluster_take_no_time() -> None:
    rooms = [{"GPU": 8.0, "CPU": 96.0, "memory": 1e12 + i} for i in range(512)]
    rooms += [{"GPU": 4.0, "CPU": 48.0, "memory": 5e11 + i} for i in range(256)] + [{"CPU": 64.0}] * 32
    needs = [NodeNeed(100 - i, {"GPU": 8 - i, "CPU": 8 - i, "memory": 1e11 * (8 - i)}) for i in range(8)]
    start = time.perf_counter()
    places = pack(needs, rooms)
    assert time.perf_counter() - start < 2
    assert places is not None
    assert [len(set(nodes)) for nodes in places] == [100 - i for i in range(8)]


def test_a_search_without_end_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bin_packing, "MAX_TRIES", 1)
    with pytest.raises(SearchExhausted):
        pack([NodeNeed(1, {"GPU": 1}), NodeNeed(1, {"GPU": 1})], [{"GPU": 2.0}])
