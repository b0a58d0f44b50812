"""Sizes of the models that `gpu_step.py` trains, and their parameters, operations and memory.

Memory follows the planner's formula for one worker that holds a whole model: float32 weights, gradients and both AdamW
moments, passes in 16 bits, and one layer and the root in 16 bits while they are computed. Bytes that a layer keeps per
token are counted from what autograd saves in transformers' Qwen3 (norms, projections, rotary, attention, SwiGLU).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

LOGPROB_BUFFER_BYTES = 128 * 2**20
"""Logit buffers of `engines/train/token_logprobs`, the same for every vocabulary."""


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a Qwen3 with tied embeddings."""

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
        """Size of the queries of all heads."""
        return self.num_heads * self.head_size

    @property
    def key_size(self) -> int:
        """Size of the keys of all key-value heads, which is also that of the values."""
        return self.num_key_heads * self.head_size

    @property
    def num_layer_products(self) -> int:
        """Parameters of a layer's weight matrices."""
        return self.hidden_size * (2 * self.query_size + 2 * self.key_size) + 3 * self.hidden_size * self.mlp_size

    @property
    def num_layer_parameters(self) -> int:
        """Parameters of a layer, including norms."""
        return self.num_layer_products + 2 * self.hidden_size + 2 * self.head_size

    @property
    def num_root_parameters(self) -> int:
        """Parameters of the embeddings, which are also the output head, and of the last norm."""
        return self.num_vocabulary * self.hidden_size + self.hidden_size

    @property
    def num_parameters(self) -> int:
        """Parameters of the model."""
        return self.num_layers * self.num_layer_parameters + self.num_root_parameters


@dataclass(frozen=True)
class Work:
    """The tokens of an update. `every_nth_layer` is recomputed; 0 keeps all activations."""

    row_lengths: tuple[int, ...]
    num_responses: int
    """Number of response tokens, the only ones whose logits are computed."""
    every_nth_layer: int

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all rows."""
        return sum(self.row_lengths)

    def num_recomputed(self, shape: ModelShape) -> int:
        """Number of recomputed layers."""
        return math.ceil(shape.num_layers / self.every_nth_layer) if self.every_nth_layer else 0


def forward_operations(shape: ModelShape, work: Work) -> float:
    """Floating-point operations of a forward pass: two per weight-matrix parameter and token. Causal attention has four
    per head element and attended token; on average half of the row is attended to."""
    seen = sum(length * length for length in work.row_lengths) / 2
    layers = 2 * shape.num_layer_products * work.num_tokens + 4 * shape.query_size * seen
    return shape.num_layers * layers + 2 * shape.num_vocabulary * shape.hidden_size * work.num_responses


def update_operations(shape: ModelShape, work: Work) -> float:
    """Operations of forward and backward pass, the second being twice the first. Recomputation is not counted, because
    it is overhead."""
    return 3 * forward_operations(shape, work)


def peak_bytes(shape: ModelShape, work: Work, micro_batch_tokens: int) -> float:
    """The largest of four moments of an update after the first: backward pass of a layer, output head, end of the
    backward pass, optimizer step (fused, without extra memory)."""
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
"""A tiny model that only shows that the program works."""
SHAPES = {
    shape.name: shape
    for shape in (
        TINY,
        ModelShape("Qwen3-0.6B", 28, 1024, 16, 8, 128, 3072, 151_936),
        ModelShape("Qwen3-1.7B", 28, 2048, 16, 8, 128, 6144, 151_936),
        ModelShape("Qwen3-4B", 36, 2560, 32, 8, 128, 9728, 151_936),
    )
}
"""Shapes of the models with these names; the weights are random."""
