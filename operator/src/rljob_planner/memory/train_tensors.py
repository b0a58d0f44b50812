"""The tensors of a model and the parts of them that a rank of FSDP2 holds.

A rank of W holds of each tensor ceil(rows / W) rows (torch, `fully_shard`: dimension 0 is cut and filled up). The
fullest rank is the first. Which tensors there are is transformers' doing (`modeling_*.py` of each architecture; experts
of a layer are two fused tensors with one row each), which of them are gathered together is that of the trainer's
engines/train/sharded_model.py: each layer by itself, and the rest.

Legend: as in `model_shape`, and W ranks that hold a copy together.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rljob_planner.model_shape import ModelShape
from rljob_planner.workload import Head, LoraShape, TrainModel


@dataclass(frozen=True)
class TensorSize:
    """`columns`: numbers of a row, of whatever shape; `count` equal ones."""

    rows: int
    columns: int = 1
    count: int = 1

    @property
    def num_elements(self) -> int:
        """Of all of them, whole."""
        return self.rows * self.columns * self.count

    def shard_elements(self, num_shards: int) -> int:
        """Of all of them, on the first of W ranks."""
        return -(-self.rows // num_shards) * self.columns * self.count


Unit = tuple[TensorSize, ...]
"""What FSDP2 gathers together."""


def num_elements(unit: Iterable[TensorSize]) -> int:
    """Whole."""
    return sum(each.num_elements for each in unit)


def shard_elements(unit: Iterable[TensorSize], num_shards: int) -> int:
    """On the first of W ranks."""
    return sum(each.shard_elements(num_shards) for each in unit)


def gathered_elements(unit: Iterable[TensorSize], num_shards: int) -> int:
    """On every rank while they are whole, with what fills them up: W shards."""
    return num_shards * shard_elements(unit, num_shards)


def layer_tensors(shape: ModelShape, *, has_experts: bool) -> Unit:
    """Of one decoder layer."""
    hidden = shape.hidden_size
    found = [*_attention(shape), TensorSize(hidden, 1, shape.num_norms_per_layer)]
    if shape.other_layer_parameters:
        found.append(TensorSize(shape.other_layer_parameters))
    if not has_experts:
        return (*found, *_mlp(shape, shape.dense_mlp_size or shape.mlp_size))
    found += [
        TensorSize(shape.num_experts, _inputs_of_mlp(shape) * shape.mlp_size * hidden),
        TensorSize(shape.num_experts, shape.mlp_size * hidden),
        TensorSize(shape.num_experts, hidden),
    ]
    if shape.other_expert_layer_parameters:
        found.append(TensorSize(shape.other_expert_layer_parameters))
    return (*found, *_mlp(shape, shape.shared_expert_size))


def root_tensors(model: TrainModel) -> Unit:
    """Embedding, last norm and head. A value head (output_head.py) has one row, which every rank holds."""
    shape = model.shape
    embedding = TensorSize(shape.vocabulary_size, shape.hidden_size)
    rest = TensorSize(shape.hidden_size + shape.other_root_parameters)
    if model.head is not Head.TOKENS:
        return embedding, rest, TensorSize(1, shape.hidden_size)
    return (embedding, rest) if shape.ties_head else (embedding, rest, embedding)


def adapter_tensors(lora: LoraShape, shape: ModelShape) -> Unit:
    """Of a decoder layer: beside each adapted linear layer A [rank, inputs] and B [outputs, rank] (lora.py). Of B only
    the number of all elements is known, which is that of the shards where W divides outputs."""
    first = TensorSize(lora.rank, lora.input_sizes_per_layer)
    total = -(-lora.num_parameters // shape.num_layers)
    return first, TensorSize(max(0, total - first.num_elements))


def _attention(shape: ModelShape) -> list[TensorSize]:
    hidden = shape.hidden_size
    norms = [TensorSize(shape.head_size, 1, 2)] if shape.has_qk_norm else []
    biases = _biases(shape) if shape.attention_bias_size else []
    if shape.attention_matrix_parameters:
        return [TensorSize(-(-shape.attention_matrix_parameters // hidden), hidden), *norms, *biases]
    return [
        TensorSize(shape.query_size, hidden),
        TensorSize(shape.kv_size, hidden, 2),
        TensorSize(hidden, shape.query_size),
        *norms,
        *biases,
    ]


def _inputs_of_mlp(shape: ModelShape) -> int:
    """Matrices that an MLP's input is multiplied with."""
    return 2 if shape.has_mlp_gate else 1


def _mlp(shape: ModelShape, width: int) -> list[TensorSize]:
    if not width:
        return []
    hidden = shape.hidden_size
    return [TensorSize(width, hidden, _inputs_of_mlp(shape)), TensorSize(hidden, width)]


def _biases(shape: ModelShape) -> list[TensorSize]:
    """Of queries, keys and values as Qwen2 has them; what is more belongs to the output."""
    of_inputs = shape.query_size + 2 * shape.kv_size
    rest = shape.attention_bias_size - of_inputs
    if rest < 0:
        return [TensorSize(shape.attention_bias_size)]
    found = [TensorSize(shape.query_size), TensorSize(shape.kv_size, 1, 2)]
    return [*found, TensorSize(rest)] if rest else found
