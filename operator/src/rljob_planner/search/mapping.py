"""The best mapping of a job's roles onto a cluster: which share GPUs, how many, of which kind, in which layout.

Exact, for the planner's own models of memory and time, over all of `role_layouts`: which roles share a pool (set
partitions), the pools' sizes and kinds, and the layouts of all roles, in two schedules. What is found is as fast as
anything that trying everything would find (tests/planner/test_search_on_models.py does). What `role_layouts` leaves
out is not tried.

HybridFlow (arXiv 2409.19256v2, section 6, algorithm 1) describes such a search for one kind of GPU, without the
hand-over of weights in the cost. Here that is a stage like the others, and the rollout a role like the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from rljob_planner.constants import Constants
from rljob_planner.errors import PlanError
from rljob_planner.gpus import Cluster
from rljob_planner.placement import Schedule
from rljob_planner.plan import DEFAULTS
from rljob_planner.search.arrangements import Arrangement, Partition, best_arrangements
from rljob_planner.search.nearest_miss import nearest_miss
from rljob_planner.search.ranking import Found, ranked, refusals
from rljob_planner.search.results import ChangedJob, NearestMiss, SearchResult
from rljob_planner.search.set_tables import PoolChoice, SetTables
from rljob_planner.workload import Role, Workload

LIMITS = (
    "Not tried: pools of parts of several nodes, pools on two kinds of nodes, sequence and tensor parallelism over"
    " nodes or beyond 8, settings of the job such as maxTokensPerMicroBatch and"
    " rollout.gpuMemoryUtilization.",
)
MAX_POOLS = 8
"""That a job may have."""
MAX_CHANGED_JOBS = 4
"""That are searched for where nothing fits."""
_LAYOUT_FIELDS = ("tensorParallel", "sequenceParallel", "shardSize")


def search(
    workload: Workload,
    cluster: Cluster,
    constants: Constants = DEFAULTS,
    *,
    schedules: Sequence[Schedule] = tuple(Schedule),
    num_wanted: int = 10,
    pool_names: Sequence[str] = (),
    may_change_job: bool = True,
) -> SearchResult:
    """At most `num_wanted` candidates. `pool_names`: those of the job's own pools, which the first pools get.
    `may_change_job`: where nothing fits, to search again with what makes the nearest miss fit.

    Raises PlanError for a cluster without GPUs, and for a role that no pool has a layout for."""
    if not any(group.num_gpus for group in cluster):
        raise PlanError("the cluster: it has no GPUs (seen 0); name one, such as 4x8xH100")
    tables = SetTables(workload, cluster, constants)
    _refuse_roles_without_layouts(tables)
    names = tuple(pool_names)
    result = _candidates(tables, schedules, num_wanted, names)
    if result is not None:
        return result
    missed = nearest_miss(tables, names)
    if missed is not None and may_change_job:
        again = partial(_candidates, schedules=schedules, num_wanted=num_wanted, names=names)
        missed = replace(missed, changed=_changed_job(tables, missed, again))
    return SearchResult((), None, nearest_miss=missed, limits=LIMITS)


def _candidates(
    tables: SetTables, schedules: Sequence[Schedule], num_wanted: int, names: tuple[str, ...]
) -> SearchResult | None:
    """None where nothing fits."""
    found = [
        Found(arrangement, schedule)
        for schedule in schedules
        for arrangement in best_mappings(tables, schedule, num_wanted)
    ]
    today = best_mappings(tables, Schedule.SYNCHRONOUS, num_wanted, partial(_runs_today, tables))
    found += [Found(each, Schedule.SYNCHRONOUS) for each in today]
    if not found:
        return None
    candidates, best_today = ranked(tables, found, num_wanted, names)
    return SearchResult(candidates, best_today, refused=refusals(tables), limits=LIMITS)


def _changed_job(
    tables: SetTables, missed: NearestMiss, again: Callable[[SetTables], SearchResult | None]
) -> ChangedJob | None:
    """With the first of the changes that help the nearest miss most, with which there is a mapping."""
    plan = missed.plan
    knobs = [*plan.knobs, *([] if plan.nearest_miss is None else [plan.nearest_miss])]
    for knob in [knob for knob in knobs if knob.workload != plan.workload][:MAX_CHANGED_JOBS]:
        result = again(SetTables(knob.workload, tables.cluster, tables.constants))
        if result is not None:
            changes = tuple(change for change in knob.changes if not _is_of_mapping(change.field))
            return ChangedJob(changes, knob.workload, result)
    return None


def _is_of_mapping(field: str) -> bool:
    return field.startswith("spec.pools") or field.rpartition(".")[2] in _LAYOUT_FIELDS


def best_mappings(
    tables: SetTables,
    schedule: Schedule,
    num_wanted: int,
    is_allowed: Callable[[Partition], bool] = lambda _: True,
) -> list[Arrangement[PoolChoice]]:
    """Of every grouping of roles, and every kind for each group, the fastest that fits; fastest first."""
    rollout = tables.bit(Role.ROLLOUT)

    def allows(partition: Partition) -> bool:
        can_overlap = schedule is Schedule.SYNCHRONOUS or rollout in partition
        return can_overlap and len(partition) <= MAX_POOLS and is_allowed(partition)

    while True:
        found = best_arrangements(
            tables.options,
            tables.capacity,
            partial(tables.seconds, schedule),
            roles=tables.everyone,
            num_wanted=num_wanted,
            is_allowed=allows,
        )
        if tables.correct(found):
            return found


def _runs_today(tables: SetTables, partition: Partition) -> bool:
    both = tables.bit(Role.ACTOR) | tables.bit(Role.ROLLOUT)
    return any(roles & both == both for roles in partition)


def _refuse_roles_without_layouts(tables: SetTables) -> None:
    for role in tables.roles:
        if not any(tables.role_choices.has_layouts(role, size) for size in tables.sizes):
            raise PlanError(
                f"spec.roles.{role}: no pool of this cluster has a layout for it (seen: a longest row of"
                f" {tables.workload.lengths.longest_row} tokens, {tables.workload.max_tokens_per_micro_batch} in a"
                " micro-batch); raise training.maxTokensPerMicroBatch"
            )
