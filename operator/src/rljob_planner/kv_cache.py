"""What a rollout engine makes of its memory: weights, what a process of it takes, and the space for keys and values.

Below `memory` and `timing`, which both need it: how many sequences are decoded at once follows from the space.

Sources: the trainer's engines/rollout/vllm_engine.py (what vLLM is started with) and hf_engine.py; vLLM 0.32, where the
cache gets what weights, context, libraries, the largest pass and the graphs leave of `gpu_memory_utilization` x all of
the GPU's memory (its v1/worker/gpu_worker.py, `determine_available_memory`); vLLM's pull request 10511 has an
example of such numbers.

Legend: as in `model_shape`, and T tensor parallelism, b bytes of a number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rljob_planner.constants import Constants
from rljob_planner.gpus import Gpu
from rljob_planner.model_shape import ModelShape
from rljob_planner.plan_types import Part
from rljob_planner.workload import LoraShape, PlacedPool, Role, RolloutLayout, RolloutWork, TrainModel, Workload

BLOCK_TOKENS = 16
"""vLLM gives a sequence's keys and values room in blocks of so many tokens."""
ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""As in the trainer's engines/rollout/vllm_engine.py: the next larger one is taken."""
_SAMPLER_BYTES = 16
"""For each sequence and word of the vocabulary beside the logits: these in 32 bits, sorted ones, and where those were
(what vLLM's sampler holds at once in the pass by which it measures)."""


@dataclass(frozen=True)
class EngineSpace:
    """Bytes of one GPU while the engine is awake."""

    weights: float
    adapters: float
    context: float
    """Context, libraries, workspace; communication between GPUs."""
    activations: float
    """Of the largest pass."""
    graphs: float
    kv_cache: float
    """What is left of what the engine may take; below 0 where nothing is."""
    rollout: RolloutWork
    layout: RolloutLayout

    @property
    def lacks(self) -> float:
        """What the cache needs more for one longest sequence: without it vLLM does not start."""
        longest = self.sequence_bytes(self.rollout.max_model_length)
        return max(0.0, longest - self.kv_cache) if self.rollout.is_vllm else 0.0

    def sequence_bytes(self, context: float) -> float:
        """Keys and values of a sequence of so many tokens."""
        return sequence_kv_bytes(self.rollout, self.layout, context)

    def sequences_at_once(self, mean_context: float) -> float:
        """How many are decoded side by side where they are so long on average; no fewer than 1, where it fits."""
        if self.lacks:
            return 0.0
        return max(1.0, min(float(self.rollout.max_sequences), self.kv_cache / self.sequence_bytes(mean_context)))


def engine_space(
    rollout: RolloutWork,
    layout: RolloutLayout,
    gpu: Gpu,
    constants: Constants,
    lora: LoraShape | None = None,
    num_requests: int | None = None,
) -> EngineSpace:
    """Of one GPU that holds a T-th of a copy. `lora`: the adapters of the model in training. `num_requests`: that one
    engine gets in a step; on CPUs, where vLLM does not measure with the largest pass there may be, none is larger."""
    shape, parallel, each, is_vllm = rollout.shape, layout.tensor_parallel, rollout.weight_bytes, rollout.is_vllm
    on_gpu = is_vllm and not gpu.is_cpu
    weights = each * shape.num_parameters / parallel
    adapters = 0.0
    if rollout.adapter_rank is not None and lora is not None:
        # Room for one, whose rank is rounded up.
        room = next((rank for rank in ADAPTER_RANKS if rank >= lora.rank), lora.rank)
        adapters = each * lora.num_parameters * room / lora.rank / parallel
    context = constants.engine_context_bytes * (1 if parallel == 1 else 2) if on_gpu else 0.0
    graphs = constants.graph_bytes if on_gpu and rollout.compiles else 0.0
    activations = pass_bytes(rollout, layout, num_requests if gpu.is_cpu else None) if is_vllm else 0.0
    # transformers' cache grows with its rows.
    all_rows = rollout.max_sequences * sequence_kv_bytes(rollout, layout, rollout.max_model_length)
    kv_cache = float(rollout.cpu_kv_cache_bytes) if is_vllm else all_rows
    if on_gpu:
        others = weights + adapters + context + activations + graphs
        kv_cache = rollout.memory_utilization * gpu.memory_bytes - others
    return EngineSpace(weights, adapters, context, activations, graphs, kv_cache, rollout, layout)


def kv_bytes_per_layer_token(shape: ModelShape, layout: RolloutLayout, number_bytes: int) -> float:
    """2 kv b / T, and no less than one head of keys and one of values."""
    parallel = min(layout.tensor_parallel, max(1, shape.num_kv_heads))
    return number_bytes * shape.kv_numbers_per_token / parallel


def sequence_kv_bytes(rollout: RolloutWork, layout: RolloutLayout, context: float) -> float:
    """Of a sequence of so many tokens, in whole blocks. Layers with a window keep that."""
    shape, (num_full, num_windows) = rollout.shape, rollout.shape.attention_layers
    seen = num_full * math.ceil(context / BLOCK_TOKENS)
    if num_windows:
        seen += num_windows * math.ceil(min(context, shape.sliding_window or 0) / BLOCK_TOKENS)
    return kv_bytes_per_layer_token(shape, layout, rollout.weight_bytes) * seen * BLOCK_TOKENS


def pass_bytes(rollout: RolloutWork, layout: RolloutLayout, num_requests: int | None = None) -> float:
    """Activations of the largest pass: (4F + 2H) b of each token, which with T GPUs are cut up; or where that is more,
    logits and what is made of them to sample, of all sequences that are decoded at once."""
    shape, each = rollout.shape, rollout.weight_bytes
    of_experts = shape.mlp_size * (shape.experts_per_token if shape.has_experts else 1) + shape.shared_expert_size
    tokens, sequences = rollout.max_batched_tokens, rollout.max_sequences
    if num_requests is not None:
        tokens, sequences = min(tokens, num_requests * rollout.max_model_length), min(sequences, num_requests)
    width = 4 * max(shape.dense_mlp_size, of_experts) + 2 * shape.hidden_size
    sampled = sequences * shape.vocabulary_size * (each + _SAMPLER_BYTES)
    return max(tokens * each * width / layout.tensor_parallel, sampled)


GIB = 2**30
_AS_SEEN = "as seen of vLLM; no formula"
GPU_BUCKET_BYTES = 256 * 2**20
CPU_BUCKET_BYTES = 32 * 2**20
"""As in the trainer's weights/buckets.py."""
ROLLOUT_WEIGHTS = "rollout weights"
KV_CACHE = "KV cache"


@dataclass(frozen=True)
class EngineMemory:
    """Of the engine on one GPU of a pool: with vLLM the whole budget while it is awake, whatever of it is used."""

    space: EngineSpace
    awake: tuple[Part, ...]
    asleep: tuple[Part, ...]
    """While models are trained and scored with. On CPUs, and with transformers, weights stay."""
    with_weights: tuple[Part, ...]
    """Before the cache wakes."""


def engine_memory(pool: PlacedPool, workload: Workload, constants: Constants) -> EngineMemory | None:
    """None where the rollout is elsewhere."""
    rollout, layout, lengths = workload.rollout, pool.rollout, workload.lengths
    if layout is None:
        return None
    actor, requests = workload.models.get(Role.ACTOR), workload.requests_per_engine(layout)
    space = engine_space(rollout, layout, pool.gpu, constants, None if actor is None else actor.lora, requests)
    formula = f"{rollout.weight_bytes} x {rollout.shape.num_parameters:.4g} / {layout.tensor_parallel}"
    weights = Part(ROLLOUT_WEIGHTS, space.weights + space.adapters, formula)
    if not rollout.is_vllm:
        # It decodes rows of one length side by side (hf_engine.py): at most all of a batch, as long as they may be, one
        # layer's cache twice while it grows; and logits of all tokens of the prompts before.
        rows = min(rollout.max_sequences, requests)
        whole_rows = rows * space.sequence_bytes(lengths.longest_row) * (1 + 1 / rollout.shape.num_layers)
        logits = rows * lengths.prompt_max * rollout.shape.vocabulary_size * rollout.weight_bytes
        own = (
            weights,
            Part(KV_CACHE, whole_rows, f"{rows} rows of {lengths.longest_row} tokens"),
            Part("engine activations", logits, f"logits of {rows} prompts of {lengths.prompt_max} tokens"),
        )
        return EngineMemory(space, own, (weights,), (weights,))
    others = (
        Part("engine context", space.context, _AS_SEEN),
        Part("engine activations", space.activations, f"{rollout.max_batched_tokens} tokens in a pass"),
        Part("engine graphs", space.graphs, _AS_SEEN),
    )
    without = (weights.num_bytes + sum(part.num_bytes for part in others)) / GIB
    formula = f"{rollout.memory_utilization:g} x {pool.gpu.memory_bytes / GIB:.1f} GiB - {without:.1f} GiB"
    cache = Part(KV_CACHE, max(0.0, space.kv_cache), "cpuKvCache" if pool.gpu.is_cpu else formula)
    awake = tuple(part for part in (weights, *others, cache) if part.num_bytes)
    if pool.gpu.is_cpu:
        return EngineMemory(space, awake, (weights,), (weights,))
    sleeping = Part("sleeping engine", constants.sleeping_engine_bytes, _AS_SEEN)
    return EngineMemory(space, awake, (sleeping,), (sleeping, weights))


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
