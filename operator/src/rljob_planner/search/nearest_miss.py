"""What comes closest where nothing fits: the mapping whose fullest GPU lacks least."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from rljob_planner.gpus import Cluster
from rljob_planner.memory.phases import phases_of
from rljob_planner.memory_types import PhaseMemory
from rljob_planner.placement import Schedule
from rljob_planner.plan import plan_of
from rljob_planner.search.arrangements import Arrangement, best_arrangements
from rljob_planner.search.options import SetOption
from rljob_planner.search.partitions import RoleSet, members
from rljob_planner.search.results import NearestMiss
from rljob_planner.search.role_choices import RoleChoice
from rljob_planner.search.role_layouts import PoolSize, pool_sizes
from rljob_planner.search.set_tables import PoolChoice, SetTables

FACTORS = (2, 4, 8, 16)
"""By which a cluster is grown until something fits."""
_GIB = 2.0**30


def nearest_miss(tables: SetTables, pool_names: tuple[str, ...]) -> NearestMiss | None:
    """None where even without a limit there is no mapping."""
    nearest = _nearest(tables, tables.cluster)
    if nearest is None:
        return None
    placement = tables.placement(nearest, Schedule.SYNCHRONOUS, pool_names)
    plan = plan_of(tables.workload, placement, tables.constants)
    lacks = max(-phase.spare for phase in plan.all_phases)
    return NearestMiss(plan, tuple(_advice(tables, nearest, lacks / _GIB)))


def least_lacking(tables: SetTables, roles: RoleSet, size: PoolSize) -> tuple[PoolChoice, float] | None:
    """These roles on one pool in the layouts that need least memory, and the bytes that a GPU lacks, by sums; None
    where one of them has no layout there."""
    choices: list[RoleChoice] = []
    for place in members(roles):
        choice = tables.role_choices.smallest(tables.roles[place], size)
        if choice is None:
            return None
        choices.append(choice)
    state = sum(choice.state for choice in choices)
    active = max(choice.active for choice in choices) + max(choice.asleep for choice in choices)
    beyond = state + max(active, *(choice.awake for choice in choices)) - tables.role_choices.limit(size)
    return PoolChoice(size, tuple(choices)), max(0.0, beyond, *(choice.lacks for choice in choices))


def worst_phase_of(tables: SetTables, choice: PoolChoice) -> PhaseMemory:
    """That which lacks most."""
    phases = phases_of(tables.pool("pool", choice), tables.workload, tables.constants)
    return min(phases, key=lambda phase: phase.spare)


def _nearest(tables: SetTables, cluster: Cluster) -> Arrangement[PoolChoice] | None:
    """Each set costs what it lacks at least; the whole what the worst of them does."""
    sizes = [size for kind, group in enumerate(cluster) for size in _doubling(pool_sizes(kind, group))]
    options: dict[RoleSet, list[SetOption[PoolChoice]]] = {}
    for roles in range(1, tables.everyone + 1):
        for size in sizes:
            found = least_lacking(tables, roles, size)
            if found is not None:
                choice, lacks = found
                options.setdefault(roles, []).append(SetOption(size.kind, size.num_gpus, (lacks,), choice))
    capacity = [group.num_gpus for group in cluster]
    best = best_arrangements(options, capacity, lambda lacks: lacks[0], roles=tables.everyone, num_wanted=1)
    return best[0] if best else None


def _doubling(sizes: Iterable[PoolSize]) -> list[PoolSize]:
    kept: list[PoolSize] = []
    for size in sizes:
        if not kept or size.num_gpus >= 2 * kept[-1].num_gpus:
            kept.append(size)
        last = size
    return kept if kept[-1] == last else [*kept, last]


def _advice(tables: SetTables, nearest: Arrangement[PoolChoice], lacks: float) -> Iterator[str]:
    yield (
        f"Nothing fits on {described(tables.cluster)}: of all mappings {_pools(tables, nearest)} lacks least,"
        f" {lacks:.1f} GiB on a GPU."
    )
    for factor in FACTORS:
        larger = tuple(replace(group, nodes=factor * group.nodes) for group in tables.cluster)
        found = _nearest(tables, larger)
        if found is not None and all(tables.fits(option.payload) for _, option in found.sets):
            yield f"It would fit on {described(larger)}, as {_pools(tables, found)}."
            return
    yield f"Nor does anything fit on {described(larger)}: more GPUs alone do not help."


def described(cluster: Cluster) -> str:
    """As a user names it."""
    return "+".join(f"{group.nodes}x{group.gpus_per_node}x{group.gpu.name}" for group in cluster if group.nodes)


def _pools(tables: SetTables, arrangement: Arrangement[PoolChoice]) -> str:
    return " and ".join(
        f"{', '.join(tables.roles[each] for each in members(roles))} on {option.num_gpus}"
        f" {tables.cluster[option.kind].gpu.name}"
        for roles, option in arrangement.sets
    )
