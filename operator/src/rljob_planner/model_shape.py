"""How large a model is, part by part: all that memory and time depend on.

Legend of formulas: L layers, H hidden size, q = query heads x head size, kv = key and value heads x head size, F width
of an MLP, E experts, k experts of a token, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    """A decoder of equal layers, with or without experts."""

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    mlp_size: int
    """Width of the MLP; with experts that of one expert."""
    vocabulary_size: int
    ties_head: bool
    """Whether embedding and output head are one tensor."""
    has_mlp_gate: bool = True
    """Three matrices in an MLP instead of two."""
    has_qk_norm: bool = False
    attention_bias_size: int = 0
    """Numbers of all biases of a layer's attention."""
    num_norms_per_layer: int = 2
    num_experts: int = 0
    experts_per_token: int = 0
    shared_expert_size: int = 0
    """Width of the MLP that all tokens of a layer with experts use; 0 where there is none."""
    num_dense_layers: int = 0
    """Of a model with experts: layers that have one MLP, of `dense_mlp_size`."""
    dense_mlp_size: int = 0
    sliding_window: int | None = None
    num_full_attention_layers: int | None = None
    """Layers whose attention sees everything; None: all of them (or none has a window)."""
    max_positions: int | None = None
    other_layer_parameters: int = 0
    """Of each layer: what is in none of the sums below, such as biases of norms and of the MLP."""
    other_expert_layer_parameters: int = 0
    """The same, of layers with experts alone."""
    other_root_parameters: int = 0
    """Outside of layers: learned positions, biases of the last norm and of the output head."""
    attention_matrix_parameters: int = 0
    """Of a layer whose attention has other matrices than four (DeepSeek's latent attention); 0: H (2q + 2kv)."""
    kv_cache_size: int = 0
    """Numbers that such a layer keeps of a token; 0: 2kv."""

    @property
    def query_size(self) -> int:
        """q."""
        return self.num_heads * self.head_size

    @property
    def kv_size(self) -> int:
        """kv."""
        return self.num_kv_heads * self.head_size

    @property
    def kv_numbers_per_token(self) -> int:
        """What a layer keeps of a token in the KV cache."""
        return self.kv_cache_size or 2 * self.kv_size

    def spreads_over(self, num_gpus: int) -> bool:
        """Whether so many GPUs can share the heads of attention: each has as many, and keys and values for them
        (trainer, engines/train/layout.py; vLLM, config/model.py)."""
        kv_heads = self.num_kv_heads
        return self.num_heads % num_gpus == 0 and (kv_heads % num_gpus == 0 or num_gpus % kv_heads == 0)

    @property
    def has_experts(self) -> bool:
        """Whether it is a mixture of experts."""
        return self.num_experts > 0

    @property
    def attention_parameters(self) -> int:
        """Of one layer: H (2q + 2kv), biases, and norms of queries and keys."""
        norms = 2 * self.head_size if self.has_qk_norm else 0
        return self._attention_matrices + self.attention_bias_size + norms

    @property
    def _attention_matrices(self) -> int:
        return self.attention_matrix_parameters or self.hidden_size * (2 * self.query_size + 2 * self.kv_size)

    @property
    def _norms(self) -> int:
        return self.num_norms_per_layer * self.hidden_size + self.other_layer_parameters

    def _mlp(self, width: int) -> int:
        return (3 if self.has_mlp_gate else 2) * self.hidden_size * width

    @property
    def dense_layer_parameters(self) -> int:
        """Of a layer with one MLP."""
        return self.attention_parameters + self._norms + self._mlp(self.dense_mlp_size or self.mlp_size)

    @property
    def expert_layer_parameters(self) -> int:
        """Of a layer with experts: these, their router, and what all tokens share."""
        experts = self.num_experts * self._mlp(self.mlp_size) + self.num_experts * self.hidden_size
        shared = self._mlp(self.shared_expert_size) + self.other_expert_layer_parameters
        return self.attention_parameters + self._norms + experts + shared

    @property
    def num_expert_layers(self) -> int:
        """Of all layers those with experts."""
        return self.num_layers - self.num_dense_layers if self.has_experts else 0

    @property
    def layers_parameters(self) -> int:
        """Of all layers."""
        num_dense = self.num_layers - self.num_expert_layers
        return num_dense * self.dense_layer_parameters + self.num_expert_layers * self.expert_layer_parameters

    @property
    def embedding_parameters(self) -> int:
        """V H."""
        return self.vocabulary_size * self.hidden_size

    @property
    def root_parameters(self) -> int:
        """Outside of layers: embedding, output head where it is another tensor, last norm."""
        tables = self.embedding_parameters * (1 if self.ties_head else 2)
        return tables + self.hidden_size + self.other_root_parameters

    @property
    def num_parameters(self) -> int:
        """With an output head for tokens."""
        return self.layers_parameters + self.root_parameters

    @property
    def matmul_parameters(self) -> int:
        """Weights that one token is multiplied with: k experts, the head once, no embedding. Without the head it is
        `layer_matmul_parameters`."""
        return self.layer_matmul_parameters + self.embedding_parameters

    @property
    def layer_matmul_parameters(self) -> int:
        """Of all layers."""
        attention = self._attention_matrices
        dense = attention + self._mlp(self.dense_mlp_size or self.mlp_size)
        routed = self.experts_per_token * self._mlp(self.mlp_size) + self.num_experts * self.hidden_size
        sparse = attention + routed + self._mlp(self.shared_expert_size)
        return (self.num_layers - self.num_expert_layers) * dense + self.num_expert_layers * sparse

    @property
    def largest_tensor_parameters(self) -> int:
        """What a hand-over of weights holds whole at least: the embedding, or the fused experts of one layer."""
        experts = self.num_experts * self.hidden_size * self.mlp_size * (2 if self.has_mlp_gate else 1)
        return max(self.embedding_parameters, experts)
