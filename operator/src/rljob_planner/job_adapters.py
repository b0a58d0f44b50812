"""Adapters (LoRA) beside the linear layers of a model, counted from its shape.

As `add_adapters` of the trainer (engines/train/lora.py): A is rank x inputs, B outputs x rank, beside each linear layer
of the decoder's layers. Fused experts and routers are no linear layers there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rljob_planner.model_shape import ModelShape
from rljob_planner.workload import LoraShape


@dataclass(frozen=True)
class LinearLayer:
    """A linear layer of a decoder layer, by its names in the families of transformers."""

    names: tuple[str, ...]
    inputs: int
    outputs: int
    num_layers: int
    """Decoder layers that have it."""


def linear_layers(shape: ModelShape) -> tuple[LinearLayer, ...]:
    """Those that adapters can stand beside. Matrices that some families have as one are counted one by one."""
    hidden, query, kv, layers = shape.hidden_size, shape.query_size, shape.kv_size, shape.num_layers
    fused = ("qkv_proj", "query_key_value")
    attention = (
        LinearLayer(("q_proj", *fused), hidden, query, layers),
        LinearLayer(("k_proj", *fused), hidden, kv, layers),
        LinearLayer(("v_proj", *fused), hidden, kv, layers),
        LinearLayer(("o_proj", "dense"), query, hidden, layers),
    )
    return (*attention, *_of_mlps(shape))


def _of_mlps(shape: ModelShape) -> tuple[LinearLayer, ...]:
    widths = []
    if not shape.has_experts:
        widths.append((shape.mlp_size, shape.num_layers))
    if shape.num_dense_layers:
        widths.append((shape.dense_mlp_size or shape.mlp_size, shape.num_dense_layers))
    if shape.shared_expert_size:
        widths.append((shape.shared_expert_size, shape.num_expert_layers))
    hidden, found = shape.hidden_size, []
    for width, layers in widths:
        if shape.has_mlp_gate:
            found.append(LinearLayer(("gate_proj", "gate_up_proj"), hidden, width, layers))
        found.append(LinearLayer(("up_proj", "gate_up_proj", "fc1", "dense_h_to_4h"), hidden, width, layers))
        found.append(LinearLayer(("down_proj", "fc2", "dense_4h_to_h"), width, hidden, layers))
    return tuple(found)


def lora_shape(shape: ModelShape, rank: int, targets: Sequence[str] | None, *, syncs_alone: bool) -> LoraShape:
    """Adapters of a rank beside the layers that `targets` name by the ends of their names; beside all where it is
    None."""
    chosen = [
        each
        for each in linear_layers(shape)
        if targets is None or any(target.rpartition(".")[2] in each.names for target in targets)
    ]
    return LoraShape(
        rank=rank,
        num_parameters=sum(rank * (each.inputs + each.outputs) * each.num_layers for each in chosen),
        num_layers=sum(each.num_layers for each in chosen),
        input_sizes_per_layer=sum(each.inputs * each.num_layers for each in chosen) // shape.num_layers,
        syncs_alone=syncs_alone,
    )
