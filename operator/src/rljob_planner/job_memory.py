"""Memory of a job by what its file alone says: for whoever has no options, no files and no network, such as the
operator.

The kind of GPUs is that of nodes which a pool must have, the model's shape that of the built-in table. Where one of
the two is not known there, nothing is known here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rljob_api.v1alpha1.affinity import NodeOperator, NodeTerm
from rljob_api.v1alpha1.pools import Pool
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_planner.cluster_nodes import AMD_LABELS, PRODUCT_LABEL
from rljob_planner.constants import Constants
from rljob_planner.errors import PlanError
from rljob_planner.gpus import Gpu
from rljob_planner.job import model_sources, workload_of
from rljob_planner.job_placement import check_layouts, placement_of
from rljob_planner.known_gpus import gpu_named
from rljob_planner.known_models import known_model
from rljob_planner.memory.knobs import Knob, all_phases, knobs_of, worst_phase
from rljob_planner.memory_types import PhaseMemory, Verdict, fails_from_second_step, verdict_of
from rljob_planner.model_shape import ModelShape
from rljob_planner.placement import Placement
from rljob_planner.workload import Role, Workload

SELECTORS = (PRODUCT_LABEL, *AMD_LABELS, "cloud.google.com/gke-accelerator", "karpenter.k8s.aws/instance-gpu-name")
"""Labels of nodes that say a kind of GPU, by which a pool may choose its nodes."""
GIB = 2**30
_UNLIMITED = Gpu("unknown", 1e18, 1e15, 1e12, 1e11)
"""In the place of kinds that are not known: everything fits there."""
_MAX_TOLD = 2
"""Of the changes that would make a job fit."""


@dataclass(frozen=True)
class MemoryOutlook:
    """What is expected of a job's GPU memory."""

    workload: Workload
    placement: Placement
    phases: tuple[PhaseMemory, ...]
    """Of the pools whose kind of GPU is known."""

    @property
    def verdict(self) -> Verdict:
        """Of those pools."""
        return verdict_of(self.phases)

    @property
    def worst(self) -> PhaseMemory:
        """That with least to spare."""
        return worst_phase(self.phases)

    @property
    def fails_from_second_step(self) -> bool:
        """Whether only what comes with the optimizer's moments is too much."""
        return fails_from_second_step(self.phases)

    @property
    def knobs(self) -> tuple[Knob, ...]:
        """What would make it fit."""
        return knobs_of(self.workload, self.placement, Constants()).fitting

    @property
    def single_knobs(self) -> tuple[Knob, ...]:
        """Those of one change, which are known in a tenth of the time."""
        return knobs_of(self.workload, self.placement, Constants(), with_pairs=False).fitting


def gpu_of_pool(pool: Pool) -> Gpu | None:
    """The kind that the labels say which the pool's nodes must have; of several kinds that they may have the one with
    the largest memory. None where nothing, or something unknown, is said."""
    kinds = [_known(value) for value in _products(pool)]
    known = [kind for kind in kinds if kind is not None]
    return max(known, key=lambda kind: kind.memory_bytes) if len(known) == len(kinds) and known else None


def memory_outlook(spec: RLJobSpec) -> MemoryOutlook | None:
    """None where too little is known. Raises PlanError for what the planner does not take."""
    shapes = known_shapes(spec)
    kinds = {pool.name: gpu_of_pool(pool) for pool in spec.pools}
    known = [name for name, kind in kinds.items() if kind is not None]
    if shapes is None or not known:
        return None
    workload = workload_of(spec, shapes)
    placement = placement_of(spec, {name: kind or _UNLIMITED for name, kind in kinds.items()})
    check_layouts(workload, placement)
    phases = [phase for phase in all_phases(workload, placement, Constants()) if phase.pool in known]
    return MemoryOutlook(workload, placement, tuple(phases)) if phases else None


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
        outlook = memory_outlook(spec)
    except PlanError:
        return ""
    if outlook is None or outlook.verdict is not Verdict.TOO_LARGE:
        return ""
    worst = outlook.worst
    pool = next(each for each in outlook.placement.pools if each.name == worst.pool)
    text = f"by an estimate the memory of pool {worst.pool} ({pool.gpu.name}) is too small: {shown(worst)}"
    if outlook.fails_from_second_step:
        text += "; the first step would fit, and later ones would not, because of the optimizer's moments"
    found = outlook.single_knobs[:_MAX_TOLD]
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


def _known(product: str) -> Gpu | None:
    try:
        return gpu_named(product)
    except PlanError:
        return None


def _products(pool: Pool) -> Iterator[str]:
    """Of the node selector; else of a node affinity that is required, where each of its terms names kinds."""
    selected = [pool.template.node_selector[key] for key in SELECTORS if key in pool.template.node_selector]
    if selected:
        yield selected[0]
        return
    affinity = pool.template.affinity
    nodes = affinity.node_affinity if affinity is not None else None
    required = nodes.required_during_scheduling_ignored_during_execution if nodes is not None else None
    found = [list(_products_of_term(term)) for term in required.node_selector_terms] if required is not None else []
    if all(found):
        yield from (product for each in found for product in each)


def _products_of_term(term: NodeTerm) -> Iterator[str]:
    for each in term.match_expressions:
        if each.key in SELECTORS and each.operator is NodeOperator.IN:
            yield from each.values
