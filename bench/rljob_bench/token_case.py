"""Artificial responses for the measurement of losses and advantages: the same numbers on both sides.

Legend: B rows, T columns of a padded table, N response tokens of all rows, row after row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

GROUP_SIZE = 8
KL_COEFFICIENT = 0.001
GROUP_RELATIVE = "group-relative advantages"
GROUP_RELATIVE_VECTORIZED = "group-relative advantages, verl's grpo_vectorized"
WHITENING = "whitened advantages"
GAE = "generalized advantages (GAE)"
REINFORCE_PLUS_PLUS = "REINFORCE++ advantages"
GAMMA, LAMBDA = 0.99, 0.95
CLIPPED = "clipped loss, token mean"
CLIPPED_BY_SEQUENCE = "clipped loss, sequence mean"
CLIPPED_WITH_KL = "clipped loss and KL term (k3), token mean"
ON_TOKENS = (GAE, REINFORCE_PLUS_PLUS)
ADVANTAGES = (GROUP_RELATIVE, GROUP_RELATIVE_VECTORIZED, WHITENING, *ON_TOKENS)
OPERATIONS = (*ADVANTAGES, CLIPPED, CLIPPED_BY_SEQUENCE, CLIPPED_WITH_KL)


@dataclass(frozen=True)
class TokenCase:
    """Number of rows, width, and whether rows end early: then their lengths are lognormal with a median of 0.3 times
    the width, cut off at the width."""

    num_rows: int
    width: int
    is_ragged: bool


@dataclass(frozen=True)
class Tables:
    """Tables float32 [B, T], and values per row. Values outside the rows are 0."""

    mask_BT: Tensor
    """True for response tokens."""
    logprobs_BT: Tensor
    old_logprobs_BT: Tensor
    reference_logprobs_BT: Tensor
    advantages_BT: Tensor
    values_BT: Tensor
    rewards_B: Tensor
    groups_B: Tensor
    """Group numbers, int64."""


@dataclass(frozen=True)
class Outcome:
    """The result of a contender, for comparison: a loss and its gradient, or the values of an advantage."""

    total: float
    norm: float
    pattern: float
    """A sum over all tokens in which every token has another weight."""


def random_tables(case: TokenCase) -> Tables:
    """Most ratios of new to old probabilities are in the trust region, as in training, and some are far outside."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    shape = (case.num_rows, case.width)
    lengths_B = torch.full((case.num_rows,), case.width)
    if case.is_ragged:
        lengths_B = (0.3 * case.width * (0.8 * normal(case.num_rows)).exp()).long().clamp(1, case.width)
    mask_BT = torch.arange(case.width) < lengths_B[:, None]
    old_BT = -torch.rand(*shape, generator=generator) * 2
    rewards_B = (normal(case.num_rows) > 0).float() + 0.1 * normal(case.num_rows)
    return Tables(
        mask_BT,
        # Log-probabilities must not be positive.
        (old_BT + 0.15 * normal(*shape)).clamp(max=0.0) * mask_BT,
        old_BT * mask_BT,
        (old_BT + 0.3 * normal(*shape)) * mask_BT,
        normal(case.num_rows, 1) * mask_BT,
        normal(*shape) * mask_BT,
        rewards_B,
        torch.arange(case.num_rows) // GROUP_SIZE,
    )


def outcome(total: float, values_N: Tensor) -> Outcome:
    """`values_N`: one value per response token."""
    wide_N = values_N.double()
    weights_N = (torch.arange(len(wide_N), dtype=torch.float64) * 0.618).frac()
    return Outcome(total, float(wide_N.norm()), float(wide_N @ weights_N))
