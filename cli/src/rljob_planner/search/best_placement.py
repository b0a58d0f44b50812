"""Finds the best placement of a job's roles on a cluster. A placement says which roles share a pool, the number of
nodes and the GPU type of each pool, and the layout of each role.

The search finds the fastest of all placements that `pool_options` allows, by the planner's models of memory and time
(tests/planner/test_search.py tries all of them). The first of the result may be a simpler one that is nearly as fast
(`ranking`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from rljob_planner.clusters import cluster_text
from rljob_planner.constants import Constants
from rljob_planner.errors import PlanError
from rljob_planner.gpus import Cluster
from rljob_planner.memory.job_changes import Change
from rljob_planner.plan import DEFAULTS, Plan, plan_of
from rljob_planner.plan_types import PhaseMemory
from rljob_planner.search.arrangements import Arrangement, best_arrangements, groupings
from rljob_planner.search.pool_options import PoolOption, SearchSpace, sequence_parallel_sizes
from rljob_planner.search.ranking import Candidate, placement, ranked
from rljob_planner.workload import Placement, Role, Schedule, Workload, can_run

MAX_CHANGED_JOBS = 4
"""The largest number of changed jobs that are searched if the job itself does not fit."""
_LARGER = (2, 4, 8, 16)
"""If the job does not fit, clusters with 2, 4, 8 and 16 times as many nodes are tried."""
_PLACEMENT_FIELDS = ("spec.pools", "tensorParallel", "sequenceParallel", "shardSize")
"""Fields with one of these parts in their path are set by the placement, not by a change of the job."""


@dataclass(frozen=True)
class SearchResult:
    """The result of a search. If nothing fits, there is `nearest_miss`, and there are candidates only for the job with
    `changes`."""

    candidates: tuple[Candidate, ...] = ()
    """The best placements, best first: ties with the fastest, the simplest first; then the others by seconds of a
    step."""
    best_supported: Candidate | None = None
    """The best placement that this version of the trainer can run; None if there is none. It may be missing in
    `candidates`."""
    nearest_miss: Plan | None = None
    """If nothing fits: the plan of the closest placement, with proposals that make it fit."""
    advice: tuple[str, ...] = ()
    """If nothing fits: sentences about the closest placement, and about the number of nodes on which the job fits."""
    changes: tuple[Change, ...] = ()
    """If nothing fits: the changes with which the job fits on these GPUs. Changes of fields that the placement sets are
    left out. LoRA and more nodes are not used."""


def search(
    workload: Workload,
    cluster: Cluster,
    constants: Constants = DEFAULTS,
    *,
    num_wanted: int = 10,
    pool_names: Sequence[str] = (),
) -> SearchResult:
    """The best placements, at most `num_wanted`. If nothing fits: the closest placement, and the best placements of a
    changed job. `pool_names`: names for the first pools, usually those of the job's pools.

    Raises:
        PlanError: the cluster has no GPUs, or no pool has a valid layout for a role.
    """
    if not any(group.num_gpus for group in cluster):
        raise PlanError("the cluster: has no GPUs (seen 0); describe a cluster with GPUs, for example 4x8xH100")
    space = SearchSpace(workload, cluster, constants)
    _check_layouts_exist(space)
    search_again = partial(_candidates, num_wanted=num_wanted, pool_names=pool_names)
    return search_again(space) or _nearest_miss(space, pool_names, search_again)


def best_by_grouping(
    space: SearchSpace, schedule: Schedule, num_wanted: int, *, supported_only: bool = False
) -> list[list[Arrangement]]:
    """The best `num_wanted` combinations of grouping and node types, the fastest first. For each: its fastest
    arrangement that fits, then arrangements on fewer GPUs."""
    grouped = list(groupings(space.roles))
    if schedule is Schedule.ONE_STEP_OFF:
        # Generation and training can only run at the same time if the rollout has a separate pool.
        grouped = [each for each in grouped if (Role.ROLLOUT,) in each]
    if supported_only:
        grouped = [each for each in grouped if can_run(each, schedule)]
    sets = dict.fromkeys(roles for each in grouped for roles in each)
    options = {roles: [option for size in space.sizes for option in space.fastest(roles, size)] for roles in sets}
    capacity = [group.nodes for group in space.cluster]
    cost = partial(space.step_seconds, schedule)
    return best_arrangements(options, grouped, capacity, cost, num_wanted=num_wanted, schedule=schedule)


def _candidates(space: SearchSpace, *, num_wanted: int, pool_names: Sequence[str]) -> SearchResult | None:
    """The search result; None if nothing fits."""
    found = [front for schedule in Schedule for front in best_by_grouping(space, schedule, num_wanted)]
    found += best_by_grouping(space, Schedule.SYNCHRONOUS, num_wanted, supported_only=True)
    return SearchResult(*ranked(space, found, num_wanted, pool_names)) if found else None


def _nearest_miss(
    space: SearchSpace, pool_names: Sequence[str], search_again: Callable[[SearchSpace], SearchResult | None]
) -> SearchResult:
    """The search result if nothing fits: the closest placement, whose fullest GPU lacks the least memory, and the best
    placements of a changed job. If there is a placement that this version of the trainer can run, the closest placement
    is one of these.

    Raises:
        PlanError: there is no placement, even if memory is ignored.
    """
    grouped = list(groupings(space.roles))
    options: dict[tuple[Role, ...], list[PoolOption]] = {}
    for roles in dict.fromkeys(roles for grouping in grouped for roles in grouping):
        smallest = (space.smallest(roles, size) for size in space.sizes)
        options[roles] = [replace(each, seconds=(-_least_spare(space.phases(each)),)) for each in smallest if each]
    # Memory takes the place of time here: the cost of a placement is the largest amount of memory that a pool lacks.
    closest = partial(
        best_arrangements,
        options,
        capacity=[group.nodes for group in space.cluster],
        cost=lambda shortages: max(0.0, shortages[0]),
        num_wanted=1,
    )
    supported = [each for each in grouped if can_run(each, Schedule.SYNCHRONOUS)]
    fronts = closest(grouped=supported) or closest(grouped=grouped)
    text = cluster_text(space.cluster)
    if not fronts:
        raise PlanError(
            f"spec.roles: no pools of {text} have valid layouts for all roles together (seen batches of"
            f" {space.workload.batch_size} x {space.workload.group_size} responses); change the numbers of nodes"
        )
    where = placement(space, fronts[0][0], pool_names)
    plan = plan_of(space.workload, where, space.constants)
    lacks = -_least_spare(plan.all_phases) / 2**30
    advice = (
        f"Nothing fits on {text} without a change of the job's settings. The closest placement, {_described(where)},"
        f" needs {lacks:.1f} GiB too much per GPU."
    )
    missed = SearchResult(nearest_miss=plan, advice=(advice, _on_more_nodes(space)))
    tried = [*plan.proposals, *filter(None, [plan.nearest_miss])]
    proposals = [proposal for proposal in tried if proposal.workload != plan.workload][:MAX_CHANGED_JOBS]
    for proposal in (proposal for proposal in proposals if not any(change.is_drastic for change in proposal.changes)):
        found = search_again(SearchSpace(proposal.workload, space.cluster, space.constants))
        if found is not None and found.best_supported is not None:
            changes = tuple(each for each in proposal.changes if not _is_set_by_placement(each.field))
            return replace(missed, candidates=found.candidates, best_supported=found.best_supported, changes=changes)
    return missed


def _is_set_by_placement(field: str) -> bool:
    return any(part in field for part in _PLACEMENT_FIELDS)


def _on_more_nodes(space: SearchSpace) -> str:
    """A sentence that says on how many nodes the unchanged job fits in a supported placement, or that it fits on
    none."""
    for factor in _LARGER:
        larger = tuple(replace(group, nodes=factor * group.nodes) for group in space.cluster)
        tried = SearchSpace(space.workload, larger, space.constants)
        if fronts := best_by_grouping(tried, Schedule.SYNCHRONOUS, 1, supported_only=True):
            where = placement(tried, fronts[0][-1])
            return f"The unchanged job would fit on {cluster_text(larger)}: {_described(where)}."
    return f"Nothing fits on {cluster_text(larger)} either: more GPUs alone do not help."


def _described(where: Placement) -> str:
    return " and ".join(f"{', '.join(pool.roles)} on {pool.num_gpus} {pool.gpu.name}" for pool in where.pools)


def _least_spare(phases: Sequence[PhaseMemory]) -> float:
    return min(phase.spare for phase in phases)


def _check_layouts_exist(space: SearchSpace) -> None:
    """Raises PlanError if no pool has a valid layout for a role. Either no micro-batch has room for the longest row, or
    no number of ranks divides the responses."""
    job = space.workload
    for role in space.roles:
        if any(space.choices((role,), size) for size in space.sizes):
            continue
        where = f"spec.roles.{role}: no pool of this cluster has a layout for it"
        most = max((ranks for size in space.sizes for ranks in sequence_parallel_sizes(role, job, size)), default=1)
        if job.max_tokens_per_micro_batch * most < job.lengths.longest_row:
            raise PlanError(
                f"{where} (seen: the longest row has {job.lengths.longest_row} tokens, maxTokensPerMicroBatch is"
                f" {job.max_tokens_per_micro_batch}, at most {most} GPUs share a row); increase"
                " spec.training.maxTokensPerMicroBatch or reduce spec.training.rollout.maxNewTokens"
            )
        sizes = sorted({size.num_gpus for size in space.sizes})
        raise PlanError(
            f"{where} (seen: batchSize {job.batch_size}, miniBatchSize {job.mini_batch_size}, groupSize"
            f" {job.group_size}, pools of {', '.join(map(str, sizes))} GPUs); change batchSize, miniBatchSize (both in"
            " spec.training) or spec.training.rollout.groupSize, so that batchSize x groupSize and miniBatchSize x"
            " groupSize are multiples of the number of GPUs of a pool (divided by sequenceParallel if the role has it)"
        )
