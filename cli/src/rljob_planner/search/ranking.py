"""Orders the arrangements that the search has found, and explains for each why it is not the first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rljob_planner.plan import Plan, plan_of
from rljob_planner.search.arrangements import TIE_SHARE, Arrangement
from rljob_planner.search.pool_options import SearchSpace, longest
from rljob_planner.workload import PlacedPool, Placement, Role, Schedule

_MIN_GPU_RATIO = 2
"""An arrangement that counts as equally fast as the fastest (a tie, see TIE_SHARE) is preferred if the fastest needs at
least 2 times its GPUs."""
SMALL_SHARE = 0.01
"""A step may become longer by this share if it then needs fewer GPUs, has simpler layouts, or leaves more memory
free."""
_STAGE_NAMES = ("weight sync", "generation", "scoring", "passes before the updates", "updates")
"""The names of the stages of `StageSeconds`."""


@dataclass(frozen=True)
class Candidate:
    """One of the best placements: the fastest for its grouping of roles and its node types, or one that is simpler and
    nearly as fast."""

    plan: Plan
    """The plan of the placement, without proposals."""
    is_tie: bool
    """Whether a step counts as equally fast as that of the fastest placement (TIE_SHARE)."""
    reasons: tuple[str, ...] = ()
    """Phrases that say why the candidate is not the first; empty for the first."""

    @property
    def is_supported(self) -> bool:
        """Whether this version of the trainer can run the placement."""
        return self.plan.placement.is_supported

    @property
    def seconds(self) -> float:
        """Likely seconds of a step."""
        return self.plan.step.total.likely


def ranked(
    space: SearchSpace, found: Sequence[Sequence[Arrangement]], num_wanted: int, pool_names: Sequence[str]
) -> tuple[tuple[Candidate, ...], Candidate | None]:
    """The best candidates, and the best candidate that this version can run.

    There is one candidate for each combination of grouping and node types. Only the combination of the fastest
    arrangement may have two: if a tie was chosen that needs at most half of the GPUs, the fastest arrangement follows
    the tie, to show the gain of more GPUs. `found`: for each combination its fastest arrangement, then arrangements on
    fewer GPUs, each slower than the ones before (a Pareto front).
    """
    fastest = min((front[0] for front in found), key=lambda each: each.cost)
    limit = (1 + TIE_SHARE) * fastest.cost
    candidates_by_combination = {
        front[0].combination: _with_simpler_or_smaller_layouts(space, _chosen(front, limit), limit) for front in found
    }
    best = sorted(candidates_by_combination.values(), key=lambda each: _order(each, limit))
    on_fewer = candidates_by_combination[fastest.combination]
    if _MIN_GPU_RATIO * on_fewer.num_gpus <= fastest.num_gpus:
        best.insert(best.index(on_fewer) + 1, _with_simpler_or_smaller_layouts(space, fastest, limit))

    def candidate(each: Arrangement) -> Candidate:
        plan = plan_of(space.workload, placement(space, each, pool_names), space.constants, with_proposals=False)
        reasons = () if each is best[0] else tuple(_reasons(space, each, best[0], limit))
        return Candidate(plan, each.cost <= limit, reasons)

    candidates = tuple(map(candidate, best[:num_wanted]))
    index = next((index for index, each in enumerate(best) if each.is_supported), None)
    if index is None:
        return candidates, None
    return candidates, candidates[index] if index < num_wanted else candidate(best[index])


def placement(space: SearchSpace, arrangement: Arrangement, pool_names: Sequence[str] = ()) -> Placement:
    """Converts an arrangement of the search to a placement, which has named pools. The actor's pool comes first,
    because it is the default pool of a job file. `pool_names`: names for the first pools."""
    options = sorted(arrangement.options, key=lambda each: space.roles.index(each.roles[0]))
    pools: list[PlacedPool] = []
    for index, option in enumerate(options):
        names = "-".join("reward" if role is Role.REWARD_MODEL else role.value for role in option.roles)
        name = "main" if len(options) == 1 else names
        if index < len(pool_names):
            name = pool_names[index]
        elif name in (*pool_names, *(pool.name for pool in pools)):
            name = f"{name}-{index}"
        pools.append(space.pool(name, option))
    return Placement(tuple(pools), arrangement.schedule)


def _chosen(front: Sequence[Arrangement], limit: float) -> Arrangement:
    """The arrangement of a combination that becomes its candidate. If a tie needs at most half of the GPUs of the
    fastest: the tie with the fewest GPUs. Otherwise: the one with the fewest GPUs that is nearly as fast as the fastest
    (SMALL_SHARE)."""
    fastest = front[0]
    ties = [each for each in front if each.cost <= limit]
    fewest = min(ties, key=lambda each: each.num_gpus, default=fastest)
    if _MIN_GPU_RATIO * fewest.num_gpus <= fastest.num_gpus:
        return fewest
    as_fast = [each for each in ties if each.cost <= (1 + SMALL_SHARE) * fastest.cost]
    return min(as_fast, key=lambda each: each.num_gpus, default=fastest)


def _with_simpler_or_smaller_layouts(space: SearchSpace, chosen: Arrangement, tie_limit: float) -> Arrangement:
    """The same pools with layouts that are simpler or need less memory, if the step hardly becomes longer."""
    options, seconds = list(chosen.options), chosen.cost
    limit = (1 + SMALL_SHARE) * seconds
    if seconds <= tie_limit:
        limit = min(limit, tie_limit)
    for index, option in enumerate(options):
        for choice in range(len(option.choices)):
            for other in space.simpler_or_smaller(options[index], choice):
                stages = longest(each.seconds for each in (*options[:index], other, *options[index + 1 :]))
                if (changed := space.step_seconds(chosen.schedule, stages)) <= limit:
                    options[index], seconds = other, changed
                    break
    return replace(chosen, cost=seconds, options=tuple(options))


def _order(chosen: Arrangement, limit: float) -> tuple[bool, tuple[int, ...], float]:
    """Sort key: ties with the fastest come first, supported and simple ones at the beginning; then the others by
    seconds."""
    if chosen.cost > limit:
        return True, (), chosen.cost
    overlaps = chosen.schedule is not Schedule.SYNCHRONOUS
    return False, (not chosen.is_supported, overlaps, *chosen.complications[:3]), chosen.cost


def _reasons(space: SearchSpace, mine: Arrangement, first: Arrangement, limit: float) -> Iterator[str]:
    """Phrases that say why `mine` is not the first. If it is slower than a tie, one phrase names the stage with the
    most additional seconds, and the GPUs of the pool that is slowest in this stage."""
    share = mine.cost / first.cost - 1
    longer = f"{abs(share):.0%} {'longer' if share > 0 else 'shorter'}"
    if mine.cost <= limit:
        yield "a tie (as fast as the first)" if abs(share) < 0.005 else f"a tie (the step is {longer} than the first)"
        if first.is_supported and not mine.is_supported:
            yield "this version cannot run it"
        names = ("pool{s}", "node type{s}", "role{s} with sequence parallelism", "GPU{s}")
        for name, my_count, first_count in zip(names, mine.complications, first.complications, strict=True):
            if my_count > first_count:
                yield f"{my_count} {name.format(s='' if my_count == 1 else 's')} instead of {first_count}"
        return
    yield f"{longer} than the first"
    if mine.schedule is not first.schedule:
        overlaps = mine.schedule is Schedule.ONE_STEP_OFF
        yield "generation and training run at the same time" if overlaps else "generation and training take turns"
    now, before = (space.stages(longest(o.seconds for o in each.options)) for each in (mine, first))
    stage = max(range(len(now)), key=lambda each: now[each] - before[each])
    if now[stage] > before[stage]:
        size = max(mine.options, key=lambda each: each.seconds[stage]).size
        gpus = f"on {size.num_gpus} {space.cluster[size.kind].gpu.name}"
        yield f"{_STAGE_NAMES[stage]}: {now[stage]:.1f} s instead of {before[stage]:.1f} s, {gpus}"
