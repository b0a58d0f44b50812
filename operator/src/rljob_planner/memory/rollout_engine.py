"""What a rollout engine has on a device that it shares: while it starts, is awake, gets weights, and sleeps.

Sources, in the trainer: engines/rollout/vllm_engine.py and hf_engine.py (`wake`, `sleep`), workers/hybrid.py (their
order), weights/sync.py and buckets.py (what a hand-over needs), docs/memory.md (what stays on CPUs).
"""

from __future__ import annotations

from dataclasses import dataclass

from rljob_planner.constants import Constants
from rljob_planner.kv_cache import EngineSpace, engine_space
from rljob_planner.memory_types import Part
from rljob_planner.placement import PlacedPool, RolloutLayout
from rljob_planner.workload import EngineKind, Role, TrainModel, Workload

GIB = 2**30
_AS_SEEN = "as seen of vLLM; no formula"
GPU_BUCKET_BYTES = 256 * 2**20
CPU_BUCKET_BYTES = 32 * 2**20
"""As in the trainer's weights/buckets.py."""
ROLLOUT_WEIGHTS = "rollout weights"
KV_CACHE = "KV cache"


@dataclass(frozen=True)
class EngineMemory:
    """Of the engine on one GPU of a pool."""

    pool: PlacedPool
    layout: RolloutLayout
    workload: Workload
    constants: Constants
    space: EngineSpace

    @property
    def sleeps(self) -> bool:
        """Whether what it has leaves the device while others use it: vLLM on GPUs."""
        return self.workload.rollout.engine is EngineKind.VLLM and not self.pool.gpu.is_cpu

    @property
    def asleep(self) -> tuple[Part, ...]:
        """While models are trained and scored with. On CPUs, and with transformers, weights stay."""
        if self.sleeps:
            each = self.constants.sleeping_engine_bytes
            return (Part("sleeping engine", each, _AS_SEEN),)
        return (self._weights,)

    @property
    def with_weights(self) -> tuple[Part, ...]:
        """Before the cache wakes."""
        return (*self.asleep, self._weights) if self.sleeps else self.asleep

    @property
    def awake(self) -> tuple[Part, ...]:
        """With vLLM the whole budget, whatever of it is used."""
        rollout, space = self.workload.rollout, self.space
        if rollout.engine is EngineKind.HUGGING_FACE:
            return (self._weights, *self._padded_batch())
        parts = (
            self._weights,
            Part("engine context", space.context, _AS_SEEN),
            Part("engine activations", space.activations, f"{rollout.max_batched_tokens} tokens in a pass"),
            Part("engine graphs", space.graphs, _AS_SEEN),
            Part(KV_CACHE, max(0.0, space.kv_cache), self._cache_formula()),
        )
        return tuple(part for part in parts if part.num_bytes)

    @property
    def num_requests(self) -> int:
        """Responses that one engine makes in a step."""
        return -(-self.workload.num_requests // self.layout.num_engines)

    @property
    def _weights(self) -> Part:
        rollout, parallel = self.workload.rollout, self.layout.tensor_parallel
        formula = f"{rollout.weight_bytes} x {rollout.shape.num_parameters:.4g} / {parallel}"
        return Part(ROLLOUT_WEIGHTS, self.space.weights + self.space.adapters, formula)

    def _cache_formula(self) -> str:
        if self.pool.gpu.is_cpu:
            return "cpuKvCache"
        share, memory = self.workload.rollout.memory_utilization, self.pool.gpu.memory_bytes / GIB
        return f"{share:g} x {memory:.1f} GiB - {self.space.without_cache / GIB:.1f} GiB"

    def _padded_batch(self) -> tuple[Part, ...]:
        """transformers decodes rows of one length side by side (hf_engine.py): at most all of a batch, as long as they
        may be, one layer's cache twice while it grows; and logits of all tokens of the prompts before."""
        rollout, lengths = self.workload.rollout, self.workload.lengths
        rows = min(rollout.max_sequences, self.num_requests)
        cache = rows * self.space.sequence_bytes(lengths.longest_row)
        grown = cache * (1 + 1 / rollout.shape.num_layers)
        logits = rows * lengths.prompt_max * rollout.shape.vocabulary_size * rollout.weight_bytes
        return (
            Part(KV_CACHE, grown, f"{rows} rows of {lengths.longest_row} tokens"),
            Part("engine activations", logits, f"logits of {rows} prompts of {lengths.prompt_max} tokens"),
        )


def engine_memory(pool: PlacedPool, workload: Workload, constants: Constants) -> EngineMemory | None:
    """None where the rollout is elsewhere."""
    if pool.rollout is None:
        return None
    actor = workload.models.get(Role.ACTOR)
    num_requests = -(-workload.num_requests // max(1, pool.rollout.num_engines))
    space = engine_space(
        workload.rollout, pool.rollout, pool.gpu, constants, None if actor is None else actor.lora, num_requests
    )
    return EngineMemory(pool, pool.rollout, workload, constants, space)


def bucket_part(pool: PlacedPool, workload: Workload, actor: TrainModel | None) -> Part:
    """What a hand-over of weights holds beyond shards and the engine's own: two buckets, or twice the largest tensor
    (weights/buckets.py). Where one GPU holds all there is nothing to gather, and one tensor in another dtype."""
    rollout = workload.rollout
    each = rollout.weight_bytes
    layout = pool.layouts.get(Role.ACTOR)
    largest = each * rollout.shape.largest_tensor_parameters
    if layout is not None and layout.shard_size == 1:
        is_cast = actor is None or (4 if actor.lora is None else actor.compute_bytes) != each
        return Part("buckets", float(largest if is_cast else 0), f"{each} x largest tensor")
    bucket = CPU_BUCKET_BYTES if pool.gpu.is_cpu else GPU_BUCKET_BYTES
    size = min(max(bucket, largest), each * rollout.shape.num_parameters)
    return Part("buckets", 2.0 * size, f"2 x {size / 2**20:.0f} MiB")
