"""Formulas of advantages on tokens. They run on the workers, each with its own rows, and learn through `Reduce` what
they have to know of the others'.

The reward of a response stands at its last token, and the KL penalty of each token is taken off there. A response
without any token has no place for its reward.

Legend: N response tokens of this worker, L rows with at least one token, G groups, T token positions of the longest
response of all workers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rljob_api.v1alpha1.advantage import Gae, OptimalTokenBaseline, ReinforcePlusPlus
from rljob_trainer.algorithms.discounted_sums import discounted_sums, last_positions
from rljob_trainer.algorithms.interfaces import (
    KL_PENALTIES,
    OLD_LOGPROBS,
    SQUARES,
    VALUES,
    Reduce,
    TokenAdvantages,
    TokenInputs,
)
from rljob_trainer.algorithms.segments import Segments
from rljob_trainer.algorithms.whitening import whitened

WEIGHT_EPSILON = 1e-8
"""Added to each weight of a baseline: where all are 0, and next to that, the baseline is the mean."""


def generalized_advantages(inputs: TokenInputs, reduce: Reduce, settings: Gae) -> TokenAdvantages:
    """delta_t = r_t + gamma V_{t+1} - V_t and A_t = delta_t + gamma lambda A_{t+1}, with V and A of 0 after the last
    token; advantages are whitened over all workers, returns are A + V before that. Needs VALUES and KL_PENALTIES.

    Source: GAE, Schulman et al. 2015, arXiv 1506.02438, equations 11 and 16.
    """
    values_N, segments = inputs.columns[VALUES], inputs.segments
    next_values_N = values_N.roll(-1).index_fill(0, last_positions(segments), 0.0)
    deltas_N = settings.gamma * next_values_N - values_N + _token_rewards(inputs)
    advantages_N = discounted_sums(deltas_N, segments, settings.gamma * settings.lambda_)
    return TokenAdvantages(whitened(advantages_N, reduce), advantages_N + values_N)


def reinforce_plus_plus_advantages(inputs: TokenInputs, reduce: Reduce, settings: ReinforcePlusPlus) -> TokenAdvantages:
    """A_t = the discounted sum of the rewards from t on, whitened over all workers. Needs KL_PENALTIES.

    Source: REINFORCE++, Hu 2025, arXiv 2501.03262, section 3 (the KL of each token in its reward, and normalization
    over the global batch).
    """
    return TokenAdvantages(whitened(discounted_returns(inputs, gamma=settings.gamma), reduce))


def discounted_returns(inputs: TokenInputs, *, gamma: float) -> Tensor:
    """[N]: the rewards from each token on. Needs KL_PENALTIES."""
    return discounted_sums(_token_rewards(inputs), inputs.segments, gamma)


def optimal_token_baseline_advantages(
    inputs: TokenInputs, reduce: Reduce, settings: OptimalTokenBaseline
) -> TokenAdvantages:
    """A_t = G_t - sum of G_t W_t / sum of W_t over those responses of the group that have a token t, where G_t are the
    rewards from t on, and W_t is the sum up to t of 1 - 2 p + (sum of the squares of all probabilities), with p the
    token's own. Needs OLD_LOGPROBS, SQUARES and KL_PENALTIES. Group ids are from 0 on, without large gaps.

    W stands for the square of the gradient's length on the way to t. Source: Li et al. 2026, arXiv 2602.07078; the
    tail is verl's: where a single response of its group is left, its own return would be its baseline, and with
    `zeroTail` there is none. A group with a single response has none, either way. Positions count response tokens
    alone, as in verl's `tir_optimal_token_baseline`. Unlike verl's, W is never below 0, where 1 - 2 p + p^2 rounds to
    that, and 1e-8 is added to each W rather than to their sum.

    The sums over groups are dense: each worker has 24 bytes for each of G x T, and they are added up once over all
    workers (100 MB for 1,024 groups and 4,096 positions). Raises ValueError for a negative group id.
    """
    segments = inputs.segments
    returns_N = discounted_returns(inputs, gamma=1.0).double()
    probabilities_N = inputs.columns[OLD_LOGPROBS].double().exp()
    energies_N = (1 - 2 * probabilities_N + inputs.columns[SQUARES].double()).clamp_(min=0.0)
    weights_N = _sums_so_far(energies_N, segments).add_(WEIGHT_EPSILON)
    groups_N, positions_N = segments.spread(inputs.groups_B), segments.positions_N
    if len(groups_N) and int(inputs.groups_B.min()) < 0:
        raise ValueError(f"groups: ids must be from 0 on (got {int(inputs.groups_B.min())}); number the prompts")
    sizes = torch.stack([each.max() + 1 if len(each) else each.new_zeros(()) for each in (groups_N, positions_N)])
    num_groups, num_positions = reduce.max(sizes).tolist()
    cells_N = groups_N * num_positions + positions_N
    of_cells = weights_N.new_zeros(3, num_groups * num_positions)
    for sums, each_N in zip(of_cells, (returns_N * weights_N, weights_N, torch.ones_like(weights_N)), strict=True):
        sums.index_add_(0, cells_N, each_N)
    weighted_N, total_N, num_rows_N = reduce.sum(of_cells).index_select(1, cells_N)
    has_baseline_N = num_rows_N > 1
    if not settings.zero_tail:
        has_baseline_N = _first_of_row(num_rows_N, segments) > 1
    baselines_N = (weighted_N / total_N).where(has_baseline_N, 0.0)
    return TokenAdvantages((returns_N - baselines_N).to(inputs.columns[OLD_LOGPROBS].dtype))


def _token_rewards(inputs: TokenInputs) -> Tensor:
    """[N]: the reward of the response at its last token, less each token's KL penalty."""
    penalties_N, lengths_B = inputs.columns[KL_PENALTIES], inputs.segments.lengths_B
    rewards_L = inputs.rewards_B[lengths_B > 0].to(penalties_N.dtype)
    return (-penalties_N).index_add(0, last_positions(inputs.segments), rewards_L)


def _sums_so_far(values_N: Tensor, segments: Segments) -> Tensor:
    """[N]: over the values of the row up to each, itself included."""
    backwards = Segments.of(segments.lengths[::-1], values_N.device)
    return discounted_sums(values_N.flip(0), backwards, 1.0).flip(0)


def _first_of_row(values_N: Tensor, segments: Segments) -> Tensor:
    """[N]: to each value the first of its row."""
    places_N = torch.arange(len(values_N), device=values_N.device)
    return values_N[places_N - segments.positions_N]
