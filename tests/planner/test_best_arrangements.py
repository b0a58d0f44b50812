"""The best arrangements of hand-made pools equal those of trying everything, for any number of results and with
ties."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import inf

from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_planner.constants import Constants
from rljob_planner.gpus import NodeGroup
from rljob_planner.search.arrangements import TIE_SHARE, Arrangement, Grouping, StepCost, best_arrangements, groupings
from rljob_planner.search.pool_options import PoolOption, PoolSize, SearchSpace, longest, units_of
from rljob_planner.search.ranking import ranked
from rljob_planner.timing.step import StageSeconds
from rljob_planner.workload import Role, Schedule, TrainLayout, Workload
from rljob_testing.planner import samples

Options = Mapping[tuple[Role, ...], Sequence[PoolOption]]
Shape = frozenset[tuple[tuple[Role, ...], int]]
CONSTANTS = Constants()


def _beside_generation(seconds: StageSeconds) -> float:
    first, second, third = seconds
    return max(first, second) + third


COSTS: Sequence[Callable[[StageSeconds], float]] = (sum, _beside_generation)
NUMBERS = st.integers(0, 12).map(float)


@st.composite
def pool_options(draw: st.DrawFn, grouped: Sequence[Grouping], gpus_per_node: Sequence[int]) -> Options:
    """Up to two layouts for each number of nodes; some groups have none or are missing."""
    found: dict[tuple[Role, ...], list[PoolOption]] = {}
    for roles in sorted({roles for grouping in grouped for roles in grouping}):
        sizes = [PoolSize(kind, nodes, num) for kind, num in enumerate(gpus_per_node) for nodes in (1, 2, 3, 4)]
        chosen = draw(st.lists(st.tuples(st.sampled_from(sizes), NUMBERS, NUMBERS, NUMBERS), max_size=8))
        options = [PoolOption(roles, size, (), tuple(seconds)) for size, *seconds in chosen]
        is_there: bool = draw(st.booleans())
        if options or is_there:
            found[roles] = options
    return found


def _by_trying_everything(
    options: Options, grouped: Sequence[Grouping], capacity: Sequence[int], cost: StepCost
) -> dict[Shape, set[tuple[float, int]]]:
    """Costs and GPUs of all arrangements, for each grouping on node types."""
    found: dict[Shape, set[tuple[float, int]]] = defaultdict(set)
    for grouping in grouped:
        for chosen in product(*(options.get(roles, ()) for roles in grouping)):
            used = [sum(each.size.nodes for each in chosen if each.size.kind == kind) for kind in range(len(capacity))]
            if all(mine <= nodes for mine, nodes in zip(used, capacity, strict=True)):
                shape = frozenset((each.roles, each.size.kind) for each in chosen)
                seconds = cost(longest(each.seconds for each in chosen))
                found[shape].add((seconds, sum(each.size.num_gpus for each in chosen)))
    return found


def _without_beaten(points: set[tuple[float, int]]) -> set[tuple[float, int]]:
    """The points that no other point beats in both cost and GPUs."""
    return {(c, n) for c, n in points if not any(o <= c and m <= n and (o, m) != (c, n) for o, m in points)}


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.data())
def test_any_number_of_results_are_the_best_ones_with_their_ties_on_fewer_gpus(data: st.DataObject) -> None:
    """For each grouping the cheapest; and all that cost at most a tenth more than the cheapest of all."""
    grouped = list(groupings(list(Role)[: data.draw(st.sampled_from([2, 3]))]))
    gpus_per_node = data.draw(st.lists(st.sampled_from([1, 2, 8]), min_size=1, max_size=2))
    options = data.draw(pool_options(grouped, gpus_per_node))
    capacity = [data.draw(st.integers(0, 7)) for _ in gpus_per_node]
    cost, num_wanted = data.draw(st.sampled_from(COSTS)), data.draw(st.integers(1, 12))
    everything = _by_trying_everything(options, grouped, capacity, cost)
    fronts = best_arrangements(options, grouped, capacity, cost, num_wanted=num_wanted)
    cheapest = sorted(min(points)[0] for points in everything.values())
    assert [front[0].cost for front in fronts] == cheapest[:num_wanted]
    limit = (1 + TIE_SHARE) * min(cheapest, default=inf)
    for front in fronts:
        shape = frozenset((each.roles, each.size.kind) for each in front[0].options)
        ties = {(each.cost, each.num_gpus) for each in front if each.cost <= limit}
        assert ties == {point for point in _without_beaten(everything[shape]) if point[0] <= limit}


def test_a_tie_on_fewer_gpus_costs_at_most_a_tenth_more() -> None:
    roles = (Role.ACTOR, Role.ROLLOUT)
    pools = [PoolOption(roles, PoolSize(0, nodes, 1), (), (seconds,)) for nodes, seconds in ((1, 1.1), (2, 1.0))]
    [front] = best_arrangements({roles: pools}, [(roles,)], [2], sum, num_wanted=1)
    assert [each.num_gpus for each in front] == [2, 1]


def _asked(job: Workload, nodes: int) -> SearchSpace:
    return SearchSpace(job, (NodeGroup(nodes, 8, samples.gpu()),), CONSTANTS)


def _arrangement(asked: SearchSpace, nodes: int, cost: float) -> Arrangement:
    """All roles on this many nodes, with a step of this cost."""
    option = asked.fastest(asked.roles, PoolSize(0, nodes, 8))[0]
    return Arrangement(cost, (option,), Schedule.SYNCHRONOUS)


def test_gpus_that_hardly_help_stay_free() -> None:
    """Three nodes instead of four are not half, so they may cost half a percent, but not five percent."""
    job = samples.workload(batch_size=96, mini_batch_size=96)
    asked = _asked(job, 4)
    for cost, nodes in ((100.5, 3), (105.0, 4)):
        front = [_arrangement(asked, 4, 100.0), _arrangement(asked, 3, cost)]
        [candidate], _ = ranked(asked, [front], 10, ())
        assert candidate.plan.placement.num_gpus == 8 * nodes


def test_simpler_layouts_with_less_memory_are_chosen_if_they_cost_nothing() -> None:
    """Both models have four copies and sequence parallelism, where one copy without it is as fast."""
    asked, size = _asked(samples.workload(), 1), PoolSize(0, 1, 8)
    layout, fastest = TrainLayout(8, 2, sequence_parallel=2), asked.fastest(asked.roles, size)[0]
    choices = [
        next(
            each
            for each in asked.choices(unit, size)
            if (each.rollout, *each.layouts.values()) == (now.rollout, layout)
        )
        for unit, now in zip(units_of(asked.roles), fastest.choices, strict=True)
    ]
    option = replace(fastest, choices=tuple(choices))
    found = Arrangement(asked.step_seconds(Schedule.SYNCHRONOUS, fastest.seconds), (option,), Schedule.SYNCHRONOUS)
    [candidate], _ = ranked(asked, [[found]], 10, ())
    assert set(candidate.plan.placement.pools[0].layouts.values()) == {TrainLayout(8, 8)}
    assert candidate.seconds <= 1.01 * found.cost


def test_the_fastest_comes_second_if_half_of_its_gpus_are_as_good() -> None:
    job = samples.workload(batch_size=96, mini_batch_size=96)
    asked = _asked(job, 4)
    front = [_arrangement(asked, 4, 100.0), _arrangement(asked, 2, 109.0)]
    candidates, _ = ranked(asked, [front], 10, ())
    assert [each.plan.placement.num_gpus for each in candidates] == [16, 32]


def test_the_fastest_follows_its_own_grouping_after_a_simpler_one() -> None:
    """The reference on its own nodes is fastest with four nodes; one pool is simpler."""
    asked = _asked(samples.workload(batch_size=96, mini_batch_size=96), 4)
    groups = (Role.ACTOR, Role.ROLLOUT), (Role.REF,)

    def apart(nodes: int, cost: float) -> Arrangement:
        options = tuple(asked.fastest(roles, PoolSize(0, nodes, 8))[0] for roles in groups)
        return Arrangement(cost, options, Schedule.SYNCHRONOUS)

    candidates, _ = ranked(asked, [[apart(2, 100.0), apart(1, 105.0)], [_arrangement(asked, 2, 108.0)]], 10, ())
    found = [each.plan.placement for each in candidates]
    assert [(len(each.pools), each.num_gpus) for each in found] == [(1, 16), (2, 16), (2, 32)]
