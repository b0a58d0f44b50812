"""What workers on GPUs have in the memory of their node: what is offloaded, copies for checkpoints, weights that sleep.

Sources, in the trainer: engines/train/offload.py, checkpoints/save.py (`HostBuffers`), engines/rollout/vllm_engine.py
(`sleep`), docs/memory.md.
"""

from __future__ import annotations

from dataclasses import replace

from rljob_planner.constants import Constants
from rljob_planner.memory.phases import COPY_BYTES
from rljob_planner.memory.train_state import host_bytes, trained_shard_elements
from rljob_planner.memory_types import Part
from rljob_planner.placement import PlacedPool
from rljob_planner.workload import EngineKind, Workload

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
    if pool.rollout is not None and rollout.engine is EngineKind.VLLM and rollout.keeps_weights_asleep:
        each = rollout.weight_bytes * rollout.shape.num_parameters / pool.rollout.tensor_parallel
        parts.append(Part("sleeping rollout weights", workers * each))
    return tuple(part for part in parts if part.num_bytes)
