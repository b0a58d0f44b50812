"""Memory of a rollout engine on one GPU: weights, the process itself, and the rest, which the KV cache gets.

The size of the KV cache limits how many sequences are decoded at the same time, so `memory` and `timing` both use this
module.

Sources: the trainer's engines/rollout/vllm_start.py (the options with which it starts vLLM) and hf_engine.py; vLLM
0.32, v1/worker/gpu_worker.py, `determine_available_memory`: KV cache = `gpu_memory_utilization` x total GPU memory -
weights - context and libraries - activations of the largest pass - CUDA graphs. vLLM's pull request 10511 has an
example with numbers.

The package's docstring explains the letters of formulas.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rljob_planner.constants import Constants
from rljob_planner.gpus import Gpu
from rljob_planner.model_shape import ModelShape
from rljob_planner.plan_types import Part, Parts
from rljob_planner.workload import LoraShape, PlacedPool, Role, RolloutLayout, RolloutWork, TrainModel, Workload

BLOCK_TOKENS = 16
"""Tokens of one block: vLLM allocates the keys and values of a sequence in whole blocks."""
ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The ranks for which vLLM can reserve adapter memory. A rank is rounded up to one of these (trainer,
engines/rollout/vllm_start.py)."""
_LOGIT_BYTES = 4
"""Bytes of a logit in float32."""
_SAMPLER_BYTES = 16
"""Bytes per sequence and vocabulary entry that the sampler adds to the logits in vLLM's profiling pass: logits in
float32, sorted logits, and the sorting order."""


@dataclass(frozen=True)
class EngineBudget:
    """Memory of the engine on one GPU while it is awake, in bytes."""

    weights: float
    adapters: float
    context: float
    """CUDA context, libraries, workspace, and buffers for communication between GPUs."""
    activations: float
    """Activations of the largest forward pass."""
    graphs: float
    kv_cache: float
    """With vLLM on GPUs: the rest of the engine's share of the GPU; negative if the other parts together are larger
    than the share. On CPUs: the size that the job sets. With transformers: the cache of the largest number of
    sequences, each of the largest length."""
    rollout: RolloutWork
    layout: RolloutLayout

    @property
    def kv_cache_shortage(self) -> float:
        """Bytes that the cache lacks to hold one sequence of the largest length; 0 if it is large enough. If it is too
        small, vLLM does not start."""
        longest = self.sequence_bytes(self.rollout.max_model_length)
        return max(0.0, longest - self.kv_cache) if self.rollout.is_vllm else 0.0

    def sequence_bytes(self, context: float) -> float:
        """Bytes of the keys and values of a sequence with `context` tokens."""
        return sequence_kv_bytes(self.rollout, self.layout, context)

    def sequences_at_once(self, mean_context: float) -> float:
        """How many sequences of this mean length the cache holds: from 1 to `max_sequences`, or 0 if vLLM cannot
        start."""
        if self.kv_cache_shortage:
            return 0.0
        return max(1.0, min(float(self.rollout.max_sequences), self.kv_cache / self.sequence_bytes(mean_context)))


def engine_budget(
    rollout: RolloutWork,
    layout: RolloutLayout,
    gpu: Gpu,
    constants: Constants,
    lora: LoraShape | None = None,
    num_requests: int | None = None,
) -> EngineBudget:
    """The memory of an engine on one of its TP GPUs.

    `lora`: the actor's adapters. `num_requests`: the sequences that the engine gets in a step. Used only on CPUs, where
    vLLM runs no profiling pass: no forward pass there has more sequences than this.
    """
    shape, parallel, is_vllm = rollout.shape, layout.tensor_parallel, rollout.is_vllm
    on_gpu = is_vllm and not gpu.is_cpu
    weights = rollout.weight_bytes * shape.num_parameters / parallel
    adapters = 0.0
    if rollout.adapter_rank is not None and lora is not None:
        # vLLM reserves memory for one adapter, with the rank rounded up.
        reserved_rank = next((rank for rank in ADAPTER_RANKS if rank >= lora.rank), lora.rank)
        adapters = rollout.weight_bytes * lora.num_parameters * reserved_rank / lora.rank / parallel
    context = constants.engine_context_bytes * (1 if parallel == 1 else 2) if on_gpu else 0.0
    graphs = constants.graph_bytes if on_gpu and rollout.compiles else 0.0
    activations = pass_bytes(rollout, layout, num_requests if gpu.is_cpu else None) if is_vllm else 0.0
    if gpu.is_cpu:
        activations += head_copy_bytes(rollout, layout)
    # The cache of transformers grows with the number of rows and their length.
    largest_cache = rollout.max_sequences * sequence_kv_bytes(rollout, layout, rollout.max_model_length)
    kv_cache = float(rollout.cpu_kv_cache_bytes) if is_vllm else largest_cache
    if on_gpu:
        others = weights + adapters + context + activations + graphs
        kv_cache = rollout.memory_utilization * gpu.memory_bytes - others
    return EngineBudget(weights, adapters, context, activations, graphs, kv_cache, rollout, layout)


def kv_bytes_per_layer_token(shape: ModelShape, layout: RolloutLayout, number_bytes: int) -> float:
    """2 kv b / TP: bytes per layer and token on one GPU. Each GPU holds at least one key head and one value head. The
    cache of latent attention is one vector for all heads, whole on each GPU (vLLM, config/model.py)."""
    num_heads = 1 if shape.kv_cache_size else shape.num_kv_heads
    return number_bytes * shape.kv_numbers_per_token / min(layout.tensor_parallel, num_heads)


def sequence_kv_bytes(rollout: RolloutWork, layout: RolloutLayout, context: float) -> float:
    """Bytes of the keys and values of a sequence with `context` tokens, in whole blocks per layer. A layer with a
    sliding window keeps at most as many tokens as the window has."""
    shape, (num_full, num_windows) = rollout.shape, rollout.shape.attention_layers
    num_blocks = num_full * math.ceil(context / BLOCK_TOKENS)
    if num_windows:
        num_blocks += num_windows * math.ceil(min(context, shape.sliding_window or 0) / BLOCK_TOKENS)
    return kv_bytes_per_layer_token(shape, layout, rollout.weight_bytes) * num_blocks * BLOCK_TOKENS


def pass_bytes(rollout: RolloutWork, layout: RolloutLayout, num_requests: int | None = None) -> float:
    """Activations of the largest forward pass, in bytes: the larger of (4F + 2H) b / TP per token, and the logits of
    all running sequences with the sampler's copies."""
    shape, weight_bytes = rollout.shape, rollout.weight_bytes
    of_experts = shape.mlp_size * (shape.experts_per_token if shape.has_experts else 1) + shape.shared_expert_size
    tokens, sequences = rollout.max_batched_tokens, rollout.max_sequences
    if num_requests is not None:
        tokens, sequences = min(tokens, num_requests * rollout.max_model_length), min(sequences, num_requests)
    width = 4 * max(shape.dense_mlp_size, of_experts) + 2 * shape.hidden_size
    sampled = sequences * shape.vocabulary_size * (weight_bytes + _SAMPLER_BYTES)
    return max(tokens * weight_bytes * width / layout.tensor_parallel, sampled)


def head_copy_bytes(rollout: RolloutWork, layout: RolloutLayout) -> float:
    """4 V H / TP: the output head in float32, which both engines make from a 16-bit head for each pass on CPUs. GPUs
    multiply 16-bit matrices to a result in float32 (trainer, engines/train/output_head.py; vLLM,
    logits_processor.py)."""
    if not rollout.has_float32_head or rollout.weight_bytes == _LOGIT_BYTES:
        return 0.0
    return _LOGIT_BYTES * rollout.shape.vocabulary_size * rollout.shape.hidden_size / layout.tensor_parallel


GIB = 2**30
_MEASURED = "measured on vLLM; no formula"
GPU_BUCKET_BYTES = 256 * 2**20
CPU_BUCKET_BYTES = 32 * 2**20
"""Sizes of a bucket: the bytes of weights that a weight sync gathers at once, on GPUs and on CPUs (trainer,
weights/buckets.py)."""
ROLLOUT_WEIGHTS = "rollout weights"
KV_CACHE = "KV cache"


@dataclass(frozen=True)
class EngineMemory:
    """Memory of a rollout engine on one GPU of a pool. While vLLM is awake, it holds its whole share of the memory,
    even if it uses only a part."""

    budget: EngineBudget
    awake: Parts
    """During generation."""
    asleep: Parts
    """During training and scoring. On CPUs, and with transformers, the weights stay in memory."""
    with_weights: Parts
    """During a weight sync: the weights are awake, the KV cache is not."""


def engine_memory(pool: PlacedPool, workload: Workload, constants: Constants) -> EngineMemory | None:
    """The memory of the pool's rollout engine; None if the rollout is on another pool."""
    rollout, layout, lengths = workload.rollout, pool.rollout, workload.lengths
    if layout is None:
        return None
    actor, requests = workload.models.get(Role.ACTOR), workload.requests_per_engine(layout)
    budget = engine_budget(rollout, layout, pool.gpu, constants, None if actor is None else actor.lora, requests)
    formula = f"{rollout.weight_bytes} x {rollout.shape.num_parameters:.4g} / {layout.tensor_parallel}"
    weights = Part(ROLLOUT_WEIGHTS, budget.weights + budget.adapters, formula)
    if not rollout.is_vllm:
        # transformers decodes rows of equal length together (hf_engine.py). Worst case: all rows of a batch have the
        # full length, and one layer's cache is held twice while it grows. The logits of all prompt tokens are needed
        # earlier, but are counted as well.
        rows = min(rollout.max_sequences, requests)
        whole_rows = rows * budget.sequence_bytes(lengths.longest_row) * (1 + 1 / rollout.shape.num_layers)
        logit_bytes = _LOGIT_BYTES if rollout.has_float32_head else rollout.weight_bytes
        logits = rows * lengths.prompt_max * rollout.shape.vocabulary_size * logit_bytes
        formula = f"logits of {rows} prompts with {lengths.prompt_max} tokens each"
        awake_parts = (
            weights,
            Part(KV_CACHE, whole_rows, f"{rows} rows with {lengths.longest_row} tokens each"),
            Part("engine activations", budget.activations + logits, formula),
        )
        return EngineMemory(budget, awake_parts, (weights,), (weights,))
    others = (
        Part("engine context", budget.context, _MEASURED),
        Part("engine activations", budget.activations, f"{rollout.max_batched_tokens:,} tokens in a pass"),
        Part("engine graphs", budget.graphs, _MEASURED),
    )
    without = (weights.num_bytes + sum(part.num_bytes for part in others)) / GIB
    formula = f"{rollout.memory_utilization:g} x {pool.gpu.memory_bytes / GIB:.1f} GiB - {without:.1f} GiB"
    cache = Part(KV_CACHE, max(0.0, budget.kv_cache), "cpuKvCache" if pool.gpu.is_cpu else formula)
    awake = tuple(part for part in (weights, *others, cache) if part.num_bytes)
    if pool.gpu.is_cpu:
        return EngineMemory(budget, awake, (weights,), (weights,))
    sleeping = Part("sleeping engine", constants.sleeping_engine_bytes, _MEASURED)
    return EngineMemory(budget, awake, (sleeping,), (sleeping, weights))


def bucket_part(pool: PlacedPool, workload: Workload, actor: TrainModel | None) -> Part:
    """The buffers of a weight sync: two buckets, or twice the largest tensor if that is larger (weights/buckets.py).

    If one GPU holds the whole actor, nothing is gathered. There is then only a copy of one tensor in the engine's
    dtype, and no copy if the actor has the same dtype.
    """
    rollout = workload.rollout
    weight_bytes = rollout.weight_bytes
    layout = pool.layouts.get(Role.ACTOR)
    largest = weight_bytes * rollout.shape.largest_tensor_parameters
    if layout is not None and layout.shard_size == 1:
        is_cast = actor is None or (4 if actor.lora is None else actor.compute_bytes) != weight_bytes
        return Part("buckets", float(largest if is_cast else 0), f"{weight_bytes} x largest tensor")
    bucket = CPU_BUCKET_BYTES if pool.gpu.is_cpu else GPU_BUCKET_BYTES
    size = min(max(bucket, largest), weight_bytes * rollout.shape.num_parameters)
    return Part("buckets", 2.0 * size, f"2 x {size / 2**20:.0f} MiB")
