"""The shape of a model: the sizes of its tensors, from which memory and time are computed.

The package's docstring explains the letters of formulas. Sources: transformers' model classes (see `model_config`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

MLP_MATRICES = 3
"""The matrices of an MLP: gate, up and down projection."""


VLLM_VOCABULARY_PADDING = 64
"""vLLM pads the vocabulary to a multiple of this number."""


class TensorSize(NamedTuple):
    """The size of `copies` equal tensors, each with `rows` rows and `columns` columns. All dimensions after the first
    count as columns."""

    rows: int
    columns: int = 1
    copies: int = 1


Unit = tuple[TensorSize, ...]
"""Tensors that FSDP2 gathers together: those of one decoder layer, or one of `NonLayerUnits`."""


class NonLayerUnits(NamedTuple):
    """The units of FSDP2 with parameters outside the decoder layers (trainer, engines/train/sharded_model.py)."""

    root: Unit
    """The last norm, a weight that embedding and head share, and a value head."""
    embedding: Unit = ()
    """Empty if the embedding is in the root."""
    head: Unit = ()
    """Empty if the output head is in the root."""

    @property
    def tensors(self) -> Unit:
        """The tensors of all units."""
        return self.root + self.embedding + self.head


def shard_elements(unit: Iterable[TensorSize], num_shards: int = 1) -> int:
    """Number of elements of the unit on rank 0 of `num_shards` ranks. FSDP2 splits tensors by rows, and rank 0 has the
    most rows: ceil(rows / W)."""
    return sum(-(-each.rows // num_shards) * each.columns * each.copies for each in unit)


def gathered_elements(unit: Iterable[TensorSize], num_shards: int) -> int:
    """Number of elements on each rank while the unit is gathered, with the padding that makes all shards equally
    large."""
    return num_shards * shard_elements(unit, num_shards)


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder model, dense or with experts. All layers have equal tensors, except that in a model with
    experts some layers may have an ordinary MLP."""

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    mlp_size: int
    """F: width of the MLP, or of one expert."""
    vocabulary_size: int
    ties_head: bool
    """Whether the embedding and the output head share one tensor."""
    has_qk_norm: bool = False
    attention_bias_size: int = 0
    """Number of elements of all attention biases in a layer."""
    num_norms_per_layer: int = 2
    num_experts: int = 0
    experts_per_token: int = 0
    has_whole_experts: bool = False
    """Whether vLLM gets all experts of a layer in two tensors (trainer, engines/rollout/vllm_weights.py,
    `WHOLE_EXPERTS`). False: each expert in tensors of its own."""
    shared_expert_size: int = 0
    """Width of the shared expert, which processes all tokens in each layer with experts. 0: there is none."""
    num_dense_layers: int = 0
    """In a model with experts: the number of layers without experts. Their MLP has the width `dense_mlp_size`."""
    dense_mlp_size: int = 0
    sliding_window: int | None = None
    """The window in tokens: how many tokens attention sees in layers with a sliding window."""
    num_full_attention_layers: int | None = None
    """Number of layers whose attention sees all tokens; None: all layers."""
    max_positions: int | None = None
    other_layer_parameters: int = 0
    """Parameters per layer that do not follow from the other fields, such as MLP biases."""
    other_expert_layer_parameters: int = 0
    """Further such parameters of each layer with experts."""
    attention_matrix_parameters: int = 0
    """Attention parameters of a layer with other matrices than the usual four (DeepSeek's latent attention). 0: the
    usual four with H (2q + 2kv)."""
    kv_cache_size: int = 0
    """Elements per token in the KV cache of such a layer. 0: the usual 2kv."""
    model_type: str = field(default="", compare=False)
    """transformers' name of the model's family; empty if unknown."""

    @property
    def has_latent_attention(self) -> bool:
        """Whether keys and values are computed from one latent vector per token, by the layer `kv_b_proj`."""
        return self.kv_cache_size > 0

    @property
    def query_size(self) -> int:
        """q: query heads x head size."""
        return self.num_heads * self.head_size

    @property
    def kv_size(self) -> int:
        """kv: key/value heads x head size."""
        return self.num_kv_heads * self.head_size

    @property
    def kv_numbers_per_token(self) -> int:
        """Number of elements that a layer keeps per token in the KV cache."""
        return self.kv_cache_size or 2 * self.kv_size

    @property
    def attention_layers(self) -> tuple[int, int]:
        """The number of layers with full attention, and of layers with a sliding window."""
        if self.sliding_window is None or self.num_full_attention_layers is None:
            return self.num_layers, 0
        return self.num_full_attention_layers, self.num_layers - self.num_full_attention_layers

    def spreads_over(self, num_gpus: int) -> bool:
        """Whether the attention heads can be distributed evenly over `num_gpus` GPUs. Query heads are split; key/value
        heads are split or replicated (trainer, engines/train/layout.py; vLLM, config/model.py)."""
        kv_heads = self.num_kv_heads
        return self.num_heads % num_gpus == 0 and (kv_heads % num_gpus == 0 or num_gpus % kv_heads == 0)

    def allows_tensor_parallel(self, num_gpus: int) -> bool:
        """Whether vLLM can split this model over `num_gpus` GPUs. It splits the heads, the width of every MLP, and the
        vocabulary, which it pads (vLLM, vocab_parallel_embedding.py and linear.py)."""
        padded_vocabulary = -(-self.vocabulary_size // VLLM_VOCABULARY_PADDING) * VLLM_VOCABULARY_PADDING
        return self.spreads_over(num_gpus) and all(
            size % num_gpus == 0 for size in (padded_vocabulary, *self.mlp_widths)
        )

    @property
    def mlp_widths(self) -> tuple[int, ...]:
        """The widths of the model's MLPs, as far as it has them: in layers without experts, of one expert, of the
        shared expert. Two of them may be equal."""
        dense = (self.dense_width,) if self.num_expert_layers < self.num_layers else ()
        of_experts = (self.mlp_size, self.shared_expert_size) if self.has_experts else ()
        return tuple(width for width in (*dense, *of_experts) if width)

    @property
    def has_experts(self) -> bool:
        """Whether the model is a mixture of experts."""
        return self.num_experts > 0

    @property
    def num_expert_layers(self) -> int:
        """Layers with experts."""
        return self.num_layers - self.num_dense_layers if self.has_experts else 0

    @property
    def dense_width(self) -> int:
        """F in layers without experts."""
        return self.dense_mlp_size or self.mlp_size

    def layer_tensors(self, *, has_experts: bool) -> Unit:
        """The tensors of one decoder layer."""
        hidden, query, kv = self.hidden_size, self.query_size, self.kv_size
        matrices = TensorSize(query, hidden), TensorSize(kv, hidden, 2), TensorSize(hidden, query)
        # Biases of queries, keys and values come first (Qwen2 has only these). The rest belong to the output
        # projection.
        rest = self.attention_bias_size - query - 2 * kv
        biases = TensorSize(query), TensorSize(kv, 1, 2), TensorSize(rest)
        norms = (
            TensorSize(self.head_size, 1, 2 if self.has_qk_norm else 0),
            TensorSize(hidden, 1, self.num_norms_per_layer),
        )
        mlp = self._mlp(self.dense_width)
        if has_experts:
            inputs = 2 * self.mlp_size * hidden
            columns = inputs, self.mlp_size * hidden, hidden
            experts = (TensorSize(self.num_experts, each) for each in columns)
            mlp = (*experts, TensorSize(self.other_expert_layer_parameters), *self._mlp(self.shared_expert_size))
        return (
            *((TensorSize(self.attention_matrix_parameters),) if self.attention_matrix_parameters else matrices),
            *(biases if rest >= 0 else (TensorSize(self.attention_bias_size),)),
            *norms,
            TensorSize(self.other_layer_parameters),
            *mlp,
        )

    def _mlp(self, width: int) -> Unit:
        return TensorSize(width, self.hidden_size, 2), TensorSize(self.hidden_size, width)

    @cached_property
    def layers_tensors(self) -> Unit:
        """The tensors of all decoder layers."""
        counts = {False: self.num_layers - self.num_expert_layers, True: self.num_expert_layers}
        return tuple(
            each._replace(copies=count * each.copies)
            for has_experts, count in counts.items()
            if count
            for each in self.layer_tensors(has_experts=has_experts)
        )

    def layers_elements(self, num_shards: int = 1) -> int:
        """Parameters of all layers on rank 0 of `num_shards` ranks."""
        return shard_elements(self.layers_tensors, num_shards)

    def non_layer_units(self, *, has_token_head: bool = True) -> NonLayerUnits:
        """Embedding, last norm and output head. A head that predicts a value or a score (output_head.py) has one row,
        and every rank holds it; such a model has an embedding of its own."""
        embedding, norm = (TensorSize(self.vocabulary_size, self.hidden_size),), TensorSize(self.hidden_size)
        if not has_token_head:
            return NonLayerUnits((norm, TensorSize(1, self.hidden_size)), embedding)
        return NonLayerUnits((*embedding, norm)) if self.ties_head else NonLayerUnits((norm,), embedding, embedding)

    @cached_property
    def layers_parameters(self) -> int:
        """Parameters of all layers."""
        return self.layers_elements()

    @property
    def embedding_parameters(self) -> int:
        """V H: parameters of the embedding."""
        return self.vocabulary_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """P: number of parameters, with the output head for tokens."""
        return self.layers_parameters + shard_elements(self.non_layer_units().tensors)

    @property
    def matmul_parameters(self) -> int:
        """Number of weights that are multiplied for each token: with k experts per layer and the output head, without
        the embedding."""
        return self.layer_matmul_parameters + self.embedding_parameters

    @cached_property
    def layer_matmul_parameters(self) -> int:
        """The same without the output head."""
        hidden, layers, sparse = self.hidden_size, self.num_layers, self.num_expert_layers
        attention = self.attention_matrix_parameters or hidden * 2 * (self.query_size + self.kv_size)
        width = self.experts_per_token * self.mlp_size + self.shared_expert_size
        widths = (layers - sparse) * self.dense_width + sparse * width
        return layers * attention + MLP_MATRICES * hidden * widths + sparse * self.num_experts * hidden

    @property
    def largest_tensor_parameters(self) -> int:
        """Parameters of the largest tensor in a weight sync: the larger of the embedding, and the fused gate and up
        projections of all experts of a layer."""
        experts = self.num_experts * self.hidden_size * self.mlp_size * (MLP_MATRICES - 1)
        return max(self.embedding_parameters, experts)
