"""The host memory of the workers of one node. Sources, in the trainer:

- engines/host_ledger.py, engines/train/engine_memory.py and workers/rollout.py add up the same memory before the first
  step; tests/planner checks that both give the same numbers
- engines/train/offload.py, checkpoints/save.py: each shard of a tensor has pinned buffers of its own on GPUs
- vLLM, device_allocator/cumem.py: each segment of a sleeping engine that is kept has a pinned buffer of its own
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rljob_planner.constants import Constants
from rljob_planner.kv_cache import engine_memory
from rljob_planner.memory.train_state import base_bytes
from rljob_planner.model_shape import ModelShape, TensorSize, Unit, shard_elements
from rljob_planner.plan_types import Part, Parts
from rljob_planner.workload import MASTER_BYTES, PlacedPool, RolloutWork, TrainLayout, TrainModel, Workload

PROCESS_BYTES = 1.1e9
"""Host memory of the libraries of one worker: about 1,070 MiB on CPUs (docs/memory.md). A profile's measured value
replaces it."""
_ROUNDED = "each buffer rounded up to a power of two"
_COPIES = "copies for checkpoints"
_NUM_COPIES = 3
"""Copies for checkpoints: the parameter and its two moments."""
_SEGMENT_BYTES = 20 * 2**20
_LARGE_BYTES = 10 * 2**20
_LARGE_UNIT_BYTES = 2 * 2**20
"""Sizes of torch's allocator on GPUs (c10/cuda/CUDACachingAllocator): a tensor of at least `_LARGE_BYTES` has a segment
of its own, a multiple of `_LARGE_UNIT_BYTES`; smaller ones share segments of `_SEGMENT_BYTES`."""


def host_parts(pool: PlacedPool, workload: Workload, constants: Constants) -> Parts:
    """Host memory of all workers on the first node of the pool, which has most, by owner. Pinned buffers are rounded up
    to powers of two. Not counted: Ray's object store, and the processes of rewards."""
    workers = pool.gpus_per_node
    found = [(workers, Part("libraries", constants.process_bytes or PROCESS_BYTES))]
    for role, layout in pool.layouts.items():
        for part in _model_parts(workload.models[role], layout, on_cpu=pool.gpu.is_cpu):
            # Only the first replica writes checkpoints. Its workers are the first ones.
            number = min(workers, layout.shard_size) if part.owner == _COPIES else workers
            found.append((number, Part(f"{role} {part.owner}", part.num_bytes, part.formula)))
    found += [(workers, part) for part in _rollout_parts(pool, workload, constants)]
    return tuple(
        Part(part.owner, number * part.num_bytes, f"{number} workers x {part.formula}".removesuffix(" x "))
        for number, part in found
        if part.num_bytes
    )


def _model_parts(model: TrainModel, layout: TrainLayout, *, on_cpu: bool) -> Iterator[Part]:
    """What one worker keeps for a model. On CPUs offloaded parameters need no additional memory, and the moments are in
    host memory in any case."""
    base = (*model.shape.layers_tensors, *model.non_layer_units.tensors)
    adapters = () if model.lora is None else model.lora.matrices
    trained = (adapters or base) if model.is_trained else ()
    shards, offload = layout.shard_size, model.offload

    def part(owner: str, *buffers: tuple[int, int, Unit]) -> Part:
        """`buffers`: the number of buffers of each tensor, the bytes of an element, and the tensors."""
        num_bytes, terms = 0, []
        for number, size, unit in buffers:
            num_bytes += number * _buffer_bytes(unit, shards, size, is_pinned=not on_cpu)
            terms.append(f"{number * size} x {shard_elements(unit):.4g} / {shards}")
        formula = f"({' + '.join(terms)})"
        return Part(owner, num_bytes, formula if on_cpu else f"{formula}, {_ROUNDED}")

    if offload.parameters and not on_cpu and not model.is_actor_without_adapters:
        beside = [(1, MASTER_BYTES, adapters)] if adapters else []
        yield part("parameters", (1, base_bytes(model), base), *beside)
    if offload.gradients:
        yield part("gradients", (1, MASTER_BYTES, trained))
    if offload.optimizer or on_cpu:
        yield part("moments", (2, MASTER_BYTES, trained))
    yield part(_COPIES, (_NUM_COPIES, MASTER_BYTES, trained))


def _rollout_parts(pool: PlacedPool, workload: Workload, constants: Constants) -> Iterator[Part]:
    """What one worker keeps for vLLM: on GPUs the state that sleeps, on CPUs the KV cache."""
    rollout, layout = workload.rollout, pool.rollout
    engine = engine_memory(pool, workload, constants)
    if layout is None or engine is None or not rollout.is_vllm:
        return
    if pool.gpu.is_cpu:
        yield Part("KV cache", rollout.cpu_kv_cache_bytes, "cpuKvCache")
        return
    if rollout.keeps_weights_on_host:
        weights = engine.budget.weights + engine.budget.adapters
        formula = f"{rollout.weight_bytes} x {rollout.shape.num_parameters:.4g} / {layout.tensor_parallel}"
        num_bytes = _sleeping_bytes(rollout, layout.tensor_parallel, weights)
        yield Part("sleeping rollout weights", num_bytes, f"({formula}), {_ROUNDED}")
    yield Part("sleeping rollout graphs", engine.budget.graphs, "measured on vLLM; no formula")


def _sleeping_bytes(rollout: RolloutWork, parallel: int, num_weight_bytes: float) -> float:
    """The pinned buffers for the weights of a sleeping engine. An estimate: it was not compared with a run on a GPU."""
    total, left = 0.0, num_weight_bytes
    for elements, copies in _engine_matrices(rollout.shape):
        size = -(-elements * rollout.weight_bytes // parallel)
        if size >= _LARGE_BYTES:
            total += copies * _power_of_two(-(-size // _LARGE_UNIT_BYTES) * _LARGE_UNIT_BYTES)
            left -= copies * size
    return total + max(0.0, left) * _power_of_two(_SEGMENT_BYTES) / _SEGMENT_BYTES


def _engine_matrices(shape: ModelShape) -> Iterator[tuple[int, int]]:
    """The large matrices of a model in vLLM, which fuses queries, keys and values, and gate and up projections:
    elements, and number."""
    hidden, layers, sparse = shape.hidden_size, shape.num_layers, shape.num_expert_layers
    if not shape.attention_matrix_parameters:
        yield (shape.query_size + 2 * shape.kv_size) * hidden, layers
        yield shape.query_size * hidden, layers
    experts = shape.num_experts * shape.mlp_size
    for width, number in ((shape.dense_width, layers - sparse), (experts, sparse), (shape.shared_expert_size, sparse)):
        yield 2 * width * hidden, number
        yield width * hidden, number
    yield shape.embedding_parameters, 1 if shape.ties_head else 2


def _buffer_bytes(unit: Iterable[TensorSize], num_shards: int, element_bytes: int, *, is_pinned: bool) -> int:
    """Bytes of one buffer for each tensor's shard on rank 0."""
    total = 0
    for each in unit:
        size = -(-each.rows // num_shards) * each.columns * element_bytes
        total += each.copies * (_power_of_two(size) if is_pinned else size)
    return total


def _power_of_two(size: int) -> int:
    """The smallest power of two that is at least `size`; 0 for 0."""
    return 1 << (size - 1).bit_length() if size else 0
