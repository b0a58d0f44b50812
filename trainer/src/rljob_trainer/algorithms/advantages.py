"""Advantages from one scalar reward per sequence.

Shapes: B sequences, G groups (all responses to one prompt are one group).

Each estimator is one function of `(rewards_B, groups_B)`. They run once per step on the controller, which sees the
whole batch, so the groups are complete whatever the number of workers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

STD_EPSILON = 1e-6


def group_relative_advantages(rewards_B: Tensor, groups_B: Tensor, *, normalize_by_std: bool = True) -> Tensor:
    """A = (r - mean of the group) / (std of the group + 1e-6), the same for every token of a sequence.

    Source: GRPO, Shao et al. 2024, arXiv 2402.03300, section 4.1.2; without the division, Dr.GRPO, Liu et al. 2025,
    arXiv 2503.20783. The standard deviation is the unbiased one. A group of one has no baseline: mean 0 and std 1
    are used, A = r / (1 + 1e-6). Group ids are any integers. Returns [B] in the dtype of `rewards_B`.
    """
    groups = _group_statistics(rewards_B, groups_B)
    singleton_B = groups.sizes_G[groups.index_B] == 1
    centered_B = groups.rewards_B - torch.where(singleton_B, 0.0, groups.means_G[groups.index_B])
    if not normalize_by_std:
        return centered_B.to(rewards_B.dtype)
    std_B = torch.where(singleton_B, 1.0, groups.stds_G[groups.index_B])
    return (centered_B / (std_B + STD_EPSILON)).to(rewards_B.dtype)


def zero_variance_mask(rewards_B: Tensor, groups_B: Tensor) -> Tensor:
    """True [B] where a sequence belongs to a group of two or more whose rewards are all exactly equal.

    Such a group's advantages are all 0: it carries no gradient, but it does count in the denominators of the loss
    unless it is left out (DAPO, Yu et al. 2025, arXiv 2503.14476, section 3.2, samples until none is left).
    """
    index_B, sizes_G = _index_groups(rewards_B, groups_B)
    lowest_G = rewards_B.new_zeros(len(sizes_G)).scatter_reduce(0, index_B, rewards_B, "amin", include_self=False)
    highest_G = rewards_B.new_zeros(len(sizes_G)).scatter_reduce(0, index_B, rewards_B, "amax", include_self=False)
    return ((lowest_G == highest_G) & (sizes_G > 1))[index_B]


@dataclass(frozen=True)
class _GroupStatistics:
    rewards_B: Tensor
    index_B: Tensor
    sizes_G: Tensor
    means_G: Tensor
    stds_G: Tensor
    """Unbiased; 0 for groups of one."""


def _group_statistics(rewards_B: Tensor, groups_B: Tensor) -> _GroupStatistics:
    # In 64 bits: with 32, rewards that are all 0.1 leave a rounding residue that the small std blows up.
    index_B, sizes_G = _index_groups(rewards_B, groups_B)
    wide_B = rewards_B.double()
    means_G = wide_B.new_zeros(len(sizes_G)).index_add(0, index_B, wide_B) / sizes_G
    squares_B = (wide_B - means_G[index_B]).square()
    sums_G = wide_B.new_zeros(len(sizes_G)).index_add(0, index_B, squares_B)
    stds_G = (sums_G / (sizes_G - 1).clamp(min=1)).sqrt()
    return _GroupStatistics(wide_B, index_B, sizes_G, means_G, stds_G)


def _index_groups(rewards_B: Tensor, groups_B: Tensor) -> tuple[Tensor, Tensor]:
    if rewards_B.dim() != 1 or rewards_B.shape != groups_B.shape:
        raise ValueError(
            f"rewards and groups must be vectors of one length (got {list(rewards_B.shape)} and "
            f"{list(groups_B.shape)}); pass one reward and one group id per sequence"
        )
    _, index_B, sizes_G = torch.unique(groups_B, return_inverse=True, return_counts=True)
    return index_B, sizes_G
