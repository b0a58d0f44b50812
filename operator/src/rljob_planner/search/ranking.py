"""Which of the placements found come first, and what is to be said about the others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from rljob_planner.plan import plan_of
from rljob_planner.search.arrangements import Arrangement
from rljob_planner.search.pool_options import PoolOptions, longest
from rljob_planner.search.results import TIE_SHARE, Candidate
from rljob_planner.workload import PlacedPool, Placement, Role, Schedule

WORTH = 2
"""So many times fewer GPUs are worth a step that is a little longer."""
SMALL_SHARE = 0.01
"""Of a step, for which GPUs are given back, and layouts are taken that are simpler or leave more memory free."""
_STAGE_NAMES = ("the hand-over of weights", "generation", "scoring", "passes before the updates", "updates")


@dataclass(frozen=True)
class Found:
    """A grouping of roles on kinds of nodes: its fastest arrangement, then those on fewer GPUs that are ties."""

    schedule: Schedule
    arrangements: Sequence[Arrangement]


@dataclass(frozen=True)
class _Chosen:
    schedule: Schedule
    arrangement: Arrangement
    is_on_fewer_gpus: bool = False
    """Whether it is as good as another one of its grouping that takes twice as many GPUs, or more."""

    @property
    def seconds(self) -> float:
        return self.arrangement.cost

    @property
    def shape(self) -> tuple[Schedule, frozenset[tuple[tuple[Role, ...], int]]]:
        """Of which one is enough."""
        return self.schedule, frozenset((each.roles, each.size.kind) for each in self.arrangement.options)

    @property
    def runs_today(self) -> bool:
        is_shared = any({Role.ACTOR, Role.ROLLOUT} <= set(each.roles) for each in self.arrangement.options)
        return is_shared and self.schedule is Schedule.SYNCHRONOUS

    @property
    def complications(self) -> tuple[int, int, int, int]:
        """Pools, kinds of GPUs, roles with sequence parallelism, GPUs."""
        options = self.arrangement.options
        num_kinds = len({each.size.kind for each in options})
        num_shared = sum(each.num_sequence_parallel for each in options)
        return len(options), num_kinds, num_shared, self.arrangement.num_gpus


def ranked(
    asked: PoolOptions, found: Iterable[Found], num_wanted: int, pool_names: Sequence[str]
) -> tuple[tuple[Candidate, ...], Candidate | None]:
    """The best ones, and the best that runs today. Of a grouping on kinds there is one; where it is on fewer GPUs than
    the fastest of all, that one comes second, to show what they cost."""
    found = list(found)
    fastest = min((_Chosen(each.schedule, each.arrangements[0]) for each in found), key=lambda each: each.seconds)
    limit = (1 + TIE_SHARE) * fastest.seconds
    shapes = {each.shape: _roomier(asked, each, limit) for each in (_chosen(each, limit) for each in found)}
    best = sorted(shapes.values(), key=lambda each: _order(each, limit))
    if shapes[fastest.shape].is_on_fewer_gpus:
        best.insert(1, _roomier(asked, fastest, limit))
    today = next((each for each in best if each.runs_today), None)

    def candidate(each: _Chosen) -> Candidate:
        where = placement(asked, each.arrangement, each.schedule, pool_names)
        plan = plan_of(asked.workload, where, asked.constants, with_knobs=False)
        reasons = () if each is best[0] else tuple(_reasons(asked, each, best[0], limit))
        return Candidate(plan, each.seconds <= limit, reasons)

    candidates = tuple(candidate(each) for each in best[:num_wanted])
    if today is None or today in best[:num_wanted]:
        return candidates, None if today is None else candidates[best.index(today)]
    return candidates, candidate(today)


def placement(
    asked: PoolOptions, arrangement: Arrangement, schedule: Schedule, pool_names: Sequence[str] = ()
) -> Placement:
    """The actor's pool first: roles that a job gives no pool are there. `pool_names` are those of the first pools."""
    options = sorted(arrangement.options, key=lambda each: asked.roles.index(each.roles[0]))
    pools: list[PlacedPool] = []
    for place, option in enumerate(options):
        names = [pool.name for pool in pools]
        if place < len(pool_names):
            name = pool_names[place]
        else:
            name = "main" if len(options) == 1 else "-".join(_short_name(role) for role in option.roles)
            name = name if name not in (*names, *pool_names) else f"{name}-{place}"
        pools.append(asked.pool(name, option))
    return Placement(tuple(pools), schedule)


def _chosen(found: Found, limit: float) -> _Chosen:
    """The fastest one; of ties that on half of the GPUs or fewer, or without GPUs that make next to no difference."""
    fastest = found.arrangements[0]
    ties = [each for each in found.arrangements if each.cost <= limit]
    fewest = min(ties, key=lambda each: each.num_gpus, default=fastest)
    if WORTH * fewest.num_gpus <= fastest.num_gpus:
        return _Chosen(found.schedule, fewest, is_on_fewer_gpus=True)
    as_fast = [each for each in ties if each.cost <= (1 + SMALL_SHARE) * fastest.cost]
    return _Chosen(found.schedule, min(as_fast, key=lambda each: each.num_gpus, default=fastest))


def _roomier(asked: PoolOptions, chosen: _Chosen, tie_limit: float) -> _Chosen:
    """The same pools in layouts that are simpler or need less memory, as far as that costs next to nothing."""
    options = list(chosen.arrangement.options)
    limit = (1 + SMALL_SHARE) * chosen.seconds
    if chosen.seconds <= tie_limit:
        limit = min(limit, tie_limit)
    seconds = chosen.seconds
    for at, option in enumerate(options):
        for place in range(len(option.choices)):
            for other in asked.roomier(options[at], place):
                stages = longest(each.seconds for each in (*options[:at], other, *options[at + 1 :]))
                if asked.step_seconds(chosen.schedule, stages) <= limit:
                    options[at], seconds = other, asked.step_seconds(chosen.schedule, stages)
                    break
    return replace(chosen, arrangement=Arrangement(seconds, tuple(options)))


def _order(chosen: _Chosen, limit: float) -> tuple[bool, tuple[int, ...], float]:
    """Those as good as the fastest first, the simplest of them before others; then by seconds."""
    if chosen.seconds > limit:
        return True, (), chosen.seconds
    overlaps = chosen.schedule is not Schedule.SYNCHRONOUS
    return False, (not chosen.runs_today, overlaps, *chosen.complications[:3]), chosen.seconds


def _reasons(asked: PoolOptions, mine: _Chosen, first: _Chosen, limit: float) -> Iterator[str]:
    """Why it is behind the first."""
    share = mine.seconds / first.seconds - 1
    longer = f"{abs(share):.0%} {'longer' if share > 0 else 'shorter'}"
    if mine.seconds <= limit:
        yield "as good as the first" if abs(share) < 0.005 else f"a tie: {longer}"
        if first.runs_today and not mine.runs_today:
            yield "this version cannot run it"
        names = ("pool{s}", "kind{s} of GPUs", "role{s} with sequence parallelism", "GPU{s}")
        for name, own, other in zip(names, mine.complications, first.complications, strict=True):
            if own > other:
                yield f"{own} {name.format(s='' if own == 1 else 's')} instead of {other}"
        return
    yield longer
    if mine.schedule is not first.schedule:
        is_beside = mine.schedule is Schedule.ONE_STEP_OFF
        yield "generation goes on beside training" if is_beside else "generation and training take turns"
    yield from _slowest_stage(asked, mine, first)


def _slowest_stage(asked: PoolOptions, mine: _Chosen, first: _Chosen) -> Iterator[str]:
    """The stage that is most longer, and the pool that it is waited for."""
    own, other = (asked.stages(longest(o.seconds for o in each.arrangement.options)) for each in (mine, first))
    place = max(range(len(own)), key=lambda each: own[each] - other[each])
    if own[place] > other[place]:
        size = max(mine.arrangement.options, key=lambda each: each.seconds[place]).size
        yield (
            f"{_STAGE_NAMES[place]}: {own[place]:.1f} s instead of {other[place]:.1f} s,"
            f" on {size.num_gpus} {asked.cluster[size.kind].gpu.name}"
        )


def _short_name(role: Role) -> str:
    return "reward" if role is Role.REWARD_MODEL else role.value
