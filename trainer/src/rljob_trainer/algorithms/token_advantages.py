"""Advantages computed token by token. These functions run on the workers, each with its own rows; statistics over all
workers go through `Reduce`.

If a response has several rows, its tokens are those of its rows, one row after the other. So values of a critic, which
are those of the next token in the same row, cannot be used then (`TrainingStep` refuses them).

A response gets its reward at its last token (distillation ignores rewards), and each token's KL penalty is subtracted
at that token. The reward of a response without tokens is ignored.

Legend: N response tokens of this worker, F rows with at least one token (filled rows), G groups, P token positions of
the longest response of all workers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rljob_api.v1alpha1.advantage import Gae, OptimalTokenBaseline, ReinforcePlusPlus
from rljob_trainer.algorithms.discounted_sums import discounted_sums, last_positions
from rljob_trainer.algorithms.interfaces import (
    KL_PENALTIES,
    OLD_LOGPROBS,
    REF_LOGPROBS,
    SQUARES,
    VALUES,
    Reduce,
    TokenAdvantages,
    TokenInputs,
)
from rljob_trainer.algorithms.segments import Segments
from rljob_trainer.algorithms.whitening import whitened

WEIGHT_EPSILON = 1e-8
"""Added to each weight of a baseline, so that the baseline is the mean if all weights are (nearly) 0."""


def generalized_advantages(inputs: TokenInputs, reduce: Reduce, settings: Gae) -> TokenAdvantages:
    """GAE: A_t = delta_t + gamma lambda A_{t+1} with delta_t = r_t + gamma V_{t+1} - V_t, whitened over all workers.

    V and A are 0 after the last token. The returns for the critic are A + V before whitening. Needs VALUES and
    KL_PENALTIES.

    Source: Schulman et al. 2015, arXiv 1506.02438, equations 11 and 16. When to use: PPO with a critic.
    """
    values_N, segments = inputs.columns[VALUES], inputs.segments
    next_values_N = values_N.roll(-1).index_fill(0, last_positions(segments), 0.0)
    deltas_N = settings.gamma * next_values_N - values_N + _token_rewards(inputs)
    advantages_N = discounted_sums(deltas_N, segments, settings.gamma * settings.lambda_)
    return TokenAdvantages(whitened(advantages_N, reduce), advantages_N + values_N)


def reinforce_plus_plus_advantages(inputs: TokenInputs, reduce: Reduce, settings: ReinforcePlusPlus) -> TokenAdvantages:
    """REINFORCE++: A_t = sum over s >= t of gamma^(s - t) r_s, whitened over all workers. Needs KL_PENALTIES.

    Source: Hu 2025, arXiv 2501.03262, section 3 (KL per token in the reward, and normalization over the global batch).
    When to use: one response per prompt without a critic.
    """
    return TokenAdvantages(whitened(discounted_returns(inputs, gamma=settings.gamma), reduce))


def discounted_returns(inputs: TokenInputs, *, gamma: float) -> Tensor:
    """[N]: the discounted sum of the rewards from each token on. Needs KL_PENALTIES."""
    return discounted_sums(_token_rewards(inputs), inputs.segments, gamma)


def optimal_token_baseline_advantages(
    inputs: TokenInputs, reduce: Reduce, settings: OptimalTokenBaseline
) -> TokenAdvantages:
    """OTB: A_t = R_t - (sum of W_t R_t) / (sum of W_t), with sums over those responses of the group that have a token
    t.

    R_t is the sum of the rewards from t on. W_t estimates the squared norm of the gradient up to t: the sum up to t of
    1 - 2 p + (sum of the squared probabilities of the vocabulary), with p the probability of the token itself.
    Positions count response tokens only, as in verl's `tir_optimal_token_baseline`. Needs OLD_LOGPROBS, SQUARES and
    KL_PENALTIES.

    Source: Li et al. 2026, arXiv 2602.07078. The tail is as in verl: if only one response of a group still has a token
    t, the baseline would be the response's own return, so with `zeroTail` there is no baseline. A group with a single
    response never has a baseline. Unlike in verl, W is never negative (1 - 2 p + p^2 may round below 0), and 1e-8 is
    added to each W, not to their sum. When to use: long responses whose tokens have very different gradients.

    The sums are dense, [3, G x P] in float64: each worker allocates 24 bytes per group and position and reduces them
    once over all workers (100 MB for 1,024 groups and 4,096 positions). Group ids must be numbered from 0 without large
    gaps; raises ValueError for a negative one.
    """
    segments = inputs.segments
    returns_N = discounted_returns(inputs, gamma=1.0).double()
    probabilities_N = inputs.columns[OLD_LOGPROBS].double().exp()
    energies_N = (1 - 2 * probabilities_N + inputs.columns[SQUARES].double()).clamp_(min=0.0)
    weights_N = _sums_so_far(energies_N, segments).add_(WEIGHT_EPSILON)
    groups_N, positions_N = segments.spread(inputs.groups_B), segments.positions_N
    if len(groups_N) and int(inputs.groups_B.min()) < 0:
        raise ValueError(
            f"groups: ids must be at least 0 (got {int(inputs.groups_B.min())}); number the prompts from 0"
        )
    sizes = torch.stack([each.max() + 1 if len(each) else each.new_zeros(()) for each in (groups_N, positions_N)])
    num_groups, num_positions = reduce.max(sizes).tolist()
    cells_N = groups_N * num_positions + positions_N
    sums_of_cells = weights_N.new_zeros(3, num_groups * num_positions)
    addends = (returns_N * weights_N, weights_N, torch.ones_like(weights_N))
    for sums, each_N in zip(sums_of_cells, addends, strict=True):
        sums.index_add_(0, cells_N, each_N)
    weighted_N, total_N, num_rows_N = reduce.sum(sums_of_cells).index_select(1, cells_N)
    has_baseline_N = num_rows_N > 1
    if not settings.zero_tail:
        has_baseline_N = _first_of_row(num_rows_N, segments) > 1
    baselines_N = (weighted_N / total_N).where(has_baseline_N, 0.0)
    return TokenAdvantages((returns_N - baselines_N).to(inputs.columns[OLD_LOGPROBS].dtype))


def distillation_advantages(inputs: TokenInputs, _reduce: Reduce) -> TokenAdvantages:
    """On-policy distillation: A_t = log p_teacher(t) - log p_policy(t) - KL penalty of t, for the sampled token t.

    The teacher is the reference, and p_policy the policy before the step's updates. -A_t is the K1 estimate of
    KL(policy || teacher) at t, so the policy gradient with A reduces this reverse KL. A token counts only its own
    difference and not those after it (discount 0), and A is not normalized: it is 0 where both models agree. Rewards
    and groups are not used. Needs OLD_LOGPROBS, REF_LOGPROBS and KL_PENALTIES.

    Source: Thinking Machines Lab 2025, "On-Policy Distillation"; the objective is GKD with the reverse KL and only
    student data, Agarwal et al. 2023, arXiv 2306.13649, and that of MiniLLM, Gu et al. 2023, arXiv 2306.08543, without
    its long-term part. When to use: a stronger model with the policy's tokenizer exists.
    """
    columns = inputs.columns
    return TokenAdvantages(columns[REF_LOGPROBS] - columns[OLD_LOGPROBS] - columns[KL_PENALTIES])


def _token_rewards(inputs: TokenInputs) -> Tensor:
    """[N]: the reward of the response at its last token (0 elsewhere) minus each token's KL penalty."""
    penalties_N, lengths_B = inputs.columns[KL_PENALTIES], inputs.segments.lengths_B
    rewards_F = inputs.rewards_B[lengths_B > 0].to(penalties_N.dtype)
    return (-penalties_N).index_add(0, last_positions(inputs.segments), rewards_F)


def _sums_so_far(values_N: Tensor, segments: Segments) -> Tensor:
    """[N]: the cumulative sum within each row."""
    backwards = Segments.of(segments.lengths[::-1], values_N.device)
    return discounted_sums(values_N.flip(0), backwards, 1.0).flip(0)


def _first_of_row(values_N: Tensor, segments: Segments) -> Tensor:
    """[N]: for each value the first value of its row."""
    indices_N = torch.arange(len(values_N), device=values_N.device)
    return values_N[indices_N - segments.positions_N]
