"""The critic's loss per token. Aggregation to one number is `aggregation`'s work.

Legend: N response tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rljob_trainer.algorithms.interfaces import Reduce

VALUE_CLIPPED_SUM = "vf_clipfrac"
"""Tokens whose value has moved out of the range about the old one, where that makes the larger loss."""
VALUE_SUM = "vpred_mean"

ROUNDING = 1e-12
"""Of the mean square of returns and values: a variance below is that of rounding."""


@dataclass(frozen=True)
class ValueLosses:
    """Of one micro-batch."""

    losses_N: Tensor
    sums: Mapping[str, Tensor]
    """0-d, without gradient: sums over response tokens."""


def clipped_value_loss(
    values_N: Tensor, old_values_N: Tensor, returns_N: Tensor, clip_range: float | None
) -> ValueLosses:
    """max((V - R)^2, (clip(V, V_old - range, V_old + range) - R)^2) / 2, [N]; without a range (V - R)^2 / 2.

    Source: Huang et al. 2022, "The 37 Implementation Details of Proximal Policy Optimization", detail 9 (Schulman's
    implementation of arXiv 1707.06347). The range keeps the critic near what the advantages were computed with.
    """
    squares_N = (values_N - returns_N).square()
    num_clipped = squares_N.new_zeros((), dtype=torch.int64)
    if clip_range is not None:
        held_N = (values_N.clamp(old_values_N - clip_range, old_values_N + clip_range) - returns_N).square()
        is_held_N = held_N > squares_N
        squares_N = held_N.where(is_held_N, squares_N)
        num_clipped = is_held_N.sum()
    sums = {VALUE_CLIPPED_SUM: num_clipped, VALUE_SUM: values_N.detach().sum(dtype=torch.float64)}
    return ValueLosses(squares_N / 2, sums)


def explained_variance(values_N: Tensor, returns_N: Tensor, reduce: Reduce) -> float:
    """1 - Var(R - V) / Var(R) over the tokens of all workers; 0 where all returns are equal, but for rounding.
    Collective."""
    returns_N, errors_N = returns_N.double(), returns_N.double() - values_N.double()
    count = returns_N.new_full((), len(returns_N))
    count, *sums = reduce.sum(torch.stack([count, returns_N.sum(), errors_N.sum()])).tolist()
    means = [each / max(count, 1.0) for each in sums]
    squares = [(each_N - mean).square().sum() for each_N, mean in zip((returns_N, errors_N), means, strict=True)]
    squares += [returns_N.square().sum(), values_N.double().square().sum()]
    total, unexplained, *sizes = reduce.sum(torch.stack(squares)).tolist()
    # Returns are sums of values and rewards in 32 bits.
    return 1.0 - unexplained / total if total > ROUNDING * sum(sizes) else 0.0
