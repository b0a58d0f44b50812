"""How large a worker's process becomes on CPUs, where all of its memory is the host's.

Unlike a plan, which counts the whole KV cache and each phase by itself, this is what the system shows (resident pages):
of the cache those that were written, also while it sleeps where they are only lent to the system; and in later phases
what an update has freed. That is no need: it goes back where a cache has no room beside it, and passes find room in it,
though not all that they ask for, as runs have shown, so that theirs counts beside it here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rljob_planner.kv_cache import kv_bytes_per_layer_token
from rljob_planner.memory.rollout_engine import KV_CACHE
from rljob_planner.memory_types import Phase, PhaseMemory
from rljob_planner.placement import RolloutLayout
from rljob_planner.workload import EngineKind, Workload

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
    kept = max((_kept(phase) for phase in phases), default=0.0)
    written = written_cache_bytes(workload, layout) if layout is not None else 0.0
    caches = [part.num_bytes for phase in phases for part in phase.parts if part.owner == KV_CACHE]
    lent = min([written, *caches]) if _lends(workload) else 0.0
    return max((_resident(phase, kept, written, lent) for phase in phases), default=0.0)


def written_cache_bytes(workload: Workload, layout: RolloutLayout) -> float:
    """Of the KV cache, however large that is. vLLM takes a block that is not full again as soon as it is free, and a
    full one, for its prefix, after all others (`vllm/v1/core/block_pool.py`, `free_blocks`)."""
    rollout, lengths = workload.rollout, workload.lengths
    if rollout.engine is not EngineKind.VLLM:
        return math.inf
    own = math.ceil(workload.num_requests / layout.num_engines)
    full, last = divmod(lengths.mean_row, CPU_BLOCK_TOKENS)
    blocks = own * int(full) + min(own, rollout.max_sequences) * (last > 0)
    per_token = kv_bytes_per_layer_token(rollout.shape, layout, rollout.weight_bytes) * rollout.shape.num_layers
    return blocks * CPU_BLOCK_TOKENS * per_token


def _kept(phase: PhaseMemory) -> float:
    """What an update frees and the process keeps (`host_memory` of the trainer): taken to be all of it, also
    tensors that are large enough to go back to the system."""
    if phase.phase not in _UPDATES:
        return 0.0
    return sum(part.num_bytes for part in phase.parts if not _stays(part.owner))


def _stays(owner: str) -> bool:
    """State, and what a process has in any case."""
    if "gathered" in owner or "whole" in owner:
        return False
    return owner.endswith(_STATE) or owner == "process" or "checkpoints" in owner or "on the host" in owner


def _lends(workload: Workload) -> bool:
    """Whether a sleeping cache keeps its pages until the system needs them (`engines/rollout/vllm_engine`)."""
    return workload.rollout.engine is EngineKind.VLLM and workload.rollout.max_model_length < CPU_BLOCK_TOKENS


def _resident(phase: PhaseMemory, kept: float, written: float, lent: float) -> float:
    total = kept if phase.phase not in _UPDATES else 0.0
    if all(part.owner != KV_CACHE for part in phase.parts):
        total += lent
    for part in phase.parts:
        if part.owner == KV_CACHE:
            total += min(part.num_bytes, written)
        elif part.owner != _REUSED:
            total += part.num_bytes
    return total
