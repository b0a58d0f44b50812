"""Advantages computed from one reward per response; all tokens of a response share its advantage.

Legend: B responses, G groups (all responses to one prompt are one group).

Each function runs once per step on the controller. The controller has the whole batch, so groups are complete for any
number of workers. Group ids are arbitrary integers. The advantages are [B] in the dtype of the rewards. Means and
standard deviations are computed in float64: in float32 the mean of rewards that are all 0.1 has a rounding error, and
the division by the tiny standard deviation would magnify it. A group of one has no baseline: its mean is taken as 0 and
its standard deviation as 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rljob_api.v1alpha1.advantage import GroupRelative, GroupRelativePassAtK
from rljob_api.v1alpha1.recipes import resolved_value
from rljob_trainer.algorithms.interfaces import ResponseInputs
from rljob_trainer.algorithms.whitening import whitened_responses

STD_EPSILON = 1e-6
"""Added to a standard deviation before a division."""


def group_relative_advantages(inputs: ResponseInputs, settings: GroupRelative) -> Tensor:
    """GRPO: A = (r - mean of the group) / (std of the group + 1e-6).

    Source: GRPO, Shao et al. 2024, arXiv 2402.03300, section 4.1.2; without the division, Dr.GRPO, Liu et al. 2025,
    arXiv 2503.20783. The standard deviation is unbiased (n - 1). When to use: the default for several responses per
    prompt; without the division if groups with nearly equal rewards should not get large advantages.
    """
    return _group_relative(inputs.rewards_B, inputs.groups_B, by_std=resolved_value(settings.normalize_by_std))


def pass_at_k_advantages(inputs: ResponseInputs, settings: GroupRelativePassAtK) -> Tensor:
    """Pass@k: A = (best reward of the group - second best) / (std of the group + 1e-6) for the best response, 0 for the
    others. If several responses are best, all get 0.

    Source: Tang et al. 2025, arXiv 2503.19595, the leave-one-out form of pass@k: A is what the response adds to the
    best of k. The division is verl's. In a group of one the second best reward is taken as 0. When to use: to train for
    the best of k attempts instead of the mean reward.
    """
    groups = _Groups.of(inputs.rewards_B, inputs.groups_B)
    wide_B = inputs.rewards_B.double()
    order_B = wide_B.argsort(descending=True, stable=True)
    # Sorted by group, and within a group by descending reward.
    order_B = order_B[groups.index_B[order_B].argsort(stable=True)]
    starts_G = groups.sizes_G.cumsum(0) - groups.sizes_G
    best_G = order_B[starts_G]
    second_G = order_B[(starts_G + 1).clamp_(max=len(order_B) - 1)]
    gains_G = wide_B[best_G] - wide_B[second_G].masked_fill_(groups.is_single_G, 0.0)
    if settings.normalize_by_std:
        gains_G /= groups.stds(groups.centered(wide_B)) + STD_EPSILON
    return torch.zeros_like(wide_B).index_copy_(0, best_G, gains_G).to(inputs.rewards_B.dtype)


def gdpo_advantages(inputs: ResponseInputs) -> Tensor:
    """GDPO: A = whitened(sum over rewards of weight x GRPO advantage by that reward alone).

    Source: GDPO, arXiv 2601.05242. Whitened over the tokens of the batch as in verl, so a long response counts more in
    the whitening. A response that is not trained on counts only in the statistics of its group. Needs NAMED_REWARDS.
    When to use: several rewards of different scale, because each is normalized before the sum.
    """
    assert inputs.named_rewards, "GDPO: no named rewards"
    summed_B = torch.zeros_like(inputs.rewards_B, dtype=torch.float64)
    for name, rewards_B in inputs.named_rewards.items():
        summed_B += inputs.reward_weights[name] * _group_relative(rewards_B.double(), inputs.groups_B, by_std=True)
    return whitened_responses(summed_B, inputs.trained_lengths_B).to(inputs.rewards_B.dtype)


def leave_one_out_advantages(inputs: ResponseInputs) -> Tensor:
    """RLOO: A = r - mean of the other rewards of the group = (r - mean) n / (n - 1).

    Source: RLOO, Ahmadian et al. 2024, arXiv 2402.14740, section 3.2. In a group of one A is the reward, as in verl's
    `rloo` (its `rloo_vectorized` returns 0). When to use: an unbiased baseline without dividing by the group's standard
    deviation.
    """
    rewards_B = inputs.rewards_B
    groups = _Groups.of(rewards_B, inputs.groups_B)
    others_G = (groups.sizes_G - 1).clamp(min=1)
    return (groups.centered(rewards_B.double()) * groups.spread(groups.sizes_G / others_G)).to(rewards_B.dtype)


def reinforce_plus_plus_baseline_advantages(inputs: ResponseInputs) -> Tensor:
    """REINFORCE++ with a baseline: A = whitened(r - mean of the group), over the batch's tokens that are trained on.

    Source: Hu 2025, arXiv 2501.03262. When to use: small groups, because the standard deviation of the batch is more
    stable than that of a small group.
    """
    centered_B = _Groups.of(inputs.rewards_B, inputs.groups_B).centered(inputs.rewards_B.double())
    return whitened_responses(centered_B, inputs.trained_lengths_B).to(inputs.rewards_B.dtype)


def remax_advantages(inputs: ResponseInputs) -> Tensor:
    """ReMax: A = r - reward of the greedy response to the same prompt.

    Source: ReMax, Li et al. 2023, arXiv 2310.10505, algorithm 1. Needs GREEDY_REWARDS. When to use: one response per
    prompt; costs one more greedy response per prompt.
    """
    assert inputs.greedy_rewards_B is not None, "ReMax: no greedy rewards"
    return inputs.rewards_B - inputs.greedy_rewards_B


def opo_advantages(inputs: ResponseInputs) -> Tensor:
    """OPO: A = r - (mean of the group's rewards, weighted by response length).

    Source: OPO, Hao et al. 2025, arXiv 2505.23585: the baseline with the least variance if the squared norm of a
    response's gradient is proportional to its length. When to use: strictly on-policy training with responses of very
    different lengths.
    """
    rewards_B, lengths_B = inputs.rewards_B, inputs.lengths_B
    groups = _Groups.of(rewards_B, inputs.groups_B)
    wide_B = rewards_B.double()
    baselines_G = groups.sum(wide_B * lengths_B) / groups.sum(lengths_B.double()).clamp_(min=1)
    return (wide_B - groups.spread(baselines_G.masked_fill_(groups.is_single_G, 0.0))).to(rewards_B.dtype)


def gpg_advantages(inputs: ResponseInputs) -> Tensor:
    """GPG: A = alpha (r - mean of the group), alpha = responses / responses in groups whose rewards are not all equal.

    Source: GPG, Chu et al. 2025, arXiv 2504.02546. Alpha compensates for responses that count in the loss's denominator
    but have no gradient. A group of one counts as having a gradient. verl's alpha is responses / responses with a
    reward other than 0. So verl treats failures in mixed groups as if they had no gradient, and groups that are all
    correct as if they had a gradient. When to use: together with the GPG loss, one update per step.
    """
    rewards_B, groups_B = inputs.rewards_B, inputs.groups_B
    has_gradient_B = ~zero_variance_mask(rewards_B, groups_B)
    alpha = len(rewards_B) / has_gradient_B.sum().clamp(min=1)
    return (alpha * _Groups.of(rewards_B, groups_B).centered(rewards_B.double())).to(rewards_B.dtype)


def zero_variance_mask(rewards_B: Tensor, groups_B: Tensor) -> Tensor:
    """[B]: True for responses in a group of two or more whose rewards are all exactly equal.

    An advantage that compares the responses of a group is 0 for all of them, before any whitening. Then the group
    contributes no gradient, but counts in the denominators of the loss unless it is filtered out (dynamic sampling:
    DAPO, Yu et al. 2025, arXiv 2503.14476, section 3.2).
    """
    groups = _Groups.of(rewards_B, groups_B)
    lowest_G, highest_G = (groups.extreme(rewards_B, which) for which in ("amin", "amax"))
    return groups.spread((lowest_G == highest_G) & ~groups.is_single_G)


def _group_relative(rewards_B: Tensor, groups_B: Tensor, *, by_std: bool) -> Tensor:
    groups = _Groups.of(rewards_B, groups_B)
    centered_B = groups.centered(rewards_B.double())
    if by_std:
        centered_B.div_(groups.spread(groups.stds(centered_B).add_(STD_EPSILON)))
    return centered_B.to(rewards_B.dtype)


@dataclass(frozen=True)
class _Groups:
    """Which response is in which group, with operations on the values of each group."""

    index_B: Tensor
    """The index of each response's group in the [G] tensors, from 0."""
    sizes_G: Tensor
    is_single_G: Tensor

    @staticmethod
    def of(rewards_B: Tensor, groups_B: Tensor) -> _Groups:
        if rewards_B.dim() != 1 or rewards_B.shape != groups_B.shape:
            raise ValueError(
                f"rewards and groups must be vectors of the same length (got {list(rewards_B.shape)} and "
                f"{list(groups_B.shape)}); pass one reward and one group id per response"
            )
        _, index_B, sizes_G = torch.unique(groups_B, return_inverse=True, return_counts=True)
        return _Groups(index_B, sizes_G, sizes_G == 1)

    def sum(self, values_B: Tensor) -> Tensor:
        """[G]: the sum over each group."""
        return values_B.new_zeros(len(self.sizes_G)).index_add_(0, self.index_B, values_B)

    def extreme(self, values_B: Tensor, which: str) -> Tensor:
        """[G]: the smallest or largest value of each group, by `which`: "amin" or "amax"."""
        return values_B.new_zeros(len(self.sizes_G)).scatter_reduce(
            0, self.index_B, values_B, which, include_self=False
        )

    def spread(self, values_G: Tensor) -> Tensor:
        """[B]: for each response the value of its group."""
        return values_G.index_select(0, self.index_B)

    def centered(self, values_B: Tensor) -> Tensor:
        """[B]: the values minus the mean of their group."""
        return values_B - self.spread(self.sum(values_B).div_(self.sizes_G).masked_fill_(self.is_single_G, 0.0))

    def stds(self, centered_B: Tensor) -> Tensor:
        """[G]: the unbiased standard deviation of each group, from values minus their mean."""
        variances_G = self.sum(centered_B.square()).div_((self.sizes_G - 1).clamp(min=1))
        return variances_G.sqrt_().masked_fill_(self.is_single_G, 1.0)
