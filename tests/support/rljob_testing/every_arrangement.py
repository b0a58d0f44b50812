"""Every arrangement of sets of roles on tables of costs, one by one: slow, and apart from the search.

It tries every kind and option of every set of every partition, and makes partitions by labels of roles.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from random import Random

from rljob_planner.search.options import Cost, SetOption, StageSeconds, Tables

GENERATION, PREPARATION, TRAINING, SYNC = range(4)
NUM_STAGES = 4
ROLLOUT = 1
"""The bit of the first role: it is the rollout where a schedule needs one."""


def one_after_the_other(seconds: StageSeconds) -> float:
    """All stages."""
    return sum(seconds)


def one_step_off(seconds: StageSeconds) -> float:
    """Generation beside the rest."""
    return max(seconds[GENERATION], seconds[PREPARATION] + seconds[TRAINING]) + seconds[SYNC]


def labelled_partitions(num_roles: int) -> Iterator[tuple[int, ...]]:
    """Every partition, as sets of bits, sorted."""
    found: set[tuple[int, ...]] = set()
    for labels in product(range(num_roles), repeat=num_roles):
        found.add(tuple(sorted(sum(1 << i for i in range(num_roles) if labels[i] == k) for k in set(labels))))
    return iter(sorted(found))


def least_costs(
    tables: Tables[str], capacity: Sequence[int], cost: Cost, num_roles: int, *, rollout_is_alone: bool
) -> list[float]:
    """The least cost of each partition and kinds, ascending."""
    best: dict[tuple[tuple[int, int], ...], float] = {}
    for partition in labelled_partitions(num_roles):
        if rollout_is_alone and ROLLOUT not in partition:
            continue
        for choice in product(*(tables.get(roles, ()) for roles in partition)):
            used = [0] * len(capacity)
            for option in choice:
                used[option.kind] += option.num_gpus
            if any(mine > limit for mine, limit in zip(used, capacity, strict=True)):
                continue
            total = cost(tuple(max(option.seconds[stage] for option in choice) for stage in range(NUM_STAGES)))
            shape = tuple((roles, option.kind) for roles, option in zip(partition, choice, strict=True))
            best[shape] = min(total, best.get(shape, total))
    return sorted(best.values())


def random_tables(random: Random, num_roles: int, sizes: Sequence[int], num_kinds: int = 1) -> Tables[str]:
    """One option of each set, size and kind: seconds that fall with the number of GPUs as those of models do, some
    faster than others."""
    return {
        roles: [
            SetOption(kind, size, tuple(100 * random.random() / size ** random.choice((0.5, 1)) for _ in range(4)), "")
            for size in sizes
            for kind in range(num_kinds)
        ]
        for roles in range(1, 1 << num_roles)
    }
