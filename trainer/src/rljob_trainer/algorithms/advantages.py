"""Formulas of advantages.

Legend: B responses, G groups (all responses to one prompt are one group), N response tokens of one worker.

What takes one reward per response runs once per step on the controller, which sees the whole batch, so the groups are
complete whatever the number of workers. What takes tokens runs on the workers, and learns through `Reduce` what it has
to know of the others' tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rljob_trainer.algorithms.interfaces import Reduce

STD_EPSILON = 1e-6
WHITENING_EPSILON = 1e-8


def group_relative_advantages(rewards_B: Tensor, groups_B: Tensor, *, normalize_by_std: bool = True) -> Tensor:
    """A = (r - mean of the group) / (std of the group + 1e-6), the same for every token of a response.

    Source: GRPO, Shao et al. 2024, arXiv 2402.03300, section 4.1.2; without the division, Dr.GRPO, Liu et al. 2025,
    arXiv 2503.20783. The standard deviation is the unbiased one. A group of one has no baseline: mean 0 and std 1
    are used, A = r / (1 + 1e-6). Group ids are any integers. Returns [B] in the dtype of `rewards_B`.
    """
    index_B, sizes_G = _index_groups(rewards_B, groups_B)
    is_single_G = sizes_G == 1
    # In 64 bits: with 32, rewards that are all 0.1 leave a rounding residue that the small std blows up.
    wide_B = rewards_B.double()
    means_G = wide_B.new_zeros(len(sizes_G)).index_add_(0, index_B, wide_B).div_(sizes_G).masked_fill_(is_single_G, 0.0)
    centered_B = wide_B - means_G.index_select(0, index_B)
    if normalize_by_std:
        squares_G = wide_B.new_zeros(len(sizes_G)).index_add_(0, index_B, centered_B.square())
        stds_G = squares_G.div_((sizes_G - 1).clamp_(min=1)).sqrt_().masked_fill_(is_single_G, 1.0)
        centered_B.div_(stds_G.add_(STD_EPSILON).index_select(0, index_B))
    return centered_B.to(rewards_B.dtype)


def zero_variance_mask(rewards_B: Tensor, groups_B: Tensor) -> Tensor:
    """True [B] where a response belongs to a group of two or more whose rewards are all exactly equal.

    Such a group's advantages are all 0: it carries no gradient, but it does count in the denominators of the loss
    unless it is left out (DAPO, Yu et al. 2025, arXiv 2503.14476, section 3.2, samples until none is left).
    """
    index_B, sizes_G = _index_groups(rewards_B, groups_B)
    lowest_G = rewards_B.new_zeros(len(sizes_G)).scatter_reduce(0, index_B, rewards_B, "amin", include_self=False)
    highest_G = rewards_B.new_zeros(len(sizes_G)).scatter_reduce(0, index_B, rewards_B, "amax", include_self=False)
    return ((lowest_G == highest_G) & (sizes_G > 1)).index_select(0, index_B)


def whitened(values_N: Tensor, reduce: Reduce) -> Tensor:
    """(x - mean) / sqrt(variance + 1e-8), [N], over the tokens of all workers: they have mean 0 and variance 1 then.
    Collective.

    The variance is the unbiased one; values that are all equal, or a single one, become 0. Source: whitening of
    advantages as in PPO's implementations (Huang et al. 2022, "The 37 Implementation Details of Proximal Policy
    Optimization", detail 7), over response tokens.
    """
    centered_N = values_N.to(torch.float64, copy=True)
    num_values = centered_N.new_full((), len(centered_N))
    total, num_values = reduce.sum(torch.stack([centered_N.sum(), num_values])).unbind()
    centered_N.sub_(total / num_values.clamp(min=1))
    variance = reduce.sum(centered_N.dot(centered_N)) / (num_values - 1).clamp(min=1)
    return centered_N.mul_((variance + WHITENING_EPSILON).rsqrt()).to(values_N.dtype)


def _index_groups(rewards_B: Tensor, groups_B: Tensor) -> tuple[Tensor, Tensor]:
    if rewards_B.dim() != 1 or rewards_B.shape != groups_B.shape:
        raise ValueError(
            f"rewards and groups must be vectors of one length (got {list(rewards_B.shape)} and "
            f"{list(groups_B.shape)}); pass one reward and one group id per response"
        )
    _, index_B, sizes_G = torch.unique(groups_B, return_inverse=True, return_counts=True)
    return index_B, sizes_G
