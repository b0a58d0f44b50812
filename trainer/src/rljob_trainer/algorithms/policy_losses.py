"""Policy losses of a token by itself. Aggregation to one number is `aggregation`'s work; losses of whole responses are
in `sequence_losses`, those that ask for statistics of the mini-batch in `covariance_losses`.

All are differentiable in `logprobs_N`, once. Log-ratios, logprob - old logprob, are held within +-20, and no gradient
flows beyond, unless a function says otherwise.

Legend: N response tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rljob_api.v1alpha1.policy_loss import Divergence
from rljob_trainer.algorithms.interfaces import TokenLosses
from rljob_trainer.algorithms.slopes import with_slopes

MAX_LOG_RATIO = 20.0

CLIPPED_SUM = "pg_clipfrac"
"""Tokens whose ratio is out of the trust region in the direction that the advantage pushes."""
DUAL_CLIPPED_SUM = "pg_clipfrac_lower"
"""Tokens with a negative advantage whose loss met the dual clip's bound."""
KL_SUM = "ppo_kl"
"""Old less new log-probability: K1 estimate of KL(old policy || policy)."""
BOUNDED_SUM = "pg_ratio_bounded"
"""Tokens whose ratio, as a weight, met its bound."""

LEAST_REST = 1e-8
"""Added to the probability of all other tokens, which may be 0."""


def clipped_surrogate(
    logprobs_N: Tensor,
    old_logprobs_N: Tensor,
    advantages_N: Tensor,
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
    dual_clip_ratio: float | None,
) -> TokenLosses:
    """max(-A ratio, -A clip(ratio, 1 - low, 1 + high)) with ratio = exp(logprob - old logprob), [N].

    Source: PPO, Schulman et al. 2017, arXiv 1707.06347, equation 7; separate bounds: DAPO, arXiv 2503.14476,
    section 3.1. Dual clip: where A < 0 the loss is at most -A `dual_clip_ratio` (Ye et al. 2019, arXiv 1912.09729,
    equation 5); None for none.

    The derivative is -A ratio, which is the loss itself, where no bound was met, else 0.
    """
    with torch.no_grad():
        log_ratio_N = logprobs_N - old_logprobs_N
        held_N = log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        flows_N = log_ratio_N.eq_(held_N)
        kl_sum = -held_N.sum(dtype=torch.float64)
        ratio_N = held_N.exp_()
        costs_N = -advantages_N.to(ratio_N.dtype)
        unclipped_N = costs_N * ratio_N
        clipped_N = ratio_N.clamp_(1.0 - clip_ratio_low, 1.0 + clip_ratio_high).mul_(costs_N)
        losses_N = torch.maximum(unclipped_N, clipped_N)
        num_clipped = clipped_N.gt_(unclipped_N).sum()
        num_dual_clipped = num_clipped.new_zeros(())
        if dual_clip_ratio is not None:
            # 0 where A >= 0: the loss is at most 0 there, so that the bound leaves it alone.
            bounds_N = costs_N.clamp_(min=0.0).mul_(dual_clip_ratio)
            unbounded_N, losses_N = losses_N, torch.minimum(losses_N, bounds_N)
            num_dual_clipped = unbounded_N.gt_(bounds_N).sum()
        slopes_N = flows_N.mul_(unclipped_N.eq_(losses_N)).mul_(losses_N)
    sums = {CLIPPED_SUM: num_clipped, DUAL_CLIPPED_SUM: num_dual_clipped, KL_SUM: kl_sum}
    return TokenLosses(with_slopes(logprobs_N, losses_N, slopes_N), sums)


def clipped_weight(
    logprobs_N: Tensor,
    old_logprobs_N: Tensor,
    advantages_N: Tensor,
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
) -> TokenLosses:
    """-w A logprob with the number w = clip(ratio, 1 - low, 1 + high), [N].

    Source: CISPO, MiniMax 2025, arXiv 2506.13585, equations 4 and 5. A ratio is above 0, so `clip_ratio_low` from 1 on
    is no bound. The derivative is -w A for every token; beyond +-20, where w is a bound, too.
    """
    with torch.no_grad():
        held_N, kl_sum = _held_log_ratio(logprobs_N, old_logprobs_N)
        ratio_N = held_N.exp_()
        weights_N = ratio_N.clamp(1.0 - clip_ratio_low, 1.0 + clip_ratio_high)
        num_clipped = ratio_N.ne_(weights_N).sum()
        slopes_N = weights_N.mul_(advantages_N).neg_()
        losses_N = slopes_N * logprobs_N
    return TokenLosses(with_slopes(logprobs_N, losses_N, slopes_N), {CLIPPED_SUM: num_clipped, KL_SUM: kl_sum})


def policy_gradient(logprobs_N: Tensor, old_logprobs_N: Tensor, advantages_N: Tensor) -> TokenLosses:
    """-A logprob, [N]; nothing is held, and the old log-probabilities are for the metrics alone.

    Source: Chu et al. 2025, GPG, arXiv 2504.02546, its objective; REINFORCE, Williams 1992.
    """
    with torch.no_grad():
        kl_sum = old_logprobs_N.sum(dtype=torch.float64) - logprobs_N.sum(dtype=torch.float64)
        slopes_N = -advantages_N
        losses_N = slopes_N * logprobs_N
    return TokenLosses(with_slopes(logprobs_N, losses_N, slopes_N), {KL_SUM: kl_sum})


def soft_gate(
    logprobs_N: Tensor,
    old_logprobs_N: Tensor,
    advantages_N: Tensor,
    *,
    temperature_positive: float,
    temperature_negative: float,
) -> TokenLosses:
    """-(4 / t) sigmoid(t (ratio - 1)) A, where t is `temperature_positive` for A > 0, else `temperature_negative`, [N].

    Source: SAPO, Gao et al. 2025, arXiv 2511.20347, its objective and gate. The derivative is
    -4 sigmoid (1 - sigmoid) ratio A: the policy gradient's at ratio 1.
    """
    with torch.no_grad():
        held_N, kl_sum = _held_log_ratio(logprobs_N, old_logprobs_N)
        # The gate is shut long before 20: the slope is 0 there without being told.
        ratio_N = held_N.exp_()
        temperatures_N = by_sign(advantages_N, temperature_positive, temperature_negative)
        gates_N = ratio_N.sub(1.0).mul_(temperatures_N).sigmoid_()
        costs_N = advantages_N * -4.0
        slopes_N = ratio_N.mul_(gates_N).mul_(1.0 - gates_N).mul_(costs_N)
        losses_N = costs_N.mul_(gates_N).div_(temperatures_N)
    return TokenLosses(with_slopes(logprobs_N, losses_N, slopes_N), {KL_SUM: kl_sum})


def within_divergence(
    logprobs_N: Tensor,
    old_logprobs_N: Tensor,
    advantages_N: Tensor,
    *,
    divergence: Divergence,
    threshold_low: float,
    threshold_high: float,
    max_ratio: float,
) -> TokenLosses:
    """-w A logprob with the number w = min(ratio, `max_ratio`), and 0 for tokens whose probability p has left the trust
    region in the direction that A pushes, [N].

    Source: DPPO, Qi et al. 2026, arXiv 2602.04879, its mask and binary approximations. With the old
    probability q: TV is |p - q|, KL is q log(q / p) + (1 - q) log((1 - q) / (1 - p)). The threshold is
    `threshold_high` where A > 0, and p > q is out; else `threshold_low`, and p < q is.
    """
    with torch.no_grad():
        held_N, kl_sum = _held_log_ratio(logprobs_N, old_logprobs_N)
        new_N, old_N = logprobs_N.exp(), old_logprobs_N.exp()
        pushed_N = by_sign(advantages_N, 1.0, -1.0).mul_(new_N - old_N)
        thresholds_N = by_sign(advantages_N, threshold_high, threshold_low)
        match divergence:
            case Divergence.TV:
                is_out_N = pushed_N.gt_(thresholds_N)
            case Divergence.KL:
                distances_N = _binary_kl(logprobs_N, old_logprobs_N, old_N)
                is_out_N = pushed_N.gt_(0.0).mul_(distances_N.gt_(thresholds_N))
        ratio_N = held_N.exp_()
        weights_N = ratio_N.clamp(max=max_ratio)
        stays_N = 1.0 - is_out_N
        num_bounded = ratio_N.gt_(max_ratio).mul_(stays_N).sum()
        slopes_N = weights_N.mul_(stays_N).mul_(advantages_N).neg_()
        losses_N = slopes_N * logprobs_N
    sums = {CLIPPED_SUM: is_out_N.sum(), BOUNDED_SUM: num_bounded, KL_SUM: kl_sum}
    return TokenLosses(with_slopes(logprobs_N, losses_N, slopes_N), sums)


def quadratic_penalty(logprobs_N: Tensor, old_logprobs_N: Tensor, advantages_N: Tensor, *, beta: float) -> TokenLosses:
    """-A logprob + beta / 2 (logprob - old logprob)^2, [N]. Nothing is held: the penalty pulls from any distance.

    Source: DRO, Richemond et al. 2024, arXiv 2405.19107, its policy objective: the squared error
    (r - V - beta log-ratio)^2 / 2 has this gradient, times beta, with A = r - V.
    """
    with torch.no_grad():
        log_ratio_N = logprobs_N - old_logprobs_N
        kl_sum = -log_ratio_N.sum(dtype=torch.float64)
        pulls_N = log_ratio_N * beta
        losses_N = log_ratio_N.mul_(pulls_N).div_(2).addcmul_(advantages_N, logprobs_N, value=-1)
        slopes_N = pulls_N.sub_(advantages_N)
    return TokenLosses(with_slopes(logprobs_N, losses_N, slopes_N), {KL_SUM: kl_sum})


def by_sign(advantages_N: Tensor, positive: float, otherwise: float) -> Tensor:
    """[N], to be overwritten: `positive` where A > 0, else `otherwise`, both exact."""
    is_positive_N = advantages_N.clone().gt_(0.0)
    if otherwise == -positive:
        return is_positive_N.sub_(0.5).mul_(2.0 * positive)
    return is_positive_N * positive + (1.0 - is_positive_N) * otherwise


def _held_log_ratio(logprobs_N: Tensor, old_logprobs_N: Tensor) -> tuple[Tensor, Tensor]:
    """[N], to be overwritten, and KL_SUM."""
    held_N = (logprobs_N - old_logprobs_N).clamp_(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return held_N, -held_N.sum(dtype=torch.float64)


def _binary_kl(logprobs_N: Tensor, old_logprobs_N: Tensor, old_N: Tensor) -> Tensor:
    """[N], of the token against all others."""
    rest_N, old_rest_N = -torch.expm1(logprobs_N), -torch.expm1(old_logprobs_N)
    rests_N = ((old_rest_N + LEAST_REST) / (rest_N + LEAST_REST)).log_().mul_(old_rest_N)
    return rests_N.addcmul_(old_N, old_logprobs_N - logprobs_N)
