"""A run beside what the model says of it: seconds by phase, bytes by owner and boundary.

Where what was measured has no exact counterpart, none is made up: such a row has one side only.
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
"""vLLM on CPUs gives a sequence's keys and values room in blocks of so many tokens (0.32; fewer where they are latent,
more in some hybrids)."""
_STATE = ("parameters", "moments", "rollout weights")
"""Ends of the names of what is there after an update, too."""
_REUSED = "engine activations"
"""Fits into what is kept."""
_UPDATES = (Phase.UPDATE, Phase.CRITIC_UPDATE)


def process_bytes(phases: Sequence[PhaseMemory], workload: Workload, layout: RolloutLayout | None) -> float:
    """Of the fullest worker of a pool; `layout` where it generates. With `process_bytes` of the constants, which is in
    the phases."""
    written = written_cache_bytes(workload, layout) if layout is not None else 0.0
    caches = [part.num_bytes for phase in phases for part in phase.parts if part.owner == KV_CACHE]
    # A sleeping cache keeps its pages until the system needs them (`engines/rollout/vllm_engine`).
    lends = workload.rollout.is_vllm and workload.rollout.max_model_length < CPU_BLOCK_TOKENS
    lent = min([written, *caches]) if lends else 0.0
    # What an update frees the process's allocator keeps: taken to be all of it, also tensors that are large enough to
    # go back to the system.
    updates = [phase for phase in phases if phase.phase in _UPDATES]
    freed = [sum(part.num_bytes for part in phase.parts if not _stays(part.owner)) for phase in updates]
    kept = max(freed, default=0.0)

    def resident(phase: PhaseMemory) -> float:
        sizes = {part.owner: 0.0 for part in phase.parts}
        for part in phase.parts:
            own = min(part.num_bytes, written) if part.owner == KV_CACHE else part.num_bytes
            sizes[part.owner] += own if part.owner != _REUSED else 0.0
        return sum(sizes.values()) + (0.0 if KV_CACHE in sizes else lent) + (0.0 if phase in updates else kept)

    return max(map(resident, phases), default=0.0)


def written_cache_bytes(workload: Workload, layout: RolloutLayout) -> float:
    """Of the KV cache, however large that is. vLLM takes a block that is not full again as soon as it is free, and a
    full one, for its prefix, after all others (`vllm/v1/core/block_pool.py`, `free_blocks`)."""
    rollout, lengths = workload.rollout, workload.lengths
    if not rollout.is_vllm:
        return math.inf
    own = math.ceil(workload.num_requests / layout.num_engines)
    full, last = divmod(lengths.mean_row, CPU_BLOCK_TOKENS)
    blocks = own * int(full) + min(own, rollout.max_sequences) * (last > 0)
    per_token = kv_bytes_per_layer_token(rollout.shape, layout, rollout.weight_bytes) * rollout.shape.num_layers
    return blocks * CPU_BLOCK_TOKENS * per_token


def _stays(owner: str) -> bool:
    """State, and what a process has in any case."""
    if "gathered" in owner or "whole" in owner:
        return False
    return owner.endswith(_STATE) or owner == "process" or "checkpoints" in owner or "on the host" in owner


STEP = "step"
"""The name of the whole step among its phases."""
PROCESS = "process"
_BOUNDARIES: Mapping[Phase, tuple[str, ...]] = {
    Phase.LATER_WAKE: ("after_wake_kv_cache",),
    Phase.SYNC: ("during_sync_weights",),
    Phase.GENERATION: ("during_generate",),
    Phase.LOGPROBS: ("during_old_logprobs", "during_ref_logprobs", "during_values", "during_reward_model"),
    Phase.CRITIC_UPDATE: ("during_update_critic",),
    Phase.UPDATE: ("during_forward_backward", "during_optimizer_step"),
    Phase.CHECKPOINT: ("during_save",),
}
"""Of the names of docs/memory.md; of several the largest counts."""
_OWNERS: Mapping[str, tuple[str, ...]] = {
    "actor parameters": ("parameters",),
    "actor gradients": ("gradients",),
    "actor moments": ("optimizer",),
    "rollout weights": ("rollout_weights",),
    "KV cache": ("kv_cache",),
    "ref parameters": ("reference",),
    "rewardModel parameters": ("reward_model",),
}
_COUNTED_ON_CPUS = ("parameters", "moments", "gradients", "rollout weights", "KV cache")
"""Ends of the owners that counters see on CPUs; the process's own size has all else, too."""
_OF_PASSES = ("gathered", "whole")
"""What is there within passes only, and no owner's."""


@dataclass(frozen=True)
class ComparedTime:
    """A phase of a step, or the step."""

    name: str
    predicted: Seconds | None
    measured: Measured | None
    bound_by: str = ""

    @property
    def ratio(self) -> float | None:
        """Predicted over measured."""
        if self.predicted is None or self.measured is None or self.measured.median <= 0:
            return None
        return self.predicted.likely / self.measured.median


@dataclass(frozen=True)
class ComparedMemory:
    """One owner or one moment, in bytes of the fullest worker."""

    name: str
    predicted: float
    measured: float

    @property
    def ratio(self) -> float | None:
        """Predicted over measured."""
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
    """Of the actor's pool, whose memory the metrics have: owners first, then boundaries, then the worker's process,
    for which `process` bytes are predicted.

    On GPUs a process has what the host keeps, which is not planned, so that is not compared."""
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
