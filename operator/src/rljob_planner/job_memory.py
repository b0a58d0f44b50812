"""Memory of a job by what its file alone says: for whoever has no options, no files and no network, such as the
operator.

The kind of GPUs is that of nodes which a pool must have, the model's shape that of the built-in table. Where one of
the two is not known there, nothing is known here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import chain

from rljob_api.quantities import bytes_of
from rljob_api.v1alpha1.pools import Pool
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_planner.clusters import selected_gpu
from rljob_planner.constants import Constants
from rljob_planner.errors import PlanError
from rljob_planner.gpus import Gpu
from rljob_planner.job import model_sources, workload_of
from rljob_planner.job_placement import check_layouts, placement_of
from rljob_planner.known_models import known_model
from rljob_planner.kv_cache import GIB
from rljob_planner.memory.changes import offload_changes
from rljob_planner.memory.knobs import Knob, knobs_of, worst_phase
from rljob_planner.memory.phases import COPY_BYTES
from rljob_planner.memory.train_state import host_bytes, trained_shard_elements
from rljob_planner.model_shape import ModelShape
from rljob_planner.plan import Plan, plan_of
from rljob_planner.plan_types import Part, PhaseMemory, Verdict, fails_from_second_step, verdict_of
from rljob_planner.workload import PlacedPool, Role, Workload

_UNLIMITED = Gpu("unknown", 1e18, 1e15, 1e12, 1e11)
"""In the place of kinds that are not known: everything fits there."""
_MAX_TOLD = 2
"""Of the changes that would make a job fit."""


def gpu_of_pool(pool: Pool, among: Iterable[Gpu] = ()) -> Gpu | None:
    """The kind of GPU that the pool selects by labels, of several kinds one of `among`. None also where it is not
    known."""
    try:
        return selected_gpu(pool, among=among)
    except PlanError:
        return None


def memory_outlook(spec: RLJobSpec, *, with_knobs: bool = True) -> Plan | None:
    """The plan of the job. Phases, verdict and worst phase are only of the pools whose kind of GPU is known; the other
    pools count as unlimited. None if no kind, or not every model, is known. Raises PlanError for a job that the planner
    does not accept."""
    shapes, kinds = known_shapes(spec), _kinds(spec)
    if shapes is None or all(kind is _UNLIMITED for kind in kinds.values()):
        return None
    workload, placement = workload_of(spec, shapes), placement_of(spec, kinds)
    check_layouts(workload, placement)
    plan = plan_of(workload, placement, with_knobs=with_knobs)
    known = {name: phases for name, phases in plan.phases.items() if kinds[name] is not _UNLIMITED}
    phases = tuple(chain.from_iterable(known.values()))
    return replace(plan, phases=known, verdict=verdict_of(phases), worst=worst_phase(phases)) if phases else None


def _kinds(spec: RLJobSpec) -> dict[str, Gpu]:
    return {pool.name: gpu_of_pool(pool) or _UNLIMITED for pool in spec.pools}


def known_shapes(spec: RLJobSpec) -> Mapping[Role, ModelShape] | None:
    """Of all models of a job; None where one of them is not in the table."""
    found = {role: known_model(place.source) for role, place in model_sources(spec).items()}
    known = {role: shape for role, shape in found.items() if shape is not None}
    return known if len(known) == len(found) else None


def memory_shortage(spec: RLJobSpec) -> str:
    """That a job's GPU memory cannot be enough, and which one change would do; empty where it is, or where nothing is
    known. An estimate: what it says is no reason to refuse a job. Takes milliseconds, for the operator does nothing
    else meanwhile."""
    try:
        outlook = memory_outlook(spec, with_knobs=False)
    except PlanError:
        return ""
    if outlook is None or outlook.verdict is not Verdict.TOO_LARGE:
        return ""
    worst = outlook.worst
    pool = next(each for each in outlook.placement.pools if each.name == worst.pool)
    text = f"by an estimate the memory of pool {worst.pool} ({pool.gpu.name}) is too small: {shown(worst)}"
    if fails_from_second_step(outlook.all_phases):
        text += "; the first step would fit, and later ones would not, because of the optimizer's moments"
    found = knobs_of(outlook.workload, outlook.placement, Constants(), with_pairs=False).fitting[:_MAX_TOLD]
    if not found:
        return f"{text}; see `rljob plan`"
    text += f"; what would do: {'; or '.join(told(knob) for knob in found)}"
    has_gentle = any(not change.is_drastic for knob in found for change in knob.changes)
    return text if has_gentle else f"{text}; or perhaps two smaller changes: see `rljob plan`"


def shown(phase: PhaseMemory) -> str:
    """What a phase has and needs."""
    if phase.lacks and phase.total <= phase.limit:
        return f"{phase.phase}: the KV cache lacks {phase.lacks / GIB:.1f} GiB for one longest sequence"
    return f"{phase.phase} takes {phase.total / GIB:.1f} of {phase.limit / GIB:.1f} GiB on each GPU"


def told(knob: Knob) -> str:
    """The changes as one writes them, and what comes of them."""
    changes = " and ".join(f"{change.field}: {change.value}" for change in knob.changes)
    return f"{changes} ({knob.worst.total / GIB:.1f} GiB at most)"


PROCESS_BYTES = 1.1e9
"""Of one worker's libraries: 1,067 MiB on CPUs (docs/memory.md). Where a profile has measured it, that."""


def host_parts(pool: PlacedPool, workload: Workload, constants: Constants) -> tuple[Part, ...]:
    """Of all workers of one node. Pinned buffers may take up to twice as much as what is offloaded, which is not
    counted, nor is Ray's object store."""
    workers = pool.gpus_per_node
    parts = [Part("libraries", workers * (constants.process_bytes or PROCESS_BYTES))]
    for role, layout in pool.layouts.items():
        model = workload.models[role]
        for part in host_bytes(model, layout):
            parts.append(replace(part, owner=f"{role} {part.owner}", num_bytes=workers * part.num_bytes))
        copies = COPY_BYTES * trained_shard_elements(model, layout)
        parts.append(Part(f"{role} copies for checkpoints", float(workers * copies)))
    rollout = workload.rollout
    if pool.rollout is not None and rollout.is_vllm and rollout.keeps_weights_asleep:
        each = rollout.weight_bytes * rollout.shape.num_parameters / pool.rollout.tensor_parallel
        parts.append(Part("sleeping rollout weights", workers * each))
    return tuple(part for part in parts if part.num_bytes)


def host_memory_told(spec: RLJobSpec) -> dict[str, str]:
    """By pool a sentence on why a pod of it may have run out of its own memory, as on GPUs. Nothing where the shape of
    a model is not known. Raises PlanError for what the planner does not take."""
    shapes = known_shapes(spec)
    if shapes is None:
        return {}
    workload, placement = workload_of(spec, shapes), placement_of(spec, _kinds(spec))
    return {
        pool.name: _host_told(place, pool, placed, workload)
        for place, (pool, placed) in enumerate(zip(spec.pools, placement.pools, strict=True))
    }


def _host_told(place: int, pool: Pool, placed: PlacedPool, workload: Workload) -> str:
    parts = host_parts(placed, workload, Constants())
    text = pool.resources.limits.get("memory") or pool.resources.requests.get("memory")
    limit = f", and may have {float(bytes_of(text)) / GIB:.1f}" if text is not None else ""
    advice = [f"raise spec.pools[{place}].resources.limits.memory"]
    for role in placed.layouts:
        for field, model in offload_changes(workload, role, is_on=False):
            smaller = host_parts(placed, workload.with_model(role, model), Constants())
            left = sum(part.num_bytes for part in smaller)
            advice.append(f"{field}: false ({left / GIB:.1f} GiB)")
    largest = sorted(parts, key=lambda part: -part.num_bytes)
    shares = ", ".join(f"{part.owner} {part.num_bytes / GIB:.1f}" for part in largest)
    total = sum(part.num_bytes for part in parts) / GIB
    return (
        f"by an estimate a pod of pool {pool.name} has at least {total:.1f} GiB in its own"
        f" memory{limit} (GiB: {shares}); what would do: {', or '.join(advice)}"
    )
