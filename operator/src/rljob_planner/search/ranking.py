"""Which of the placements found come first, and what is to be said about the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rljob_planner.plan import Plan, plan_of
from rljob_planner.search.arrangements import TIE_SHARE, Arrangement
from rljob_planner.search.pool_options import PoolOptions, longest
from rljob_planner.workload import PlacedPool, Placement, Role, Schedule

WORTH = 2
"""So many times fewer GPUs are worth a step that is a little longer."""
SMALL_SHARE = 0.01
"""Of a step, for which GPUs are given back, and layouts are taken that are simpler or leave more memory free."""
_STAGE_NAMES = ("the hand-over of weights", "generation", "scoring", "passes before the updates", "updates")


@dataclass(frozen=True)
class Candidate:
    """One of the best placements: of a grouping of roles on kinds of GPUs the fastest one, or a simpler one that is
    nearly as fast."""

    plan: Plan
    """Without knobs."""
    is_tie: bool
    """Whether it is among those that are as good as the fastest."""
    reasons: tuple[str, ...] = ()
    """Why it is behind the first, as sentences; none for the first."""

    @property
    def runs_today(self) -> bool:
        """Whether this version of the trainer can run it."""
        return self.plan.placement.runs_today

    @property
    def seconds(self) -> float:
        """Of a step, likely."""
        return self.plan.step.total.likely


def ranked(
    asked: PoolOptions, found: Sequence[Sequence[Arrangement]], num_wanted: int, pool_names: Sequence[str]
) -> tuple[tuple[Candidate, ...], Candidate | None]:
    """The best ones, and the best that runs today. Of a grouping on kinds there is one; where it is on half of the GPUs
    of the fastest of all or fewer, the fastest comes after it, to show what they cost. `found`: of each grouping the
    fastest, then those on fewer GPUs that are ties."""
    fastest = min((front[0] for front in found), key=lambda each: each.cost)
    limit = (1 + TIE_SHARE) * fastest.cost
    shapes = {front[0].shape: _roomier(asked, _chosen(front, limit), limit) for front in found}
    best = sorted(shapes.values(), key=lambda each: _order(each, limit))
    on_fewer = shapes[fastest.shape]
    if WORTH * on_fewer.num_gpus <= fastest.num_gpus:
        best.insert(best.index(on_fewer) + 1, _roomier(asked, fastest, limit))

    def candidate(each: Arrangement) -> Candidate:
        plan = plan_of(asked.workload, placement(asked, each, pool_names), asked.constants, with_knobs=False)
        reasons = () if each is best[0] else tuple(_reasons(asked, each, best[0], limit))
        return Candidate(plan, each.cost <= limit, reasons)

    candidates = tuple(map(candidate, best[:num_wanted]))
    place = next((place for place, each in enumerate(best) if each.runs_today), None)
    if place is None:
        return candidates, None
    return candidates, candidates[place] if place < num_wanted else candidate(best[place])


def placement(asked: PoolOptions, arrangement: Arrangement, pool_names: Sequence[str] = ()) -> Placement:
    """The actor's pool first: roles that a job gives no pool are there. `pool_names` are those of the first pools."""
    options = sorted(arrangement.options, key=lambda each: asked.roles.index(each.roles[0]))
    pools: list[PlacedPool] = []
    for place, option in enumerate(options):
        names = "-".join("reward" if role is Role.REWARD_MODEL else role.value for role in option.roles)
        name = "main" if len(options) == 1 else names
        if place < len(pool_names):
            name = pool_names[place]
        elif name in (*pool_names, *(pool.name for pool in pools)):
            name = f"{name}-{place}"
        pools.append(asked.pool(name, option))
    return Placement(tuple(pools), arrangement.schedule)


def _chosen(front: Sequence[Arrangement], limit: float) -> Arrangement:
    """The fastest one; of ties that on half of the GPUs or fewer, or without GPUs that make next to no difference."""
    fastest = front[0]
    ties = [each for each in front if each.cost <= limit]
    fewest = min(ties, key=lambda each: each.num_gpus, default=fastest)
    if WORTH * fewest.num_gpus <= fastest.num_gpus:
        return fewest
    as_fast = [each for each in ties if each.cost <= (1 + SMALL_SHARE) * fastest.cost]
    return min(as_fast, key=lambda each: each.num_gpus, default=fastest)


def _roomier(asked: PoolOptions, chosen: Arrangement, tie_limit: float) -> Arrangement:
    """The same pools in layouts that are simpler or need less memory, as far as that costs next to nothing."""
    options, seconds = list(chosen.options), chosen.cost
    limit = (1 + SMALL_SHARE) * seconds
    if seconds <= tie_limit:
        limit = min(limit, tie_limit)
    for at, option in enumerate(options):
        for place in range(len(option.choices)):
            for other in asked.roomier(options[at], place):
                stages = longest(each.seconds for each in (*options[:at], other, *options[at + 1 :]))
                if (own := asked.step_seconds(chosen.schedule, stages)) <= limit:
                    options[at], seconds = other, own
                    break
    return replace(chosen, cost=seconds, options=tuple(options))


def _order(chosen: Arrangement, limit: float) -> tuple[bool, tuple[int, ...], float]:
    """Those as good as the fastest first, the simplest of them before others; then by seconds."""
    if chosen.cost > limit:
        return True, (), chosen.cost
    overlaps = chosen.schedule is not Schedule.SYNCHRONOUS
    return False, (not chosen.runs_today, overlaps, *chosen.complications[:3]), chosen.cost


def _reasons(asked: PoolOptions, mine: Arrangement, first: Arrangement, limit: float) -> Iterator[str]:
    """Why it is behind the first; where it is slower, also the stage that is most longer, and the pool that it is
    waited for."""
    share = mine.cost / first.cost - 1
    longer = f"{abs(share):.0%} {'longer' if share > 0 else 'shorter'}"
    if mine.cost <= limit:
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
    now, before = (asked.stages(longest(o.seconds for o in each.options)) for each in (mine, first))
    place = max(range(len(now)), key=lambda each: now[each] - before[each])
    if now[place] > before[place]:
        size = max(mine.options, key=lambda each: each.seconds[place]).size
        gpus = f"on {size.num_gpus} {asked.cluster[size.kind].gpu.name}"
        yield f"{_STAGE_NAMES[place]}: {now[place]:.1f} s instead of {before[place]:.1f} s, {gpus}"
