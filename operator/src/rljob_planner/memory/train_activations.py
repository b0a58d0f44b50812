"""What the passes of a train engine hold of each token, layer by layer, and what their output head holds.

A layer is one of transformers' (5.19): norms in 32 bits, rotary positions, attention that keeps no matrix of scores
(the trainer's attention_kernels.py), an MLP with a gate, or experts as two grouped products. Terms are what autograd
saves, in the order of the layer's forward pass; they equal what torch's memory tracker finds (docs/planning.md).

Legend: as in `model_shape`, and m bytes of a number in the passes; all sizes in bytes of one token, unless they say so.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from rljob_planner.model_shape import ModelShape
from rljob_planner.workload import Head, TrainModel

_SUM_BYTES = 4
"""Of a number in norms, softmax and sums over tiles."""
GPU_TILE_BYTES = 128 * 2**20
CPU_TILE_BYTES = 4 * 2**20
"""These two: token_logprobs.py."""


class LayerBytes(NamedTuple):
    """Of one token in one decoder layer."""

    kept: float
    """From its forward to its backward pass."""
    in_mlp: float
    """On top of that, where the backward pass of its MLP needs most."""
    in_attention: float
    """In the place of `kept`, where that of its attention needs most; the MLP's part is gone then."""
    at_end: float
    """In the place of `kept`, in its first norm, which comes last."""
    forward: float
    """At most within a forward pass that keeps nothing, the layer's input included."""


def layer_bytes(model: TrainModel, *, has_experts: bool, exchanges_heads: bool) -> LayerBytes:
    """`exchanges_heads`: over sequence ranks (sequence_parallel.py), where output projections read a copy."""
    shape, m, is_whole = model.shape, model.compute_bytes, model.is_wholly_trained
    hidden, query, keys = shape.hidden_size, shape.query_size, shape.kv_size
    # A norm keeps its input in 32 bits; what its weight is multiplied by where that is trained; what it gives.
    norm = _SUM_BYTES * hidden + (2 if is_whole else 1) * m * hidden
    attention = m * (2 * query + 2 * keys) + _SUM_BYTES * shape.num_heads
    if shape.has_qk_norm:
        attention += (_SUM_BYTES + (m if is_whole else 0)) * (query + keys)
    if exchanges_heads:
        attention += m * query
    if has_experts:
        mlp, in_mlp, mlp_forward = _experts(shape, m, is_whole=is_whole)
    else:
        mlp, in_mlp, mlp_forward = (m * each * shape.dense_width for each in (4, 2, 3))
    adapters = m * model.lora.rank * model.lora.num_layers / shape.num_layers if model.lora else 0.0
    sums = 5 * _SUM_BYTES
    of_queries = (sums if shape.has_qk_norm else 2 * m) * query
    forward = (m + 2 * _SUM_BYTES) * query if shape.has_qk_norm else 4 * m * query
    return LayerBytes(
        kept=2 * norm + attention + mlp + adapters,
        in_mlp=in_mlp + m * hidden,
        in_attention=norm + attention + of_queries + 2 * m * hidden,
        at_end=norm + sums * hidden + m * hidden,
        forward=3 * m * hidden + max(m * hidden + mlp_forward, forward),
    )


def _experts(shape: ModelShape, m: int, *, is_whole: bool) -> tuple[float, float, float]:
    """Of k experts, whose inputs and outputs are copies, of the router's choice, and of the MLP for all tokens: kept,
    on top in the backward pass, and of a forward pass."""
    chosen = shape.experts_per_token
    width = chosen * shape.mlp_size + shape.shared_expert_size
    copies = m * chosen * shape.hidden_size
    choice = _SUM_BYTES * shape.num_experts + (4 * 8 + 2 * m + _SUM_BYTES) * chosen
    # Frozen experts, which have no adapters, need no inputs of their two products.
    kept = 4 * m * width + 2 * copies if is_whole else 3 * m * width + copies
    return kept + choice, 3 * copies, max(4 * copies, copies + 4 * m * width) + choice


class HeadBytes(NamedTuple):
    """Of all tokens together: what there is beside what layers keep."""

    backward: float
    norm: float
    """In the backward pass of the last norm, after that."""
    forward: float


def head_bytes(model: TrainModel, num_tokens: int, *, is_cpu: bool) -> HeadBytes:
    """All tokens count as tokens of responses. Tiles are as large as they ever are, so that more tokens never need
    less: how they divide tokens and vocabulary makes them up to half as large."""
    shape, m = model.shape, model.compute_bytes
    hidden = shape.hidden_size * num_tokens
    is_whole = model.is_wholly_trained
    norm = (_SUM_BYTES + (m if is_whole else 0)) * hidden
    after = (6 if is_whole else 5) * _SUM_BYTES * hidden
    if model.head is not Head.TOKENS:
        # In 32 bits (token_model.py).
        return HeadBytes(norm + (m + 2 * _SUM_BYTES) * hidden, after, (2 * m + 2 * _SUM_BYTES) * hidden)
    if num_tokens <= model.whole_logits_tokens:
        logits = 3 * _SUM_BYTES * num_tokens * shape.vocabulary_size
        return HeadBytes(norm + logits + (m + _SUM_BYTES) * hidden, after, logits + 3 * m * hidden)
    elements = (CPU_TILE_BYTES if is_cpu else GPU_TILE_BYTES) // _SUM_BYTES
    side = math.isqrt(elements)
    tile = min(elements, num_tokens * shape.vocabulary_size)
    of_hidden, product, sums = (m + _SUM_BYTES) * hidden, 0, 0
    if m < _SUM_BYTES:
        of_hidden += m * hidden
        # The logits of a product in 16 bits, and later their gradient.
        product = m * tile
        if num_tokens > side:
            # Of a gradient of the weight, over tiles of other tokens.
            sums = (
                _SUM_BYTES * shape.hidden_size * min(shape.vocabulary_size, 2 * side, 4 * elements // shape.hidden_size)
            )
    backward = norm + of_hidden + _SUM_BYTES * tile + 2 * product + sums
    return HeadBytes(backward, after, 3 * m * hidden + _SUM_BYTES * tile + product)
