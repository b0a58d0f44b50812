"""Estimates the memory of a job from its spec alone. The operator and `rljob explain` use this module, because they
have no options for GPU types and read no files of models.

The GPU type of a pool comes from the node labels that the pool requires. The model's shape comes from the built-in
table (`known_models`). Without the shapes of all models there is no estimate; GPU memory is estimated for the pools
whose GPU type is known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import chain

from rljob_api.quantities import bytes_of
from rljob_api.v1alpha1.pools import Pool
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_planner.clusters import allowed_gpus
from rljob_planner.constants import Constants
from rljob_planner.errors import PlanError
from rljob_planner.gpus import Gpu
from rljob_planner.job_placement import check_layouts, placement_of
from rljob_planner.job_workload import model_sources, workload_of
from rljob_planner.known_models import known_model
from rljob_planner.kv_cache import GIB
from rljob_planner.memory.host_state import host_parts
from rljob_planner.memory.job_changes import offload_changes
from rljob_planner.memory.proposals import Proposal, find_proposals, fullest_phase
from rljob_planner.model_shape import ModelShape
from rljob_planner.plan import Plan, plan_of
from rljob_planner.plan_types import PhaseMemory, Verdict, fails_from_second_step, verdict_of
from rljob_planner.workload import PlacedPool, Placement, Role, Workload

_UNLIMITED = Gpu("unknown", 1e18, 1e15, 1e12, 1e11)
"""Used for pools whose GPU type is unknown; everything fits on it."""
_MAX_SUGGESTIONS = 2
"""The largest number of proposals in the warning about a memory shortage."""


def known_gpus(pool: Pool) -> list[Gpu]:
    """The GPU types that the pool allows by node labels, the largest memory first; empty if it requires no type or an
    unknown one."""
    try:
        return allowed_gpus(pool)
    except PlanError:
        return []


def plan_from_spec(spec: RLJobSpec, *, with_proposals: bool = True) -> Plan | None:
    """The plan of the job; None if no pool with roles has a known GPU type, or if a model is not in the table. Phases,
    verdict and fullest phase cover only pools with a known GPU type; the plan takes the GPUs of other pools as
    unlimited.

    Raises:
        PlanError: the planner cannot plan this job.
    """
    job = _job(spec)
    known_pools = [] if job is None else [pool.name for pool in job[1].pools if pool.gpu is not _UNLIMITED]
    if job is None or not known_pools:
        return None
    check_layouts(*job)
    plan = plan_of(*job, with_proposals=with_proposals)
    known = {name: plan.phases[name] for name in known_pools}
    phases = tuple(chain.from_iterable(known.values()))
    if not phases:
        return None
    return replace(plan, phases=known, verdict=verdict_of(phases), fullest_phase=fullest_phase(phases))


def _job(spec: RLJobSpec) -> tuple[Workload, Placement] | None:
    """Workload and placement of the job; None if the shape of a model is unknown. Pools of an unknown GPU type get GPUs
    with unlimited memory."""
    shapes = known_shapes(spec)
    if shapes is None:
        return None
    kinds = {pool.name: next(iter(known_gpus(pool)), _UNLIMITED) for pool in spec.pools}
    return workload_of(spec, shapes), placement_of(spec, kinds)


def known_shapes(spec: RLJobSpec) -> Mapping[Role, ModelShape] | None:
    """The shapes of all models of the job; None if one of them is not in the table."""
    found = {role: known_model(each.source) for role, each in model_sources(spec).items()}
    known = {role: shape for role, shape in found.items() if shape is not None}
    return known if len(known) == len(found) else None


def memory_shortage(spec: RLJobSpec) -> str:
    """A warning that the job's GPU memory is too small, with proposals that make the job fit, if there are any. Empty
    if the memory is large enough or cannot be estimated. Because this is an estimate, the operator warns and does not
    reject the job. The computation must be short, because the operator does nothing else meanwhile; it takes
    milliseconds."""
    try:
        plan = plan_from_spec(spec, with_proposals=False)
    except PlanError:
        return ""
    if plan is None or plan.verdict is not Verdict.TOO_LARGE:
        return ""
    worst = plan.fullest_phase
    pool = next(each for each in plan.placement.pools if each.name == worst.pool)
    text = f"by estimate, the memory of pool {worst.pool} ({pool.gpu.name}) is too small: {phase_text(worst)}"
    if fails_from_second_step(plan.all_phases):
        text += "; the first step would fit, but later steps would not, because they also hold the optimizer's moments"
    found = find_proposals(plan.workload, plan.placement, Constants(), with_combinations=False).fitting[
        :_MAX_SUGGESTIONS
    ]
    if not found:
        return f"{text}; no single change makes it fit; `rljob plan` tries several together"
    text += f"; to make it fit, set {'; or '.join(proposal_text(proposal) for proposal in found)}"
    has_gentle = any(not change.is_drastic for proposal in found for change in proposal.changes)
    return text if has_gentle else f"{text}; `rljob plan` may find two smaller changes that are enough together"


def phase_text(phase: PhaseMemory) -> str:
    """The memory that a phase needs, and its limit, as text."""
    if phase.kv_cache_shortage and phase.total <= phase.limit:
        missing = f"{phase.kv_cache_shortage / GIB:.1f} GiB too small for one sequence of full length"
        return f"in {phase.phase} the KV cache is {missing}"
    return f"{phase.phase} needs {phase.total / GIB:.1f} of {phase.limit / GIB:.1f} GiB per GPU"


def proposal_text(proposal: Proposal) -> str:
    """The changes as they are written in the job file, and the memory of the fullest phase with them."""
    changes = " and ".join(f"{change.field}: {change.value}" for change in proposal.changes)
    return f"{changes} ({proposal.fullest_phase.total / GIB:.1f} GiB at most)"


def host_memory_advice(spec: RLJobSpec) -> dict[str, str]:
    """By the name of each pool: a sentence on how much host memory a pod needs, and how to reduce this. Empty if the
    shape of a model is unknown.

    Raises:
        PlanError: the planner cannot plan this job.
    """
    job = _job(spec)
    if job is None:
        return {}
    workload, placement = job
    return {
        pool.name: _host_memory_text(index, pool, placed, workload)
        for index, (pool, placed) in enumerate(zip(spec.pools, placement.pools, strict=True))
    }


def with_pod_limits(plan: Plan, spec: RLJobSpec) -> Plan:
    """The plan with a note on each pool with GPUs whose pods may use less host memory than they need."""
    notes = []
    for index, (pool, placed) in enumerate(zip(spec.pools, plan.placement.pools, strict=True)):
        text = pool.resources.limits.get("memory")
        needed = sum(part.num_bytes for part in plan.host_memory[placed.name])
        if text is not None and not placed.gpu.is_cpu and needed > bytes_of(text):
            notes.append(
                f"spec.pools[{index}].resources.limits.memory: a pod of pool {pool.name} may use"
                f" {float(bytes_of(text)) / GIB:.1f} GiB, but needs {needed / GIB:.1f} GiB of host memory by estimate,"
                " and a pod that uses more is killed; increase the limit, or offload less."
            )
    return replace(plan, notes=(*notes, *plan.notes))


def _host_memory_text(index: int, pool: Pool, placed: PlacedPool, workload: Workload) -> str:
    parts = host_parts(placed, workload, Constants())
    text = pool.resources.limits.get("memory") or pool.resources.requests.get("memory")
    limit = f" and may use {float(bytes_of(text)) / GIB:.1f} GiB" if text is not None else ""
    advice = [f"increase spec.pools[{index}].resources.limits.memory"]
    for role in placed.layouts:
        for field, model in offload_changes(workload, role, is_on=False):
            smaller = host_parts(placed, workload.with_model(role, model), Constants())
            left = sum(part.num_bytes for part in smaller)
            advice.append(f"set {field}: false (then {left / GIB:.1f} GiB)")
    largest = sorted(parts, key=lambda part: -part.num_bytes)
    shares = ", ".join(f"{part.owner} {part.num_bytes / GIB:.1f}" for part in largest)
    total = sum(part.num_bytes for part in parts) / GIB
    return (
        f"by estimate, a pod of pool {pool.name} needs at least {total:.1f} GiB of host memory{limit} (in GiB:"
        f" {shares}); {', or '.join(advice)}"
    )
