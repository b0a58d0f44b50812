"""Compares a run with its plan: the seconds of each phase, and the bytes of each owner and at each boundary between the
parts of a step.

A phase whose seconds were only predicted, or only measured, has a row with one value. Memory has rows only for what was
predicted and measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rljob_planner.advice.run_facts import Measured, RunFacts
from rljob_planner.kv_cache import KV_CACHE, kv_bytes_per_layer_token
from rljob_planner.plan_types import Part, Phase, PhaseMemory, Seconds, StepTime
from rljob_planner.timing.step import OTHER, PHASES
from rljob_planner.workload import RolloutLayout, Workload

CPU_BLOCK_TOKENS = 128
"""Tokens of one block of vLLM's KV cache on CPUs (vLLM 0.32). Models with latent attention have fewer, some hybrid
models more."""
_STAYING_OWNERS = ("parameters", "moments", "rollout weights")
"""An owner whose name ends with one of these stays in memory after an update."""
_REUSING_OWNER = "engine activations"
"""The owner whose memory is taken from what the process's allocator has kept after an update."""
_UPDATES = (Phase.UPDATE, Phase.CRITIC_UPDATE)


def process_bytes(phases: Sequence[PhaseMemory], workload: Workload, layout: RolloutLayout | None) -> float:
    """Predicted bytes of the fullest worker process of a pool on CPUs, at their largest; including libraries
    (`Constants.process_bytes`). `layout`: the layout of the rollout; None if the pool does not generate."""
    written = written_cache_bytes(workload, layout) if layout is not None else 0.0
    caches = [part.num_bytes for phase in phases for part in phase.parts if part.owner == KV_CACHE]
    # If no sequence can fill a block, a sleeping KV cache keeps its pages until the system needs them. Otherwise it
    # returns them immediately (`engines/rollout/vllm_engine`).
    keeps_pages = workload.rollout.is_vllm and workload.rollout.max_model_length < CPU_BLOCK_TOKENS
    sleeping_cache = min([written, *caches]) if keeps_pages else 0.0
    # The process's allocator keeps memory that an update frees. It is assumed to keep all of it, although large tensors
    # may be returned to the system.
    updates = [phase for phase in phases if phase.phase in _UPDATES]
    freed = [sum(part.num_bytes for part in phase.parts if not _stays(part.owner)) for phase in updates]
    kept_after_updates = max(freed, default=0.0)

    def resident(phase: PhaseMemory) -> float:
        """Memory of the process in this phase."""
        sizes = {part.owner: 0.0 for part in phase.parts}
        for part in phase.parts:
            in_use = min(part.num_bytes, written) if part.owner == KV_CACHE else part.num_bytes
            sizes[part.owner] += in_use if part.owner != _REUSING_OWNER else 0.0
        cached = 0.0 if KV_CACHE in sizes else sleeping_cache
        kept = 0.0 if phase in updates else kept_after_updates
        return sum(sizes.values()) + cached + kept

    return max(map(resident, phases), default=0.0)


def written_cache_bytes(workload: Workload, layout: RolloutLayout) -> float:
    """Bytes of the KV cache that are written during a step; infinite for transformers. vLLM immediately reuses a freed
    block that is not full. It reuses a full block, which it keeps for its prefix, only after all other blocks
    (`vllm/v1/core/block_pool.py`, `free_blocks`)."""
    rollout, lengths = workload.rollout, workload.lengths
    if not rollout.is_vllm:
        return math.inf
    per_engine = math.ceil(workload.num_requests / layout.num_engines)
    full, last = divmod(lengths.mean_row, CPU_BLOCK_TOKENS)
    blocks = per_engine * int(full) + min(per_engine, rollout.max_sequences) * (last > 0)
    per_token = kv_bytes_per_layer_token(rollout.shape, layout, rollout.weight_bytes) * rollout.shape.num_layers
    return blocks * CPU_BLOCK_TOKENS * per_token


def _stays(owner: str) -> bool:
    """Whether the owner's memory stays after an update: state, or memory of the process itself."""
    if "gathered" in owner or "whole" in owner:
        return False
    return owner.endswith(_STAYING_OWNERS) or owner == "process" or "checkpoints" in owner or "on the host" in owner


STEP = "step"
"""Name of the row of the whole step."""
PROCESS = "process"
"""Name of the row of the worker process."""
_BOUNDARIES: Mapping[Phase, tuple[str, ...]] = {
    Phase.LATER_WAKE: ("after_wake_kv_cache",),
    Phase.SYNC: ("during_sync_weights",),
    Phase.GENERATION: ("during_generate",),
    Phase.LOGPROBS: ("during_old_logprobs", "during_ref_logprobs", "during_values", "during_reward_model"),
    Phase.CRITIC_UPDATE: ("during_update_critic",),
    Phase.UPDATE: ("during_forward_backward", "during_optimizer_step"),
    Phase.CHECKPOINT: ("during_save",),
}
"""By phase: the names of the metrics that measure its memory at boundaries (docs/memory.md). The largest value
counts."""
_OWNERS: Mapping[str, tuple[str, ...]] = {
    "actor parameters": ("parameters",),
    "actor gradients": ("gradients",),
    "actor moments": ("optimizer",),
    "rollout weights": ("rollout_weights",),
    "KV cache": ("kv_cache",),
    "ref parameters": ("reference",),
    "rewardModel parameters": ("reward_model",),
}
"""By owner: the names of the metrics whose sum is its measured memory."""
_COUNTED_ON_CPUS = ("parameters", "moments", "gradients", "rollout weights", "KV cache")
"""On CPUs, the metrics count the memory of owners whose names end with one of these. Other memory is only a part of the
size of the process."""
_OF_PASSES = ("gathered", "whole")
"""An owner with one of these words in its name has memory only during passes."""


@dataclass(frozen=True)
class ComparedTime:
    """Predicted and measured seconds of a phase, or of the whole step."""

    name: str
    predicted: Seconds | None
    measured: Measured | None
    bound_by: str = ""

    @property
    def ratio(self) -> float | None:
        """Predicted / measured."""
        if self.predicted is None or self.measured is None or self.measured.median <= 0:
            return None
        return self.predicted.likely / self.measured.median


@dataclass(frozen=True)
class ComparedMemory:
    """Predicted and measured bytes of an owner or at a boundary, on the fullest worker."""

    name: str
    predicted: float
    measured: float

    @property
    def ratio(self) -> float | None:
        """Predicted / measured."""
        return self.predicted / self.measured if self.measured > 0 else None


def compared_times(step: StepTime, facts: RunFacts) -> tuple[ComparedTime, ...]:
    """The phases in the order of a step, then the whole step."""
    predicted = {phase.name: phase for phase in step.phases}
    measured = facts.phases
    names = [name for name in (*PHASES, OTHER) if name in predicted or name in measured]
    rows = []
    for name in names:
        phase = predicted.get(name)
        waited, bound_by = (None, "") if phase is None else (phase.waited, phase.bound_by)
        rows.append(ComparedTime(name, waited, measured.get(name), bound_by))
    return (*rows, ComparedTime(STEP, step.total, facts.step, step.bound_by))


def compared_memory(phases: Sequence[PhaseMemory], facts: RunFacts, process: float) -> tuple[ComparedMemory, ...]:
    """Compares the memory of the actor's pool, because the metrics measure this pool: owners, then boundaries, then the
    worker process. `phases`: those of this pool. `process`: the predicted bytes of the process.

    The process is compared only on CPUs. On GPUs its memory is host memory, which a plan does not divide into
    processes."""
    found = (*_owners(phases, facts), *_boundaries(phases, facts))
    measured = facts.memory.get("process", 0.0)
    if facts.has_gpu or not measured:
        return found
    return (*found, ComparedMemory(PROCESS, process, measured))


def _owners(phases: Sequence[PhaseMemory], facts: RunFacts) -> Iterator[ComparedMemory]:
    for owner, names in _OWNERS.items():
        predicted = max((part.num_bytes for phase in phases for part in phase.parts if part.owner == owner), default=0)
        measured = sum(facts.memory.get(name, 0.0) for name in names)
        if predicted and measured:
            yield ComparedMemory(owner, float(predicted), measured)


def _boundaries(phases: Sequence[PhaseMemory], facts: RunFacts) -> Iterator[ComparedMemory]:
    for phase in phases:
        if phase.phase is Phase.FIRST_WAKE:
            measured = facts.first_memory.get("after_wake_kv_cache", 0.0)
        else:
            found = [facts.memory.get(name, 0.0) for name in _BOUNDARIES.get(phase.phase, ())]
            measured = max(found, default=0.0)
        if measured:
            counted = sum(part.num_bytes for part in phase.parts if facts.has_gpu or _is_counted(part))
            yield ComparedMemory(str(phase.phase), counted, measured)


def _is_counted(part: Part) -> bool:
    return part.owner.endswith(_COUNTED_ON_CPUS) and not any(text in part.owner for text in _OF_PASSES)
