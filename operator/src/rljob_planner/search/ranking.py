"""Which of the placements found come first, and what is to be said about the others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product

from rljob_planner.placement import Schedule
from rljob_planner.plan import plan_of
from rljob_planner.search.arrangements import Arrangement
from rljob_planner.search.fewer_gpus import on_fewer_gpus, without_idle_gpus
from rljob_planner.search.nearest_miss import least_lacking, worst_phase_of
from rljob_planner.search.options import StageSeconds, longest
from rljob_planner.search.partitions import RoleSet
from rljob_planner.search.results import TIE_SHARE, Candidate
from rljob_planner.search.set_tables import PoolChoice, SetTables
from rljob_planner.workload import Role

_GIB = 2.0**30
_ROOM_SHARE = 0.01
"""Of a step, for which layouts are taken that leave more memory free."""
_SHARING = ("role with sequence parallelism", "roles with sequence parallelism")
_STAGE_NAMES = ("the hand-over of weights", "generation", "scoring", "passes before the updates", "updates")


@dataclass(frozen=True)
class Found:
    """An arrangement in a schedule."""

    arrangement: Arrangement[PoolChoice]
    schedule: Schedule
    is_on_fewer_gpus: bool = False
    """Whether it is as good as another one of its grouping that takes twice as many GPUs, or more."""

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.arrangement.cost

    @property
    def shape(self) -> tuple[Schedule, frozenset[tuple[RoleSet, int]]]:
        """Of which one is enough: how roles are grouped, and the kind of GPU of each group."""
        return self.schedule, frozenset((roles, option.kind) for roles, option in self.arrangement.sets)

    @property
    def num_kinds(self) -> int:
        """Of GPUs."""
        return len({option.kind for _, option in self.arrangement.sets})

    @property
    def num_sequence_parallel(self) -> int:
        """Roles whose ranks share rows."""
        return sum(option.payload.num_sequence_parallel for _, option in self.arrangement.sets)


def ranked(
    tables: SetTables, found: Iterable[Found], num_wanted: int, pool_names: tuple[str, ...]
) -> tuple[tuple[Candidate, ...], Candidate | None]:
    """The best ones, and the best that runs today. Of a shape there is one."""
    everything = list(found)
    limit = (1 + TIE_SHARE) * min(each.seconds for each in everything)
    everything = [_without_idle_gpus(tables, each, limit) for each in everything]
    everything += [simple for each in everything for simple in _without_sequence_parallel(tables, each, limit)]
    everything += [smaller for each in everything for smaller in _on_fewer_gpus(tables, each, limit)]
    everything = [_roomier(tables, each, limit) for each in everything]
    limit = (1 + TIE_SHARE) * min(each.seconds for each in everything)
    ordered = sorted(everything, key=lambda each: _order(tables, each, limit))
    shapes: dict[tuple[Schedule, frozenset[tuple[RoleSet, int]]], Found] = {}
    for each in ordered:
        shapes.setdefault(each.shape, each)
    best = _with_fastest(list(shapes.values()), everything)
    candidates = [_candidate(tables, each, best[0], limit, pool_names) for each in best[:num_wanted]]
    today = next((place for place, each in enumerate(best) if _runs_today(tables, each)), None)
    if today is None:
        return tuple(candidates), None
    if today < len(candidates):
        return tuple(candidates), candidates[today]
    return tuple(candidates), _candidate(tables, best[today], best[0], limit, pool_names)


def _with_fastest(best: list[Found], everything: Iterable[Found]) -> list[Found]:
    """Second, where of its grouping one on fewer GPUs is shown: how much they cost is to be seen."""
    fastest = min(everything, key=lambda each: each.seconds)
    is_hidden = any(each.shape == fastest.shape and each.is_on_fewer_gpus for each in best)
    return [best[0], fastest, *best[1:]] if is_hidden else best


def refusals(tables: SetTables) -> tuple[str, ...]:
    """All roles on all GPUs of a kind, where that does not fit: what one tries first."""
    return tuple(_refusals(tables))


def _refusals(tables: SetTables) -> Iterator[str]:
    for kind, group in enumerate(tables.cluster):
        sizes = [size for size in tables.sizes if size.kind == kind]
        if not sizes or any(option.kind == kind for option in tables.options[tables.everyone]):
            continue
        found = least_lacking(tables, tables.everyone, sizes[-1])
        where = f"All roles on {sizes[-1].num_gpus} {group.gpu.name}"
        if found is None:
            yield f"{where}: they have no layout, because batches do not divide."
            continue
        worst = worst_phase_of(tables, found[0])
        if worst.spare < 0:
            yield f"{where}: {worst.phase} lacks {-worst.spare / _GIB:.1f} GiB on a GPU."


def _order(tables: SetTables, found: Found, limit: float) -> tuple[bool, tuple[int, ...], float]:
    """Those as good as the fastest first, the simplest of them before others; then by seconds."""
    if found.seconds > limit:
        return True, (), found.seconds
    simplicity = (
        0 if _runs_today(tables, found) else 1,
        0 if found.schedule is Schedule.SYNCHRONOUS else 1,
        len(found.arrangement.sets),
        found.num_kinds,
        found.num_sequence_parallel,
        0 if found.is_on_fewer_gpus else 1,
    )
    return False, simplicity, found.seconds


def _runs_today(tables: SetTables, found: Found) -> bool:
    both = tables.bit(Role.ACTOR) | tables.bit(Role.ROLLOUT)
    is_shared = any(roles & both == both for roles, _ in found.arrangement.sets)
    return is_shared and found.schedule is Schedule.SYNCHRONOUS


def _without_sequence_parallel(tables: SetTables, found: Found, limit: float) -> Iterator[Found]:
    """The same pools in simpler layouts, if that is as good as the fastest placement of all."""
    if found.num_sequence_parallel == 0:
        return
    best: Found | None = None
    for options in product(*(tables.plain(roles, option.payload.size) for roles, option in found.arrangement.sets)):
        seconds = tables.seconds(found.schedule, longest(option.seconds for option in options))
        if seconds <= limit and (best is None or seconds < best.seconds):
            sets = zip((roles for roles, _ in found.arrangement.sets), options, strict=True)
            best = Found(Arrangement(seconds, tuple(sets)), found.schedule)
    if best is not None:
        yield best


def _roomier(tables: SetTables, found: Found, tie_limit: float) -> Found:
    """The same pools in layouts that need less memory, as far as that costs next to nothing."""
    sets = list(found.arrangement.sets)
    limit = (1 + _ROOM_SHARE) * found.seconds
    if found.seconds <= tie_limit:
        limit = min(limit, tie_limit)
    for place, (roles, first) in enumerate(sets):
        others = [other.seconds for at, (_, other) in enumerate(sets) if at != place]
        for unit in range(len(first.payload.choices)):
            for option in tables.roomier(roles, sets[place][1], unit):
                if tables.seconds(found.schedule, longest([*others, option.seconds])) <= limit:
                    sets[place] = roles, option
                    break
    seconds = tables.seconds(found.schedule, longest(option.seconds for _, option in sets))
    return replace(found, arrangement=Arrangement(seconds, tuple(sets)))


def _without_idle_gpus(tables: SetTables, found: Found, limit: float) -> Found:
    """One of the ties without GPUs that make next to no difference, unless that takes other layouts."""
    if found.seconds > limit:
        return found
    smaller = replace(found, arrangement=without_idle_gpus(tables, found.arrangement, found.schedule, limit))
    return found if smaller.num_sequence_parallel > found.num_sequence_parallel else smaller


def _on_fewer_gpus(tables: SetTables, found: Found, limit: float) -> Iterator[Found]:
    """If that is as good as the fastest placement of all."""
    if found.seconds <= limit:
        smaller = on_fewer_gpus(tables, found.arrangement, found.schedule, limit)
        if smaller is not None:
            yield Found(smaller, found.schedule, is_on_fewer_gpus=True)


def _candidate(tables: SetTables, found: Found, first: Found, limit: float, pool_names: tuple[str, ...]) -> Candidate:
    placement = tables.placement(found.arrangement, found.schedule, pool_names)
    plan = plan_of(tables.workload, placement, tables.constants, with_knobs=False)
    reasons = () if found is first else tuple(_reasons(tables, found, first, limit))
    return Candidate(plan, found.seconds <= limit, reasons)


def _reasons(tables: SetTables, found: Found, first: Found, limit: float) -> Iterator[str]:
    """Why it is behind the first."""
    share = found.seconds / first.seconds - 1
    if found.seconds <= limit:
        yield "as good as the first" if abs(share) < 0.005 else f"a tie: {abs(share):.0%} {_longer(share)}"
        yield from _complications(tables, found, first)
        return
    yield f"{share:.0%} longer"
    yield from _slower_stages(tables, found, first)


def _longer(share: float) -> str:
    return "longer" if share > 0 else "shorter"


def _complications(tables: SetTables, found: Found, first: Found) -> Iterator[str]:
    if _runs_today(tables, first) and not _runs_today(tables, found):
        yield "this version cannot run it"
    numbers = (
        (("pool", "pools"), len(found.arrangement.sets), len(first.arrangement.sets)),
        (("kind of GPUs", "kinds of GPUs"), found.num_kinds, first.num_kinds),
        (_SHARING, found.num_sequence_parallel, first.num_sequence_parallel),
        (("GPU", "GPUs"), found.arrangement.num_gpus, first.arrangement.num_gpus),
    )
    for names, mine, theirs in numbers:
        if mine > theirs:
            yield f"{mine} {names[mine != 1]} instead of {theirs}"


def _slower_stages(tables: SetTables, found: Found, first: Found) -> Iterator[str]:
    """The stage that is most longer, and with whom it is."""
    mine, theirs = (tables.role_choices.total(_stages(each)) for each in (found, first))
    if found.schedule is not first.schedule:
        is_beside = found.schedule is Schedule.ONE_STEP_OFF
        yield "generation goes on beside training" if is_beside else "generation and training take turns"
    differences = [ours - other for ours, other in zip(mine, theirs, strict=True)]
    place = max(range(len(differences)), key=lambda each: differences[each])
    if differences[place] > 0:
        yield (
            f"{_STAGE_NAMES[place]}: {mine[place]:.1f} s instead of {theirs[place]:.1f} s,"
            f" on {_slowest(tables, found, place)}"
        )


def _stages(found: Found) -> StageSeconds:
    return longest(option.seconds for _, option in found.arrangement.sets)


def _slowest(tables: SetTables, found: Found, stage: int) -> str:
    """The pool that a stage is waited for."""
    _, option = max(found.arrangement.sets, key=lambda each: each[1].seconds[stage])
    return f"{option.num_gpus} {tables.cluster[option.kind].gpu.name}"
