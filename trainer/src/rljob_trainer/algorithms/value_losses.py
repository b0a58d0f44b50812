"""The critic's loss per token; `aggregation` reduces it to a scalar.

Legend: N response tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rljob_trainer.algorithms.interfaces import Reduce

VALUE_CLIPPED_SUM = "vf_clipfrac"
"""The number of tokens whose loss is computed from the clipped value."""
VALUE_SUM = "vpred_mean"
"""The sum of the values."""

ROUNDING = 1e-12
"""A variance below this fraction of the mean square of returns and values is a rounding error."""


@dataclass(frozen=True)
class ValueLosses:
    """The critic's losses of one micro-batch."""

    losses_N: Tensor
    sums: Mapping[str, Tensor]
    """0-d each, without gradient: sums over response tokens by metric name."""


def clipped_value_loss(
    values_N: Tensor, old_values_N: Tensor, returns_N: Tensor, clip_range: float | None
) -> ValueLosses:
    """max((V - R)^2, (clip(V, V_old - range, V_old + range) - R)^2) / 2, [N]; without a range (V - R)^2 / 2.

    Source: Huang et al. 2022, "The 37 Implementation Details of Proximal Policy Optimization", detail 9 (Schulman's
    implementation of arXiv 1707.06347). The range keeps values close to the values with which the advantages were
    computed.
    """
    squares_N = (values_N - returns_N).square()
    num_clipped = squares_N.new_zeros((), dtype=torch.int64)
    if clip_range is not None:
        clipped_N = (values_N.clamp(old_values_N - clip_range, old_values_N + clip_range) - returns_N).square()
        is_clipped_N = clipped_N > squares_N
        squares_N = clipped_N.where(is_clipped_N, squares_N)
        num_clipped = is_clipped_N.sum()
    sums = {VALUE_CLIPPED_SUM: num_clipped, VALUE_SUM: values_N.detach().sum(dtype=torch.float64)}
    return ValueLosses(squares_N / 2, sums)


def explained_variance(values_N: Tensor, returns_N: Tensor, reduce: Reduce) -> float:
    """Collective. 1 - Var(R - V) / Var(R) over the tokens of all workers; 0 if all returns are equal up to rounding."""
    returns_N, errors_N = returns_N.double(), returns_N.double() - values_N.double()
    count = returns_N.new_full((), len(returns_N))
    count, *sums = reduce.sum(torch.stack([count, returns_N.sum(), errors_N.sum()])).tolist()
    means = [each / max(count, 1.0) for each in sums]
    squares = [(each_N - mean).square().sum() for each_N, mean in zip((returns_N, errors_N), means, strict=True)]
    squares += [returns_N.square().sum(), values_N.double().square().sum()]
    total, unexplained, *sizes = reduce.sum(torch.stack(squares)).tolist()
    # Returns are float32 sums of values and rewards, so equal returns may differ by a rounding error.
    return 1.0 - unexplained / total if total > ROUNDING * sum(sizes) else 0.0
