"""Whitening: advantages with mean 0 and variance 1 over all response tokens of a step.

Legend: B responses, N response tokens of one worker.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rljob_trainer.algorithms.interfaces import Reduce

WHITENING_EPSILON = 1e-8
"""Added to the variance."""
VALUES_AT_ONCE = 1 << 17
"""The batch is converted to float64 in parts of one mebibyte, which stay in a core's cache."""


def whitened(values_N: Tensor, reduce: Reduce) -> Tensor:
    """Collective. (x - mean) / sqrt(variance + 1e-8), [N], with mean and variance over the tokens of all workers.

    The variance is unbiased (n - 1); if all values are equal, or there is only one, the result is 0. Source: whitening
    of advantages in implementations of PPO (Huang et al. 2022, "The 37 Implementation Details of Proximal Policy
    Optimization", detail 7), here over response tokens.
    """
    values_N = values_N.detach().clone()
    parts = [values_N[at : at + VALUES_AT_ONCE] for at in range(0, len(values_N), VALUES_AT_ONCE)]
    total = values_N.new_zeros((), dtype=torch.float64)
    for part in parts:
        total += part.double().sum()
    num_values = torch.full_like(total, len(values_N))
    total, num_values = reduce.sum(torch.stack([total, num_values])).unbind()
    mean = total / num_values.clamp(min=1)
    squares = torch.zeros_like(total)
    for part in parts:
        centered = part.to(torch.float64, copy=True).sub_(mean)
        squares += centered.dot(centered)
    variance = reduce.sum(squares) / (num_values - 1).clamp(min=1)
    scale = (variance + WHITENING_EPSILON).rsqrt()
    for part in parts:
        part.copy_(part.to(torch.float64, copy=True).sub_(mean).mul_(scale))
    return values_N


def whitened_responses(values_B: Tensor, lengths_B: Tensor) -> Tensor:
    """[B]: `whitened` for values that all tokens of a response share; a response counts once for each of its tokens."""
    wide_B, weights_B = values_B.double(), lengths_B.double()
    num_tokens = weights_B.sum()
    centered_B = wide_B - wide_B.dot(weights_B) / num_tokens.clamp(min=1)
    variance = centered_B.square().dot(weights_B) / (num_tokens - 1).clamp(min=1)
    return centered_B.mul_((variance + WHITENING_EPSILON).rsqrt()).to(values_B.dtype)
