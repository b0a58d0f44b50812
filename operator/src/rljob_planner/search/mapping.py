"""The best mapping of a job's roles onto a cluster: which share GPUs, how many nodes, of which kind, in which layout.

It is as fast as anything on the grid of `pool_options` that trying everything would find, by the planner's own models
of memory and time (tests/planner/test_search.py tries everything).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from rljob_planner.clusters import cluster_text
from rljob_planner.constants import Constants
from rljob_planner.errors import PlanError
from rljob_planner.gpus import Cluster
from rljob_planner.plan import DEFAULTS, plan_of
from rljob_planner.plan_types import PhaseMemory
from rljob_planner.search.arrangements import Arrangement, best_arrangements, groupings
from rljob_planner.search.pool_options import PoolOption, PoolOptions
from rljob_planner.search.ranking import Found, placement, ranked
from rljob_planner.search.results import ChangedJob, NearestMiss, SearchResult
from rljob_planner.workload import Role, Schedule, Workload

LIMITS = (
    "Not tried: pools of parts of nodes, or of other numbers than 1, 2, 3, 4, 6, 8, 12, 16, ... nodes; pools on two"
    " kinds of nodes; sequence and tensor parallelism over nodes or beyond 8; settings of the job such as"
    " maxTokensPerMicroBatch and rollout.gpuMemoryUtilization.",
)
MAX_CHANGED_JOBS = 4
"""That are searched for where nothing fits."""
_FIELDS_OF_MAPPINGS = ("spec.pools", "tensorParallel", "sequenceParallel", "shardSize")


def search(
    workload: Workload,
    cluster: Cluster,
    constants: Constants = DEFAULTS,
    *,
    schedules: Sequence[Schedule] = tuple(Schedule),
    num_wanted: int = 10,
    pool_names: Sequence[str] = (),
) -> SearchResult:
    """At most `num_wanted` candidates; where nothing fits, what comes closest, and a search with a change of the job
    with which something does. `pool_names`: those of the job's own pools, which the first pools get.

    Raises PlanError for a cluster without GPUs, and for a role that no pool has a layout for."""
    if not any(group.num_gpus for group in cluster):
        raise PlanError("the cluster: it has no GPUs (seen 0); name one, such as 4x8xH100")
    asked = PoolOptions(workload, cluster, constants)
    _refuse_roles_without_layouts(asked)
    again = partial(_candidates, schedules=schedules, num_wanted=num_wanted, pool_names=pool_names)
    return again(asked) or SearchResult((), None, _nearest_miss(asked, pool_names, again), LIMITS)


def best_mappings(
    asked: PoolOptions, schedule: Schedule, num_wanted: int, *, that_run_today: bool = False
) -> list[list[Arrangement]]:
    """Of every grouping of roles, and every kind for each group, the fastest that fits; fastest first. After each those
    on fewer GPUs that are ties."""
    grouped = list(groupings(asked.roles))
    if schedule is Schedule.ONE_STEP_OFF:
        # Generation beside training takes a pool of its own.
        grouped = [each for each in grouped if (Role.ROLLOUT,) in each]
    if that_run_today:
        grouped = [each for each in grouped if any({Role.ACTOR, Role.ROLLOUT} <= set(roles) for roles in each)]
    sets = dict.fromkeys(roles for each in grouped for roles in each)
    options = {roles: [option for size in asked.sizes for option in asked.fastest(roles, size)] for roles in sets}
    capacity = [group.nodes for group in asked.cluster]
    cost = partial(asked.step_seconds, schedule)
    return best_arrangements(options, grouped, capacity, cost, num_wanted=num_wanted)


def _candidates(
    asked: PoolOptions, *, schedules: Sequence[Schedule], num_wanted: int, pool_names: Sequence[str]
) -> SearchResult | None:
    """None where nothing fits."""
    found = [Found(schedule, each) for schedule in schedules for each in best_mappings(asked, schedule, num_wanted)]
    today = best_mappings(asked, Schedule.SYNCHRONOUS, num_wanted, that_run_today=True)
    found += [Found(Schedule.SYNCHRONOUS, each) for each in today]
    return SearchResult(*ranked(asked, found, num_wanted, pool_names), None, LIMITS) if found else None


def _nearest_miss(
    asked: PoolOptions, pool_names: Sequence[str], again: Callable[[PoolOptions], SearchResult | None]
) -> NearestMiss | None:
    """The mapping whose fullest GPU lacks least; None where even without a limit there is none."""
    grouped = list(groupings(asked.roles))
    options: dict[tuple[Role, ...], list[PoolOption]] = {}
    for roles in dict.fromkeys(roles for grouping in grouped for roles in grouping):
        smallest = (asked.smallest(roles, size) for size in asked.sizes)
        options[roles] = [replace(each, seconds=(-_least_spare(asked.phases(each)),)) for each in smallest if each]
    # Each pool costs what it lacks, the whole what the worst of them does.
    capacity = [group.nodes for group in asked.cluster]
    fronts = best_arrangements(options, grouped, capacity, lambda lacks: max(0.0, lacks[0]), num_wanted=1)
    if not fronts:
        return None
    where = placement(asked, fronts[0][0], Schedule.SYNCHRONOUS, pool_names)
    plan = plan_of(asked.workload, where, asked.constants)
    pools = " and ".join(f"{', '.join(pool.roles)} on {pool.num_gpus} {pool.gpu.name}" for pool in where.pools)
    lacks = -_least_spare(plan.all_phases) / 2**30
    advice = (
        f"Nothing fits on {cluster_text(asked.cluster)}: of all mappings {pools} lacks least, {lacks:.1f} GiB on a GPU."
    )
    for knob in [knob for knob in plan.all_knobs if knob.workload != plan.workload][:MAX_CHANGED_JOBS]:
        result = again(PoolOptions(knob.workload, asked.cluster, asked.constants))
        if result is not None:
            changes = tuple(
                each for each in knob.changes if not any(part in each.field for part in _FIELDS_OF_MAPPINGS)
            )
            return NearestMiss(plan, advice, ChangedJob(changes, knob.workload, result))
    return NearestMiss(plan, advice)


def _least_spare(phases: Sequence[PhaseMemory]) -> float:
    return min(phase.spare for phase in phases)


def _refuse_roles_without_layouts(asked: PoolOptions) -> None:
    for role in asked.roles:
        if not any(asked.choices((role,), size) for size in asked.sizes):
            raise PlanError(
                f"spec.roles.{role}: no pool of this cluster has a layout for it (seen: a longest row of"
                f" {asked.workload.lengths.longest_row} tokens, {asked.workload.max_tokens_per_micro_batch} in a"
                " micro-batch); raise training.maxTokensPerMicroBatch"
            )
