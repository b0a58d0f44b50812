"""The state that a train engine keeps on its device: shards of parameters, gradients and moments.

All sizes are those of one rank. Sources:

- engines/train of the trainer: `sharded_model.py` (shards of a trained model are float32; shards of a frozen model, or
  of frozen weights beside adapters, have the dtype of the passes), `optimizer.py` (AdamW: two float32 moments per
  trained parameter)
- `engine_memory.py` there counts the same memory; tests/planner checks that these formulas give the same numbers
- docs/memory.md
"""

from __future__ import annotations

from rljob_planner.plan_types import Part
from rljob_planner.workload import MASTER_BYTES, TrainLayout, TrainModel


def trained_shard_elements(model: TrainModel, layout: TrainLayout) -> int:
    """Number of elements in a rank's shards that have a gradient and moments."""
    if not model.is_trained:
        return 0
    elements = model.base_elements if model.lora is None else model.adapter_elements
    return elements(layout.shard_size)


def gradient_bytes(model: TrainModel, layout: TrainLayout) -> int:
    """Bytes of a rank's gradients at the end of a micro-batch: those of its shards or, with deferred reduction, whole
    gradients, which are kept until the last micro-batch of the update."""
    if model.defers_reduction:
        return MASTER_BYTES * model.num_trained_parameters
    return MASTER_BYTES * trained_shard_elements(model, layout)


def parameters_part(model: TrainModel, layout: TrainLayout) -> Part:
    """Shards of the base model and of its adapters. 0 bytes for a reference that is the actor's model."""
    formula = f"{base_bytes(model)} x {model.num_parameters:.4g} / {layout.shard_size}"
    if model.lora is not None:
        formula += f" + {MASTER_BYTES} x {model.lora.num_parameters:.4g} / {layout.shard_size}"
    base, adapters = model.base_elements(layout.shard_size), model.adapter_elements(layout.shard_size)
    num_bytes = base_bytes(model) * base + MASTER_BYTES * adapters
    return Part("parameters", 0 if model.is_actor_without_adapters else num_bytes, formula)


def moments_part(model: TrainModel, layout: TrainLayout) -> Part:
    """Shards of both moments, which exist from the first update on."""
    formula = f"{2 * MASTER_BYTES} x {model.num_trained_parameters:.4g} / {layout.shard_size}"
    return Part("moments", 2 * MASTER_BYTES * trained_shard_elements(model, layout), formula)


def base_bytes(model: TrainModel) -> int:
    """Bytes of a parameter of the base model (not of an adapter)."""
    return MASTER_BYTES if model.is_trained and model.lora is None else model.compute_bytes
