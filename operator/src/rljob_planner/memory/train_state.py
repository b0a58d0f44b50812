"""What of a train engine stays on its device: shards of parameters, gradients, moments.

Sources, all in the trainer's engines/train: `sharded_model.py` (a trained model's shards have 32 bits, a frozen one's
and what is frozen beside adapters the dtype of the passes), `optimizer.py` (AdamW, two moments in 32 bits of what is
trained), `offload.py`, `engine_memory.py` (whose accounting these formulas must equal: tests/planner), docs/memory.md.

Legend: P parameters, A those of adapters, W ranks that hold a copy together, m bytes of a number in the passes.
"""

from __future__ import annotations

from rljob_planner.memory.train_tensors import (
    Unit,
    adapter_tensors,
    layer_tensors,
    num_elements,
    root_tensors,
    shard_elements,
)
from rljob_planner.memory_types import Part
from rljob_planner.placement import TrainLayout
from rljob_planner.workload import TrainModel

MASTER_BYTES = 4
"""Of a trained number, of a gradient, and of each moment."""


def units_of(model: TrainModel) -> tuple[tuple[Unit, int], ...]:
    """What is gathered together (without adapters) and how often there is one like it: dense layers, layers with
    experts, the rest."""
    shape = model.shape
    num_expert = shape.num_expert_layers
    num_dense = shape.num_layers - num_expert
    layers = [
        (layer_tensors(shape, has_experts=has_experts), count)
        for has_experts, count in ((False, num_dense), (True, num_expert))
        if count
    ]
    return (*layers, (root_tensors(model), 1))


def base_shard_elements(model: TrainModel, layout: TrainLayout) -> int:
    """P / W: of a rank, without adapters."""
    return sum(count * shard_elements(unit, layout.shard_size) for unit, count in units_of(model))


def adapter_shard_elements(model: TrainModel, layout: TrainLayout) -> int:
    """A / W."""
    if model.lora is None:
        return 0
    return model.shape.num_layers * shard_elements(adapter_tensors(model.lora, model.shape), layout.shard_size)


def trained_shard_elements(model: TrainModel, layout: TrainLayout) -> int:
    """Of a rank, numbers that have a gradient and moments."""
    if not model.is_trained:
        return 0
    return base_shard_elements(model, layout) if model.lora is None else adapter_shard_elements(model, layout)


def trained_elements(model: TrainModel) -> int:
    """The same, whole."""
    if not model.is_trained:
        return 0
    if model.lora is not None:
        return model.lora.num_parameters
    return sum(count * num_elements(unit) for unit, count in units_of(model))


def parameter_bytes(model: TrainModel, layout: TrainLayout) -> int:
    """Shards of a rank."""
    if model.is_actor_without_adapters:
        return 0
    base = base_shard_elements(model, layout)
    of_base = MASTER_BYTES if model.is_trained and model.lora is None else model.compute_bytes
    return of_base * base + MASTER_BYTES * adapter_shard_elements(model, layout)


def moment_bytes(model: TrainModel, layout: TrainLayout) -> int:
    """Both, of a rank. There are none before the first update."""
    return 2 * MASTER_BYTES * trained_shard_elements(model, layout)


def gradient_bytes(model: TrainModel, layout: TrainLayout) -> int:
    """Of a rank, at the end of a micro-batch. Dropped after an update. Where reduction is deferred, what all
    micro-batches but the last of an update leave: whole gradients."""
    if model.defers_reduction:
        return MASTER_BYTES * trained_elements(model)
    return MASTER_BYTES * trained_shard_elements(model, layout)


def parameters_part(model: TrainModel, layout: TrainLayout) -> Part:
    """With their formula."""
    each = MASTER_BYTES if model.is_trained and model.lora is None else model.compute_bytes
    formula = f"{each} x {model.num_parameters:.4g} / {layout.shard_size}"
    if model.lora is not None:
        formula += f" + {MASTER_BYTES} x {model.lora.num_parameters:.4g} / {layout.shard_size}"
    return Part("parameters", parameter_bytes(model, layout), formula)


def moments_part(model: TrainModel, layout: TrainLayout) -> Part:
    """With their formula."""
    formula = f"{2 * MASTER_BYTES} x {trained_elements(model):.4g} / {layout.shard_size}"
    return Part("moments", moment_bytes(model, layout), formula)


def resident_bytes(model: TrainModel, layout: TrainLayout, *, has_moments: bool) -> tuple[Part, ...]:
    """What is on the device of a rank between passes. `has_moments`: after the first update."""
    parts = []
    if not model.offload.parameters:
        parts.append(parameters_part(model, layout))
    if has_moments and model.is_trained and not model.offload.optimizer:
        parts.append(moments_part(model, layout))
    return tuple(each for each in parts if each.num_bytes)


def host_bytes(model: TrainModel, layout: TrainLayout) -> tuple[Part, ...]:
    """What offload sends to the host's memory, of a rank, at most. Pinned buffers take up to twice as much
    (docs/memory.md)."""
    parts = []
    if model.offload.parameters:
        parts.append(parameters_part(model, layout))
    if model.offload.gradients and model.is_trained:
        parts.append(Part("gradients", MASTER_BYTES * trained_shard_elements(model, layout)))
    if model.offload.optimizer and model.is_trained:
        parts.append(moments_part(model, layout))
    return tuple(each for each in parts if each.num_bytes)
