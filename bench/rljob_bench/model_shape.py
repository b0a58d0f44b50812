"""Sizes of the models that `gpu_step.py` trains, and what follows from them: parameters, arithmetic, memory.

Memory is that of RLJob's planner for one worker that holds a model alone: float32 weights, gradients and both moments
of AdamW, passes in 16 bits, a layer and the root whole in 16 bits while they are computed. Bytes that a layer keeps per
token are counted from what autograd saves in transformers' Qwen3 (norms, projections, rotary, attention, SwiGLU).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

LOGPROB_BUFFER_BYTES = 128 * 2**20
"""Of `engines/train/token_logprobs`, whatever the vocabulary."""


@dataclass(frozen=True)
class ModelShape:
    """Of a Qwen3 with tied embeddings."""

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_key_heads: int
    head_size: int
    mlp_size: int
    num_vocabulary: int

    @property
    def query_size(self) -> int:
        """Of all heads."""
        return self.num_heads * self.head_size

    @property
    def key_size(self) -> int:
        """Of all key heads, and so of all values."""
        return self.num_key_heads * self.head_size

    @property
    def num_layer_products(self) -> int:
        """Parameters of a layer that matrices are multiplied by."""
        return self.hidden_size * (2 * self.query_size + 2 * self.key_size) + 3 * self.hidden_size * self.mlp_size

    @property
    def num_layer_parameters(self) -> int:
        """With the norms."""
        return self.num_layer_products + 2 * self.hidden_size + 2 * self.head_size

    @property
    def num_root_parameters(self) -> int:
        """Embeddings, which are the head, and the last norm."""
        return self.num_vocabulary * self.hidden_size + self.hidden_size

    @property
    def num_parameters(self) -> int:
        """Of the whole model."""
        return self.num_layers * self.num_layer_parameters + self.num_root_parameters


@dataclass(frozen=True)
class Work:
    """An update on so many tokens; `every_nth_layer` is 0 where all activations are kept."""

    row_lengths: tuple[int, ...]
    num_responses: int
    """Response tokens: the only ones whose logits are computed."""
    every_nth_layer: int

    @property
    def num_tokens(self) -> int:
        """Of all rows."""
        return sum(self.row_lengths)

    def num_recomputed(self, shape: ModelShape) -> int:
        """Layers."""
        return math.ceil(shape.num_layers / self.every_nth_layer) if self.every_nth_layer else 0


def forward_operations(shape: ModelShape, work: Work) -> float:
    """Floating-point operations of one pass: two per parameter that is multiplied and token; in attention, which is
    causal, four per head's element and token that is seen, on average half of the row."""
    seen = sum(length * length for length in work.row_lengths) / 2
    layers = 2 * shape.num_layer_products * work.num_tokens + 4 * shape.query_size * seen
    return shape.num_layers * layers + 2 * shape.num_vocabulary * shape.hidden_size * work.num_responses


def update_operations(shape: ModelShape, work: Work) -> float:
    """Of forward and backward pass, the second twice the first. What is computed again is not counted: it is no use."""
    return 3 * forward_operations(shape, work)


def peak_bytes(shape: ModelShape, work: Work, micro_batch_tokens: int) -> float:
    """The largest of four moments of an update after the first: the backward pass of a layer, the head, the end of the
    backward pass, the optimizer (fused: it needs nothing on top)."""
    layer, root = shape.num_layer_parameters, shape.num_root_parameters
    states = 16 * shape.num_parameters
    per_layer = 16 * shape.hidden_size + 10 * (shape.query_size + shape.key_size) + 8 * shape.mlp_size
    recomputed = work.num_recomputed(shape)
    kept = recomputed * 2 * shape.hidden_size + (shape.num_layers - recomputed) * per_layer
    again = per_layer if recomputed else 0
    in_a_layer = states + micro_batch_tokens * (kept + again + 4 * shape.mlp_size) + 4 * root + 12 * layer
    head = 4 * shape.num_vocabulary * shape.hidden_size
    in_the_head = states + micro_batch_tokens * kept + 2 * root + head + LOGPROB_BUFFER_BYTES
    return float(max(in_a_layer, in_the_head, states + 6 * root))


TINY = ModelShape("tiny", 2, 64, 2, 1, 32, 128, 256)
"""Only to see that everything runs."""
SHAPES = {
    shape.name: shape
    for shape in (
        TINY,
        ModelShape("Qwen3-0.6B", 28, 1024, 16, 8, 128, 3072, 151_936),
        ModelShape("Qwen3-1.7B", 28, 2048, 16, 8, 128, 6144, 151_936),
        ModelShape("Qwen3-4B", 36, 2560, 32, 8, 128, 9728, 151_936),
    )
}
"""Of the models of these names; their weights here are random."""
