"""What of a train engine stays on its device: shards of parameters, gradients, moments.

Sources, all in the trainer's engines/train: `sharded_model.py` (a trained model's shards have 32 bits, a frozen one's
and what is frozen beside adapters the dtype of the passes), `optimizer.py` (AdamW, two moments in 32 bits of what is
trained), `offload.py`, `engine_memory.py` (whose accounting these formulas must equal: tests/planner), docs/memory.md.

Legend: P parameters, A those of adapters, W ranks that hold a copy together, m bytes of a number in the passes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rljob_planner.model_shape import ModelShape
from rljob_planner.plan_types import Part
from rljob_planner.workload import Head, LoraShape, TrainLayout, TrainModel


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
