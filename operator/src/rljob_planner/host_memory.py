"""Why a pod of a job may have run out of its own memory, by what the job's file says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from rljob_api.quantities import bytes_of
from rljob_api.v1alpha1.pools import Pool
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_planner.constants import Constants
from rljob_planner.gpus import Gpu
from rljob_planner.job import workload_of
from rljob_planner.job_memory import GIB, gpu_of_pool, known_shapes
from rljob_planner.job_placement import placement_of
from rljob_planner.memory.changes import MODEL_FIELDS
from rljob_planner.memory.host import host_parts
from rljob_planner.memory_types import Part
from rljob_planner.placement import PlacedPool
from rljob_planner.workload import ModelOffload, Role, Workload

_ANY_GPU = Gpu("GPU", 1e18, 1e15, 1e12, 1e11)
"""The host's memory does not depend on its kind."""


@dataclass(frozen=True)
class HostNeed:
    """Of one pod of a pool."""

    pool: str
    limit: float | None
    """None where the job sets none."""
    parts: tuple[Part, ...]
    smaller: tuple[tuple[str, float], ...]
    """Changes of one field, and what a pod has with it, bytes."""
    limit_field: str
    """Where its limit is written."""

    @property
    def total(self) -> float:
        """Of all parts."""
        return sum(part.num_bytes for part in self.parts)


def host_needs(spec: RLJobSpec) -> tuple[HostNeed, ...]:
    """Of each pool, as on GPUs. Nothing where the shape of a model is not known. Raises PlanError for what the planner
    does not take."""
    shapes = known_shapes(spec)
    if shapes is None:
        return ()
    workload = workload_of(spec, shapes)
    gpus = {pool.name: gpu_of_pool(pool) or _ANY_GPU for pool in spec.pools}
    placement = placement_of(spec, gpus)
    return tuple(
        _need(place, pool, placed, workload)
        for place, (pool, placed) in enumerate(zip(spec.pools, placement.pools, strict=True))
    )


def told_need(need: HostNeed) -> str:
    """As a sentence, for people."""
    parts = ", ".join(f"{part.owner} {part.num_bytes / GIB:.1f}" for part in _largest_first(need.parts))
    limit = "" if need.limit is None else f", and may have {need.limit / GIB:.1f}"
    advice = [f"raise {need.limit_field}", *(f"{field} ({left / GIB:.1f} GiB)" for field, left in need.smaller)]
    return (
        f"by an estimate a pod of pool {need.pool} has at least {need.total / GIB:.1f} GiB in its own memory{limit}"
        f" (GiB: {parts}); what would do: {', or '.join(advice)}"
    )


def _need(place: int, pool: Pool, placed: PlacedPool, workload: Workload) -> HostNeed:
    constants = Constants()
    text = pool.resources.limits.get("memory") or pool.resources.requests.get("memory")
    smaller = tuple(
        (field, sum(part.num_bytes for part in host_parts(placed, changed, constants)))
        for field, changed in _less_offload(workload, placed)
    )
    return HostNeed(
        pool=pool.name,
        limit=None if text is None else float(bytes_of(text)),
        parts=host_parts(placed, workload, constants),
        smaller=smaller,
        limit_field=f"spec.pools[{place}].resources.limits.memory",
    )


def _less_offload(workload: Workload, pool: PlacedPool) -> Iterator[tuple[str, Workload]]:
    for role in pool.layouts:
        offload = workload.models[role].offload
        away = {"optimizer": offload.optimizer, "parameters": offload.parameters, "gradients": offload.gradients}
        for name in (name for name, is_away in away.items() if is_away):
            if workload.models[role].is_trained or name == "parameters":
                yield f"{_field(role, name)}: false", _with_offload(workload, role, name)


def _field(role: Role, name: str) -> str:
    names = {Role.REF: "offload.reference", Role.REWARD_MODEL: "offload"}
    return f"{MODEL_FIELDS[role]}.{names.get(role, f'offload.{name}')}"


def _with_offload(workload: Workload, role: Role, without: str) -> Workload:
    before = workload.models[role].offload
    offload = ModelOffload(
        parameters=before.parameters and without != "parameters",
        gradients=before.gradients and without != "gradients",
        optimizer=before.optimizer and without != "optimizer",
    )
    return replace(workload, models={**workload.models, role: replace(workload.models[role], offload=offload)})


def _largest_first(parts: tuple[Part, ...]) -> list[Part]:
    return sorted(parts, key=lambda part: -part.num_bytes)
