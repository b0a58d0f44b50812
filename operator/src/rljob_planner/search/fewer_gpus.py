"""As good a placement on much fewer GPUs, where there is one: a small job takes no whole cluster."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from rljob_planner.placement import Schedule
from rljob_planner.search.arrangements import Arrangement, Partition, best_arrangements
from rljob_planner.search.set_tables import PoolChoice, SetTables

WORTH = 2
"""So many times fewer GPUs are worth a step that is a little longer."""
IDLE_SHARE = 0.01
"""Of a step, for which GPUs are given back, however many."""


def on_fewer_gpus(
    tables: SetTables, arrangement: Arrangement[PoolChoice], schedule: Schedule, limit: float
) -> Arrangement[PoolChoice] | None:
    """The same sets on the same kinds with as few GPUs as leave a step of at most `limit` seconds. None where that
    saves less than half of them."""
    best = _on_fewest(tables, arrangement, schedule, limit)
    return best if WORTH * best.num_gpus <= arrangement.num_gpus else None


def without_idle_gpus(
    tables: SetTables, arrangement: Arrangement[PoolChoice], schedule: Schedule, limit: float
) -> Arrangement[PoolChoice]:
    """The same without GPUs that make next to no difference; a step of no more than `limit` seconds."""
    return _on_fewest(tables, arrangement, schedule, min(limit, (1 + IDLE_SHARE) * arrangement.cost))


def _on_fewest(
    tables: SetTables, arrangement: Arrangement[PoolChoice], schedule: Schedule, limit: float
) -> Arrangement[PoolChoice]:
    """Kind by kind, of the first one as few as can be."""
    used = [0] * len(tables.capacity)
    for _, option in arrangement.sets:
        used[option.kind] += option.num_gpus
    best = arrangement
    for kind in range(len(used)):
        too_few = 0
        while used[kind] - too_few > 1:
            middle = (used[kind] + too_few) // 2
            found = _within(tables, arrangement, schedule, [*used[:kind], middle, *used[kind + 1 :]], limit)
            if found is None:
                too_few = middle
            else:
                best, used[kind] = found, middle
    return best


def _within(
    tables: SetTables, like: Arrangement[PoolChoice], schedule: Schedule, capacity: Sequence[int], limit: float
) -> Arrangement[PoolChoice] | None:
    options = {
        roles: [each for each in tables.options[roles] if each.kind == option.kind] for roles, option in like.sets
    }
    partition = frozenset(options)

    def is_same(other: Partition) -> bool:
        return frozenset(other) == partition

    cost = partial(tables.seconds, schedule)
    found = best_arrangements(options, capacity, cost, roles=tables.everyone, num_wanted=1, is_allowed=is_same)
    fits = bool(found) and found[0].cost <= limit and all(tables.fits(option.payload) for _, option in found[0].sets)
    return found[0] if fits else None
