"""The best arrangements of roles: every grouping of them, every kind and number of nodes for each group.

The enumeration is HybridFlow's (arXiv 2409.19256v2, section 6): the cost of a step depends on the slowest pool of each
stage. A branch is left where its lower bound (what is chosen, and for the rest the fastest that the nodes left over
allow, stage by stage) is no better than what is known, so the result is that of trying everything.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import inf

from rljob_planner.search.pool_options import PoolOption, StageSeconds, is_no_worse, longest
from rljob_planner.search.results import TIE_SHARE
from rljob_planner.workload import Role

Grouping = tuple[tuple[Role, ...], ...]
"""Roles that share a pool, pool by pool."""
Cost = Callable[[StageSeconds], float]
"""Of the longest seconds of each stage. It must not fall where one of them rises."""


@dataclass(frozen=True, slots=True)
class Arrangement:
    """A pool for each group of roles."""

    cost: float
    options: tuple[PoolOption, ...]

    @property
    def num_gpus(self) -> int:
        """Of all pools."""
        return sum(option.size.num_gpus for option in self.options)


def groupings(roles: Sequence[Role]) -> Iterator[Grouping]:
    """All ways to group roles: 1, 2, 5, 15, 52 for one to five of them."""
    if not roles:
        yield ()
        return
    first, rest = roles[0], roles[1:]
    for smaller in groupings(rest):
        for place, group in enumerate(smaller):
            yield ((first, *group), *smaller[:place], *smaller[place + 1 :])
        yield ((first,), *smaller)


def best_arrangements(
    options: Mapping[tuple[Role, ...], Sequence[PoolOption]],
    grouped: Iterable[Grouping],
    capacity: Sequence[int],
    cost: Cost,
    *,
    num_wanted: int,
) -> list[list[Arrangement]]:
    """Of the best groupings on kinds of nodes, best first, at most `num_wanted`: the cheapest arrangement, and after it
    those on fewer GPUs that are ties of the cheapest of all. `capacity` is the number of nodes of each kind."""
    parts = {roles: _by_kind(each) for roles, each in options.items()}
    shapes = [
        shape
        for grouping in grouped
        if all(roles in parts for roles in grouping)
        for shape in product(*(parts[roles].values() for roles in grouping))
    ]
    # What looks best comes first.
    shapes.sort(key=lambda shape: cost(longest(part.fastest[-1] for part in shape)))
    found: list[list[Arrangement]] = []
    for shape in shapes:
        costs = [each[0].cost for each in found]
        limit = max(heapq.nsmallest(num_wanted, costs)) if len(costs) >= num_wanted else inf
        front = _Shape(shape, cost, limit, min(costs, default=inf)).best(capacity)
        if front:
            found.append(front)
    found.sort(key=lambda front: (front[0].cost, len(front[0].options), front[0].num_gpus))
    return found[:num_wanted]


@dataclass(frozen=True)
class _Part:
    """The options of a group on one kind of nodes, smallest first."""

    kind: int
    options: list[PoolOption]
    nodes: list[int]
    fastest: list[StageSeconds]
    """Of the first one, the first two, ...: of each stage the least."""


def _by_kind(options: Sequence[PoolOption]) -> dict[int, _Part]:
    """Without those that one with no more nodes beats or equals in every stage."""
    parts: dict[int, _Part] = {}
    for option in sorted(options, key=lambda each: (each.size.nodes, sum(each.seconds))):
        part = parts.setdefault(option.size.kind, _Part(option.size.kind, [], [], []))
        if any(is_no_worse(each.seconds, option.seconds) for each in part.options):
            continue
        before = part.fastest[-1:] or [option.seconds]
        part.options.append(option)
        part.nodes.append(option.size.nodes)
        part.fastest.append(tuple(map(min, before[0], option.seconds)))
    return parts


class _Shape:
    """The arrangements of one grouping on given kinds. `limit`: no cost from there on is of use, unless it is a tie of
    the cheapest of all, which is `best_of_all` so far."""

    def __init__(self, parts: Sequence[_Part], cost: Cost, limit: float, best_of_all: float) -> None:
        self._parts = parts
        self._cost = cost
        self._limit = limit
        self._best_of_all = best_of_all
        self._front: list[Arrangement] = []

    def best(self, capacity: Sequence[int]) -> list[Arrangement]:
        """The cheapest, then those on fewer GPUs. Empty where nothing is of use."""
        self._choose((), list(capacity), 0)
        return sorted(self._front, key=lambda each: each.cost)

    def _choose(self, chosen: tuple[PoolOption, ...], free: list[int], num_gpus: int) -> None:
        """The next group's pool, that with the lowest bound first."""
        if len(chosen) == len(self._parts):
            found = Arrangement(self._cost(longest(each.seconds for each in chosen)), chosen)
            beaten = [each for each in self._front if each.cost >= found.cost and each.num_gpus >= found.num_gpus]
            self._front = [each for each in self._front if each not in beaten]
            self._front.append(found)
            return
        part = self._parts[len(chosen)]
        for bound, place in sorted(self._bounds(chosen, part, free)):
            option = part.options[place]
            total = num_gpus + option.size.num_gpus
            if not self._is_of_use(bound, total):
                continue
            free[part.kind] -= option.size.nodes
            self._choose((*chosen, option), free, total)
            free[part.kind] += option.size.nodes

    def _bounds(self, chosen: Sequence[PoolOption], part: _Part, free: Sequence[int]) -> Iterator[tuple[float, int]]:
        """What each option's arrangements cost at least."""
        seconds = [each.seconds for each in chosen]
        rest = self._parts[len(chosen) + 1 :]
        for place in range(bisect_right(part.nodes, free[part.kind])):
            left = [
                bisect_right(each.nodes, free[each.kind] - (part.nodes[place] if each.kind == part.kind else 0))
                for each in rest
            ]
            if all(left):
                at_best = (each.fastest[num - 1] for each, num in zip(rest, left, strict=True))
                yield self._cost(longest((*seconds, part.options[place].seconds, *at_best))), place

    def _is_of_use(self, bound: float, num_gpus: int) -> bool:
        own = min((each.cost for each in self._front), default=inf)
        limit = max(min(own, self._limit), (1 + TIE_SHARE) * min(own, self._best_of_all))
        if bound >= limit:
            return False
        return not any(each.cost <= bound and each.num_gpus <= num_gpus for each in self._front)
