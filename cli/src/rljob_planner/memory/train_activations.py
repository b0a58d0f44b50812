"""Activations in a train engine's passes: bytes per token in a decoder layer, and bytes of the output head.

The decoder layer is that of transformers 5.19: norms in float32, rotary positions, attention that keeps no matrix of
scores (trainer, attention_kernels.py), and a gated MLP, or experts as two grouped products. The terms of the sums are
the tensors that autograd saves, in the order of the layer's forward pass. Torch's memory tracker finds the same bytes
(docs/architecture/planner-formulas.md).

The package's docstring explains the letters of formulas. Sizes are in bytes per token, unless stated otherwise.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from rljob_planner.model_shape import ModelShape
from rljob_planner.workload import Head, TrainModel

_SUM_BYTES = 4
"""Bytes of an element in norms, softmax and sums over tiles, which are computed in float32."""
GPU_TILE_BYTES = 128 * 2**20
CPU_TILE_BYTES = 4 * 2**20
"""Bytes of a tile of logits, on GPUs and on CPUs (trainer, engines/train/token_logprobs.py)."""


class LayerBytes(NamedTuple):
    """Bytes per token in one decoder layer."""

    kept: float
    """Saved from the layer's forward pass to its backward pass."""
    in_mlp: float
    """In addition to `kept`, at the peak of the MLP's backward pass."""
    in_attention: float
    """Instead of `kept`, at the peak of the attention's backward pass. The MLP's activations are freed by then."""
    at_end: float
    """Instead of `kept`, at the end of the layer's backward pass: in the backward pass of its first norm."""
    forward: float
    """The peak of a forward pass without backward, including the layer's input."""


def layer_bytes(model: TrainModel, *, has_experts: bool, exchanges_heads: bool) -> LayerBytes:
    """The bytes of a layer with or without experts. `exchanges_heads`: the model has sequence parallelism, whose
    exchange copies the input of the output projection (sequence_parallel.py)."""
    shape, m, is_whole = model.shape, model.compute_bytes, model.is_wholly_trained
    hidden, query, keys = shape.hidden_size, shape.query_size, shape.kv_size
    # A norm keeps its input in float32, its result and, if its weight is trained, the normalized input.
    norm = _SUM_BYTES * hidden + (2 if is_whole else 1) * m * hidden
    attention = m * (2 * query + 2 * keys) + _SUM_BYTES * shape.num_heads
    if shape.has_qk_norm:
        attention += (_SUM_BYTES + (m if is_whole else 0)) * (query + keys)
    if exchanges_heads:
        attention += m * query
    if has_experts:
        mlp, in_mlp, mlp_forward = _experts(shape, m, is_whole=is_whole)
    else:
        mlp, in_mlp, mlp_forward = (m * tensors * shape.dense_width for tensors in (4, 2, 3))
    adapters = m * model.lora.rank * model.lora.num_linear_layers / shape.num_layers if model.lora else 0.0
    # In the backward pass of a norm: five float32 tensors.
    in_norm = 5 * _SUM_BYTES
    of_queries = (in_norm if shape.has_qk_norm else 2 * m) * query
    forward = (m + 2 * _SUM_BYTES) * query if shape.has_qk_norm else 4 * m * query
    return LayerBytes(
        kept=2 * norm + attention + mlp + adapters,
        in_mlp=in_mlp + m * hidden,
        in_attention=norm + attention + of_queries + 2 * m * hidden,
        at_end=norm + in_norm * hidden + m * hidden,
        forward=3 * m * hidden + max(m * hidden + mlp_forward, forward),
    )


def _experts(shape: ModelShape, m: int, *, is_whole: bool) -> tuple[float, float, float]:
    """Bytes per token of the MLP in a layer with experts: those that are kept, the additional ones in the backward
    pass, and those in a forward pass without backward. Counted are k experts with copies of their inputs and outputs,
    the router's choice, and the shared expert."""
    chosen = shape.experts_per_token
    width = chosen * shape.mlp_size + shape.shared_expert_size
    copies = m * chosen * shape.hidden_size
    choice = _SUM_BYTES * shape.num_experts + (4 * 8 + 2 * m + _SUM_BYTES) * chosen
    # Frozen experts have no adapters, so their two products need not keep their inputs.
    kept = 4 * m * width + 2 * copies if is_whole else 3 * m * width + copies
    return kept + choice, 3 * copies, max(4 * copies, copies + 4 * m * width) + choice


class HeadBytes(NamedTuple):
    """Bytes of the output head for all tokens of a micro-batch, in addition to those that the layers keep."""

    gathering: float
    """Before the head's forward pass: what the last norm keeps, its result, and the hidden states of responses."""
    in_forward: float
    """In addition to `gathering`, in a forward pass with a backward pass to come."""
    backward: float
    """In the head's backward pass."""
    reduced: float
    """After the head's backward pass, while its gradient is summed over ranks."""
    norm: float
    """In the backward pass of the last norm, which follows that of the head."""
    forward: float
    """In a forward pass without backward."""


def head_bytes(model: TrainModel, num_tokens: int, *, is_cpu: bool) -> HeadBytes:
    """The bytes of the output head for `num_tokens` tokens, all of which count as response tokens. Tiles are assumed to
    have their largest size, so that more tokens never need less memory. Real tiles may have only half of this size."""
    shape, m = model.shape, model.compute_bytes
    hidden = shape.hidden_size * num_tokens
    is_whole = model.is_wholly_trained
    norm = (_SUM_BYTES + (m if is_whole else 0)) * hidden
    after = (6 if is_whole else 5) * _SUM_BYTES * hidden
    gathering, reduced = norm + 2 * m * hidden, norm + m * hidden
    if model.head is not Head.TOKENS:
        # Heads that predict values or scores compute in float32 (token_model.py).
        passes = norm + (m + 2 * _SUM_BYTES) * hidden
        return HeadBytes(gathering, passes - gathering, passes, reduced, after, (2 * m + 2 * _SUM_BYTES) * hidden)
    if num_tokens <= model.whole_logits_tokens:
        logits = 3 * _SUM_BYTES * num_tokens * shape.vocabulary_size
        passes = norm + logits + (m + _SUM_BYTES) * hidden
        return HeadBytes(gathering, passes - gathering, passes, reduced, after, logits + 3 * m * hidden)
    elements = (CPU_TILE_BYTES if is_cpu else GPU_TILE_BYTES) // _SUM_BYTES
    side = math.isqrt(elements)
    tile = min(elements, num_tokens * shape.vocabulary_size)
    of_hidden, product, sums = (m + _SUM_BYTES) * hidden, 0, 0
    if m < _SUM_BYTES:
        of_hidden += m * hidden
        # The logits of a tile in 16 bits, and later their gradient.
        product = m * tile
        if num_tokens > side:
            # The weight's gradient, summed over the tiles of other tokens.
            sums = (
                _SUM_BYTES * shape.hidden_size * min(shape.vocabulary_size, 2 * side, 4 * elements // shape.hidden_size)
            )
    backward = norm + of_hidden + _SUM_BYTES * tile + 2 * product + sums
    of_tile = _SUM_BYTES * tile + product
    return HeadBytes(gathering, of_tile, backward, reduced, after, 3 * m * hidden + of_tile)
