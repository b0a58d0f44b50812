"""The best mapping of a job's roles onto a cluster: which share GPUs, how many nodes, of which kind, in which layout.

It is as fast as anything on the grid of `pool_options` that trying everything would find, by the planner's own models
of memory and time (tests/planner/test_search.py tries everything).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from rljob_planner.clusters import cluster_text
from rljob_planner.constants import Constants
from rljob_planner.errors import PlanError
from rljob_planner.gpus import Cluster
from rljob_planner.memory.changes import Change
from rljob_planner.plan import DEFAULTS, Plan, plan_of
from rljob_planner.plan_types import PhaseMemory
from rljob_planner.search.arrangements import Arrangement, best_arrangements, groupings
from rljob_planner.search.pool_options import PoolOption, PoolOptions, row_shares
from rljob_planner.search.ranking import Candidate, placement, ranked
from rljob_planner.workload import Placement, Role, Schedule, Workload

MAX_CHANGED_JOBS = 4
"""That are searched for where nothing fits."""
_LARGER = (2, 4, 8, 16)
"""Times as many nodes, which are tried where nothing fits."""
_FIELDS_OF_MAPPINGS = ("spec.pools", "tensorParallel", "sequenceParallel", "shardSize")


@dataclass(frozen=True)
class SearchResult:
    """What a search has found. Where nothing fits, there is `missed`, and candidates only with `changes` of the job."""

    candidates: tuple[Candidate, ...] = ()
    """Best first: among ties the simplest, then by seconds."""
    best_today: Candidate | None = None
    """The first of those that this version can run; it may be none of the candidates."""
    missed: Plan | None = None
    """The mapping that lacks least, with the knobs that would make it fit."""
    advice: tuple[str, ...] = ()
    """What it is and lacks, and on how many nodes something would fit, as sentences."""
    changes: tuple[Change, ...] = ()
    """The first, or the first two, with which the job has a mapping on these GPUs. Fields of pools and layouts, which
    the mapping gives, are left out, and a job that would learn something else is not what was asked for."""


def search(
    workload: Workload,
    cluster: Cluster,
    constants: Constants = DEFAULTS,
    *,
    schedules: Sequence[Schedule] = tuple(Schedule),
    num_wanted: int = 10,
    pool_names: Sequence[str] = (),
) -> SearchResult:
    """At most `num_wanted` candidates; where nothing fits, what comes closest, and the candidates of a changed job.
    `pool_names`: those of the job's own pools, which the first pools get.

    Raises PlanError for a cluster without GPUs, and for a role that no pool has a layout for."""
    if not any(group.num_gpus for group in cluster):
        raise PlanError("the cluster: it has no GPUs (seen 0); name one, such as 4x8xH100")
    asked = PoolOptions(workload, cluster, constants)
    _refuse_roles_without_layouts(asked)
    again = partial(_candidates, schedules=schedules, num_wanted=num_wanted, pool_names=pool_names)
    return again(asked) or _nearest_miss(asked, pool_names, again)


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
    return best_arrangements(options, grouped, capacity, cost, num_wanted=num_wanted, schedule=schedule)


def _candidates(
    asked: PoolOptions, *, schedules: Sequence[Schedule], num_wanted: int, pool_names: Sequence[str]
) -> SearchResult | None:
    """None where nothing fits."""
    found = [front for schedule in schedules for front in best_mappings(asked, schedule, num_wanted)]
    found += best_mappings(asked, Schedule.SYNCHRONOUS, num_wanted, that_run_today=True)
    return SearchResult(*ranked(asked, found, num_wanted, pool_names)) if found else None


def _nearest_miss(
    asked: PoolOptions, pool_names: Sequence[str], again: Callable[[PoolOptions], SearchResult | None]
) -> SearchResult:
    """The mapping whose fullest GPU lacks least. Raises PlanError where even without a limit there is none."""
    grouped = list(groupings(asked.roles))
    options: dict[tuple[Role, ...], list[PoolOption]] = {}
    for roles in dict.fromkeys(roles for grouping in grouped for roles in grouping):
        smallest = (asked.smallest(roles, size) for size in asked.sizes)
        options[roles] = [replace(each, seconds=(-_least_spare(asked.phases(each)),)) for each in smallest if each]
    # Each pool costs what it lacks, the whole what the worst of them does.
    capacity = [group.nodes for group in asked.cluster]
    fronts = best_arrangements(options, grouped, capacity, lambda lacks: max(0.0, lacks[0]), num_wanted=1)
    text = cluster_text(asked.cluster)
    if not fronts:
        raise PlanError(
            f"spec.roles: no pools of {text} have layouts for all roles together (seen batches of"
            f" {asked.workload.batch_size} x {asked.workload.group_size} responses); give other numbers of nodes"
        )
    where = placement(asked, fronts[0][0], pool_names)
    plan = plan_of(asked.workload, where, asked.constants)
    lacks = -_least_spare(plan.all_phases) / 2**30
    advice = f"Nothing fits on {text}: of all mappings {_described(where)} lacks least, {lacks:.1f} GiB on a GPU."
    missed = SearchResult(missed=plan, advice=(advice, _on_more_nodes(asked)))
    tried = [*plan.knobs, *filter(None, [plan.nearest_miss])]
    knobs = [knob for knob in tried if knob.workload != plan.workload][:MAX_CHANGED_JOBS]
    for knob in (knob for knob in knobs if not any(change.is_drastic for change in knob.changes)):
        found = again(PoolOptions(knob.workload, asked.cluster, asked.constants))
        if found is not None and found.best_today is not None:
            own = tuple(each for each in knob.changes if not any(part in each.field for part in _FIELDS_OF_MAPPINGS))
            return replace(missed, candidates=found.candidates, best_today=found.best_today, changes=own)
    return missed


def _on_more_nodes(asked: PoolOptions) -> str:
    """On how many the job fits as it is, in a way that runs today."""
    for factor in _LARGER:
        larger = tuple(replace(group, nodes=factor * group.nodes) for group in asked.cluster)
        tried = PoolOptions(asked.workload, larger, asked.constants)
        if fronts := best_mappings(tried, Schedule.SYNCHRONOUS, 1, that_run_today=True):
            where = placement(tried, fronts[0][-1])
            return f"It would fit on {cluster_text(larger)}: {_described(where)}."
    return f"Nor does anything fit on {cluster_text(larger)}: more GPUs alone do not help."


def _described(where: Placement) -> str:
    return " and ".join(f"{', '.join(pool.roles)} on {pool.num_gpus} {pool.gpu.name}" for pool in where.pools)


def _least_spare(phases: Sequence[PhaseMemory]) -> float:
    return min(phase.spare for phase in phases)


def _refuse_roles_without_layouts(asked: PoolOptions) -> None:
    """Ranks of each role must hold a longest row together, and get as many responses of a batch and of an update."""
    job = asked.workload
    for role in asked.roles:
        if any(asked.choices((role,), size) for size in asked.sizes):
            continue
        where = f"spec.roles.{role}: no pool of this cluster has a layout for it"
        most = max((ranks for size in asked.sizes for ranks in row_shares(role, job, size)), default=1)
        if job.max_tokens_per_micro_batch * most < job.lengths.longest_row:
            raise PlanError(
                f"{where} (seen: a longest row of {job.lengths.longest_row} tokens, {job.max_tokens_per_micro_batch} in"
                f" a micro-batch, and at most {most} GPUs that share a row); raise training.maxTokensPerMicroBatch"
            )
        sizes = sorted({size.num_gpus for size in asked.sizes})
        raise PlanError(
            f"{where} (seen: batchSize {job.batch_size}, miniBatchSize {job.mini_batch_size}, groupSize"
            f" {job.group_size}, pools of {', '.join(map(str, sizes))} GPUs); change training.batchSize,"
            " training.miniBatchSize or rollout.groupSize, so that batchSize x groupSize and miniBatchSize x groupSize"
            " divide by the GPUs of a pool (by fewer where roles have sequenceParallel)"
        )
