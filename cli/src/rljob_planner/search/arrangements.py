"""Finds the best arrangements of roles on pools: for every grouping of roles, and for every node type and number of
nodes of each group. Nodes of one type have the same GPU type and the same number of GPUs.

The enumeration is that of HybridFlow (arXiv 2409.19256v2, section 6): the time of a step depends on the slowest pool of
each stage. The search is branch and bound, so the result is the same as if all arrangements were tried. A branch has
chosen the pools of some groups. Its lower bound is the cost that follows if each other group takes, in each stage, the
shortest time of any of its options.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import inf

from rljob_planner.search.pool_options import PoolOption, is_no_worse, longest
from rljob_planner.timing.step import StageSeconds
from rljob_planner.workload import Role, Schedule, can_run

TIE_SHARE = 0.1
"""A step that is at most this share longer than the fastest counts as equally fast, because predicted times are not
more exact than this."""
Grouping = tuple[tuple[Role, ...], ...]
"""Groups of roles. The roles of a group share a pool."""
StepCost = Callable[[StageSeconds], float]
"""Computes the cost of an arrangement from the seconds of each stage on its slowest pool. The cost must not decrease
when a stage takes longer."""


@dataclass(frozen=True, slots=True)
class Arrangement:
    """A pool option for each group of roles."""

    cost: float
    """Seconds of a step."""
    options: tuple[PoolOption, ...]
    schedule: Schedule

    @property
    def num_gpus(self) -> int:
        """GPUs of all pools."""
        return sum(option.size.num_gpus for option in self.options)

    @property
    def combination(self) -> tuple[Schedule, frozenset[tuple[tuple[Role, ...], int]]]:
        """The schedule, the groups of roles, and the node type of each group."""
        return self.schedule, frozenset((each.roles, each.size.kind) for each in self.options)

    @property
    def is_supported(self) -> bool:
        """Whether this version of the trainer can run this arrangement."""
        return can_run((each.roles for each in self.options), self.schedule)

    @property
    def complications(self) -> tuple[int, int, int, int]:
        """Numbers that make an arrangement complicated: pools, node types, roles with sequence parallelism, GPUs."""
        num_shared = sum(choice.num_sequence_parallel for each in self.options for choice in each.choices)
        return len(self.options), len({each.size.kind for each in self.options}), num_shared, self.num_gpus


def groupings(roles: Sequence[Role]) -> Iterator[Grouping]:
    """All ways to group roles: 1, 2, 5, 15 or 52 for one to five roles."""
    if not roles:
        yield ()
        return
    first, rest = roles[0], roles[1:]
    for smaller in groupings(rest):
        for index, group in enumerate(smaller):
            yield ((first, *group), *smaller[:index], *smaller[index + 1 :])
        yield ((first,), *smaller)


def best_arrangements(
    options: Mapping[tuple[Role, ...], Sequence[PoolOption]],
    grouped: Iterable[Grouping],
    capacity: Sequence[int],
    cost: StepCost,
    *,
    num_wanted: int,
    schedule: Schedule = Schedule.SYNCHRONOUS,
) -> list[list[Arrangement]]:
    """The best arrangements for the best `num_wanted` combinations of grouping and node types, best first.

    For each combination: its cheapest arrangement, then arrangements on fewer GPUs. Among these are the best ones whose
    cost is close to that of the cheapest of all combinations (TIE_SHARE). `capacity`: the number of nodes of each type.
    """
    parts = {roles: _by_kind(each) for roles, each in options.items()}
    combinations = [
        _Combination(chosen, cost, schedule)
        for grouping in grouped
        if all(roles in parts for roles in grouping)
        for chosen in product(*(parts[roles] for roles in grouping))
    ]
    # The most promising come first, so that later ones can be pruned early.
    combinations.sort(key=lambda combination: combination.bound)
    found: list[list[Arrangement]] = []
    for combination in combinations:
        costs = sorted(each[0].cost for each in found)
        limit = costs[num_wanted - 1] if len(costs) >= num_wanted else inf
        if front := combination.best(capacity, limit, min(costs, default=inf)):
            found.append(front)
    found.sort(key=lambda front: (front[0].cost, len(front[0].options), front[0].num_gpus))
    return found[:num_wanted]


def _by_kind(options: Iterable[PoolOption]) -> list[list[PoolOption]]:
    """The options of each node type, those with the fewest nodes first. An option is left out if another one is at
    least as fast in every stage and has no more nodes."""
    kinds: dict[int, list[PoolOption]] = {}
    for option in sorted(options, key=lambda each: (each.size.nodes, sum(each.seconds))):
        kept = kinds.setdefault(option.size.kind, [])
        if not any(is_no_worse(each.seconds, option.seconds) for each in kept):
            kept.append(option)
    return list(kinds.values())


class _Combination:
    """Searches the arrangements of one grouping on given node types. `parts`: for each group, the options on its node
    type."""

    def __init__(self, parts: Sequence[Sequence[PoolOption]], cost: StepCost, schedule: Schedule) -> None:
        self._parts, self._cost, self._schedule = parts, cost, schedule
        self._fastest = [tuple(map(min, zip(*(each.seconds for each in part), strict=True))) for part in parts]
        self.bound = cost(longest(self._fastest))
        self._front: list[Arrangement] = []
        """Those found so far that no other one beats or equals in both cost and GPUs."""

    def best(self, capacity: Sequence[int], limit: float, best_of_all: float) -> list[Arrangement]:
        """The cheapest arrangement, then those on fewer GPUs; empty if there is none. Only arrangements with a cost
        below `limit`, or close to `best_of_all`, are searched. `best_of_all`: the lowest cost of all combinations so
        far."""
        self._limit, self._best_of_all = limit, best_of_all
        self._choose((), list(capacity), 0)
        return sorted(self._front, key=lambda each: each.cost)

    def _choose(self, chosen: tuple[PoolOption, ...], free: list[int], num_gpus: int) -> None:
        """Chooses an option for the next group. The option with the lowest bound is tried first."""
        seconds = [each.seconds for each in chosen]
        if len(chosen) == len(self._parts):
            found = Arrangement(self._cost(longest(seconds)), chosen, self._schedule)
            self._front = [each for each in self._front if each.cost < found.cost or each.num_gpus < found.num_gpus]
            self._front.append(found)
            return
        part, rest = self._parts[len(chosen)], self._fastest[len(chosen) + 1 :]
        kind = part[0].size.kind
        indices = [index for index, option in enumerate(part) if option.size.nodes <= free[kind]]
        bounds = [(self._cost(longest((*seconds, part[index].seconds, *rest))), index) for index in indices]
        for bound, index in sorted(bounds):
            option = part[index]
            total = num_gpus + option.size.num_gpus
            if self._is_of_use(bound, total):
                free[kind] -= option.size.nodes
                self._choose((*chosen, option), free, total)
                free[kind] += option.size.nodes

    def _is_of_use(self, bound: float, num_gpus: int) -> bool:
        """Whether arrangements with at least this cost and this number of GPUs can improve the result."""
        cheapest = min((each.cost for each in self._front), default=inf)
        is_tie = bound <= (1 + TIE_SHARE) * min(cheapest, self._best_of_all)
        if not (is_tie or bound < min(cheapest, self._limit)):
            return False
        return not any(each.cost <= bound and each.num_gpus <= num_gpus for each in self._front)
