"""A user's advantage, once on responses and once on tokens: reward less a third of its group's and of the step's mean
reward, KL in the reward included. The step's mean is over what is learned from.

Legend: B responses, N response tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rljob_trainer.algorithms import Reduce, ResponseInputs, TokenInputs, token_advantage

RESPONSES_PATH = "rljob_testing.mixed_baseline:on_responses"
TOKENS_PATH = "rljob_testing.mixed_baseline:on_tokens"
MAX_GROUPS = 16


def on_responses(inputs: ResponseInputs) -> Tensor:
    """[B]."""
    group_means = [inputs.rewards_B[inputs.groups_B == group].mean() for group in inputs.groups_B]
    return inputs.rewards_B - (torch.stack(group_means) + inputs.rewards_B.mean()) / 3


@token_advantage(needs=["kl_penalties"])
def on_tokens(inputs: TokenInputs, reduce: Reduce) -> Tensor:
    """[N], whichever worker has the others of a group."""
    all_rewards_B = inputs.rewards_B - inputs.segments.sum(inputs.columns["kl_penalties"])
    rewards_G, counts_G = torch.zeros(2, MAX_GROUPS)
    rewards_G = reduce.sum(rewards_G.index_add(0, inputs.groups_B, all_rewards_B))
    counts_G = reduce.sum(counts_G.index_add(0, inputs.groups_B, torch.ones_like(all_rewards_B)))
    group_means_B = (rewards_G / counts_G.clamp(min=1))[inputs.groups_B]
    mean = rewards_G.sum() / counts_G.sum().clamp(min=1)
    return inputs.segments.spread(all_rewards_B - (group_means_B + mean) / 3)
