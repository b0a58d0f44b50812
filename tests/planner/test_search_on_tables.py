"""The search on tables of random costs finds what trying everything finds."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_planner.search.arrangements import Partition, best_arrangements
from rljob_planner.search.options import SetOption, Tables, undominated
from rljob_planner.search.partitions import members, set_partitions
from rljob_testing.every_arrangement import (
    NUM_STAGES,
    ROLLOUT,
    labelled_partitions,
    least_costs,
    one_after_the_other,
    one_step_off,
    random_tables,
)

COSTS = (one_after_the_other, one_step_off)


def _is_alone(partition: Partition) -> bool:
    return ROLLOUT in partition


@st.composite
def _tables(draw: st.DrawFn, num_roles: int, kinds: int, sizes: Sequence[int], per_size: int) -> Tables[str]:
    """Whole seconds from a small range, so that there are ties; nothing falls with the number of GPUs."""
    seconds = st.tuples(*[st.integers(0, 12).map(float)] * NUM_STAGES)
    options = st.builds(SetOption, st.integers(0, kinds - 1), st.sampled_from(sizes), seconds, st.just(""))
    return {
        roles: draw(st.lists(options, max_size=per_size * kinds, min_size=0 if roles & (roles - 1) else 1))
        for roles in range(1, 1 << num_roles)
    }


def _check(tables: Tables[str], capacity: Sequence[int], num_roles: int, num_wanted: int) -> None:
    for cost in COSTS:
        needs_alone = cost is one_step_off
        expected = least_costs(tables, capacity, cost, num_roles, rollout_is_alone=needs_alone)
        found = best_arrangements(
            tables,
            capacity,
            cost,
            roles=(1 << num_roles) - 1,
            num_wanted=num_wanted,
            is_allowed=_is_alone if needs_alone else lambda _: True,
        )
        assert [each.cost for each in found] == expected[:num_wanted]
        for each in found:
            used = [sum(o.num_gpus for _, o in each.sets if o.kind == kind) for kind in range(len(capacity))]
            assert all(mine <= limit for mine, limit in zip(used, capacity, strict=True))
            assert sum(roles for roles, _ in each.sets) == (1 << num_roles) - 1
            assert all(option in tables[roles] for roles, option in each.sets)
            slowest = tuple(max(option.seconds[stage] for _, option in each.sets) for stage in range(NUM_STAGES))
            assert cost(slowest) == each.cost


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_four_roles_on_two_kinds_as_by_trying_everything(data: st.DataObject) -> None:
    tables = data.draw(_tables(4, kinds=2, sizes=(1, 2, 4, 8), per_size=3))
    capacity = data.draw(st.tuples(st.integers(0, 12), st.integers(0, 12)))
    _check(tables, capacity, 4, data.draw(st.integers(1, 12)))


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_five_roles_as_by_trying_everything(data: st.DataObject) -> None:
    tables = data.draw(_tables(5, kinds=2, sizes=(1, 2, 4), per_size=2))
    capacity = data.draw(st.tuples(st.integers(3, 9), st.integers(0, 6)))
    _check(tables, capacity, 5, data.draw(st.integers(1, 20)))


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 1_000_000).map(Random))
def test_four_roles_on_64_gpus_as_by_trying_everything(random: Random) -> None:
    """Every node-aligned size, costs that fall with the number of GPUs as those of real models do, and some that do
    not."""
    tables = random_tables(random, 4, (1, 2, 4, *range(8, 65, 8)))
    _check(tables, (64,), 4, 10)


@pytest.mark.parametrize(("num_roles", "num_partitions"), [(1, 1), (2, 2), (3, 5), (4, 15), (5, 52)])
def test_every_partition_comes_once(num_roles: int, num_partitions: int) -> None:
    found = [tuple(sorted(each)) for each in set_partitions((1 << num_roles) - 1)]
    assert sorted(found) == list(labelled_partitions(num_roles))
    assert len(found) == num_partitions
    assert [members(roles) for roles in (0b101, 0b10)] == [(0, 2), (1,)]


def test_no_set_takes_more_gpus_than_the_slowest_one_is_worth() -> None:
    """By hand: the first role takes 10 s whatever it has; four GPUs for the second one are enough for that."""
    tables = {
        0b01: [SetOption(0, size, (10.0,), "first") for size in (2, 4)],
        0b10: [SetOption(0, size, (40.0 / size,), "second") for size in (2, 4, 8)],
    }
    (found,) = best_arrangements(tables, (16,), lambda seconds: seconds[0], roles=0b11, num_wanted=1)
    assert (found.cost, [option.num_gpus for _, option in found.sets]) == (10.0, [2, 4])


def test_what_is_no_better_with_more_gpus_is_left_out() -> None:
    """Of another kind it stays."""
    kept = SetOption(0, 2, (1.0, 5.0), "a"), SetOption(0, 4, (2.0, 4.0), "b"), SetOption(1, 8, (9.0, 9.0), "c")
    lost = SetOption(0, 4, (1.0, 5.0), "as fast with more"), SetOption(0, 8, (2.0, 4.5), "slower with more")
    assert set(undominated((*lost, *kept))) == set(kept)


def test_nothing_is_found_where_nothing_fits() -> None:
    tables = {0b1: [SetOption(0, 8, (1.0,), "")]}
    assert best_arrangements(tables, (4,), sum, roles=0b1, num_wanted=3) == []
