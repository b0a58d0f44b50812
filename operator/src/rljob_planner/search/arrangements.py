"""The best arrangements of roles, whatever they are: which roles share GPUs, how many, and of which kind.

The algorithm of HybridFlow (arXiv 2409.19256v2, section 6: every set partition, every split of the GPUs, the sum over
stages of the slowest set) without trying every split: `label_setting` finds the best one of a partition. Exact on the
tables that it is given.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import inf
from typing import Generic

from rljob_planner.search.label_setting import Choices, best_choice
from rljob_planner.search.options import Cost, Payload, SetOption, Tables, fastest, longest, undominated
from rljob_planner.search.partitions import RoleSet, set_partitions


@dataclass(frozen=True, slots=True)
class Arrangement(Generic[Payload]):
    """Sets of roles, each with what it runs on."""

    cost: float
    sets: tuple[tuple[RoleSet, SetOption[Payload]], ...]

    @property
    def num_gpus(self) -> int:
        """Of all kinds."""
        return sum(option.num_gpus for _, option in self.sets)


Partition = tuple[RoleSet, ...]
_Part = tuple[RoleSet, int]
"""A set of roles and a kind of GPU."""
_Shape = tuple[_Part, ...]

_GROWTHS = (2.0, 1.25, 1.0)
"""Sizes are thinned out so far that each is so many times the one before it: what is found quickly on few sizes is the
limit for the search on more of them. The last one leaves all."""


def best_arrangements(
    tables: Tables[Payload],
    capacity: Sequence[int],
    cost: Cost,
    *,
    roles: RoleSet,
    num_wanted: int,
    is_allowed: Callable[[Partition], bool] = lambda _: True,
) -> list[Arrangement[Payload]]:
    """The cheapest ones, cheapest first, at most `num_wanted`: of every partition, and every kind for each of its sets,
    the best one. `capacity` is the number of GPUs of each kind; fewer may be used."""
    parts = _parts(tables, capacity)
    partitions = [partition for partition in set_partitions(roles) if is_allowed(partition)]
    shapes = [shape for partition in partitions for shape in _shapes(partition, parts)]
    at_best = {part: fastest(option.seconds for option in options) for part, options in parts.items()}
    # What looks best comes first.
    shapes.sort(key=lambda shape: cost(longest([at_best[part] for part in shape])))
    found: dict[_Shape, Arrangement[Payload]] = {}
    for growth in _GROWTHS:
        thinned = {part: _thinned(options, growth) for part, options in parts.items()}
        for shape in sorted(shapes, key=lambda each: found[each].cost if each in found else inf):
            limit = _nth_smallest([each.cost for each in found.values()], num_wanted)
            below = min(limit, found[shape].cost) if shape in found else limit
            choice = best_choice([thinned[part] for part in shape], capacity, cost, below)
            if choice is not None:
                found[shape] = _arrangement(shape, choice, cost)
    ranked = sorted(found.values(), key=lambda each: (each.cost, len(each.sets), each.num_gpus))
    return ranked[:num_wanted]


def _parts(tables: Tables[Payload], capacity: Sequence[int]) -> dict[_Part, list[SetOption[Payload]]]:
    """The options by what their set is on, fewest GPUs first."""
    found: dict[_Part, list[SetOption[Payload]]] = {}
    for roles, options in tables.items():
        for option in undominated(option for option in options if option.num_gpus <= capacity[option.kind]):
            found.setdefault((roles, option.kind), []).append(option)
    return found


def _shapes(partition: Partition, parts: Mapping[_Part, object]) -> Iterator[_Shape]:
    """Every kind for every set."""
    kinds = sorted({kind for _, kind in parts})
    return product(*([(roles, kind) for kind in kinds if (roles, kind) in parts] for roles in partition))


def _thinned(options: Choices[Payload], growth: float) -> list[SetOption[Payload]]:
    """Of the smallest size, of the largest, and of sizes between them that grow so much from one to the next."""
    kept: list[SetOption[Payload]] = []
    largest, size = options[-1].num_gpus, 0
    for option in options:
        if option.num_gpus in (size, largest) or option.num_gpus >= growth * size:
            kept.append(option)
            size = option.num_gpus
    return kept


def _arrangement(shape: _Shape, choice: Sequence[SetOption[Payload]], cost: Cost) -> Arrangement[Payload]:
    total = cost(longest([option.seconds for option in choice]))
    return Arrangement(total, tuple((roles, option) for (roles, _), option in zip(shape, choice, strict=True)))


def _nth_smallest(costs: Sequence[float], place: int) -> float:
    """Infinite where there are fewer."""
    return max(heapq.nsmallest(place, costs)) if len(costs) >= place else inf
