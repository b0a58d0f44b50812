"""Policy losses of a token by itself. Aggregation to one number is `aggregation`'s work; losses of whole responses are
in `sequence_losses`, those that ask for statistics of the mini-batch in `covariance_losses`.

A loss is written as its paper writes it, and autograd finds its gradient by `logprobs_N`; what a paper takes for a
number is detached. Log-ratios, logprob - old logprob, are held within +-20, and no gradient flows beyond, unless a
function says otherwise.

Legend: N response tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rljob_api.v1alpha1.policy_loss import NO_DUAL_CLIP, Cispo, Clipped, Divergence, Dppo, Dro, Sapo
from rljob_api.v1alpha1.recipes import filled
from rljob_trainer.algorithms.interfaces import LossInputs, TokenLosses
from rljob_trainer.algorithms.kl import MAX_LOG_RATIO

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


def clipped_surrogate(inputs: LossInputs, settings: Clipped) -> TokenLosses:
    """max(-A r, -A clip(r, 1 - low, 1 + high)) with r = exp(logprob - old logprob), [N].

    Source: PPO, Schulman et al. 2017, arXiv 1707.06347, equation 7; separate bounds: DAPO, arXiv 2503.14476,
    section 3.1. Dual clip: where A < 0 the loss is at most -A `dualClipRatio` (Ye et al. 2019, arXiv 1912.09729,
    equation 5); 0 for no such bound. The usual choice.
    """
    advantages_N = inputs.advantages_N
    log_ratio_N = held_log_ratio(inputs)
    low, high, dual = map(filled, (settings.clip_ratio_low, settings.clip_ratio_high, settings.dual_clip_ratio))
    losses_N, is_clipped_N = clipped_losses(log_ratio_N.exp(), advantages_N, low, high)
    sums = {CLIPPED_SUM: is_clipped_N.sum(), KL_SUM: -log_ratio_N.detach().sum()}
    if dual == NO_DUAL_CLIP:
        return TokenLosses(losses_N, {**sums, DUAL_CLIPPED_SUM: is_clipped_N.new_zeros((), dtype=torch.int64)})
    bounds_N = -advantages_N * dual
    is_bounded_N = (advantages_N < 0) & (losses_N > bounds_N)
    return TokenLosses(bounds_N.where(is_bounded_N, losses_N), {**sums, DUAL_CLIPPED_SUM: is_bounded_N.sum()})


def clipped_losses(ratio_N: Tensor, advantages_N: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """max(-A r, -A clip(r, 1 - low, 1 + high)), and where it is the second, [N] each."""
    unclipped_N = -advantages_N * ratio_N
    clipped_N = -advantages_N * ratio_N.clamp(1.0 - low, 1.0 + high)
    # Not torch.maximum: where both are equal it would halve the gradient of a ratio that rounding alone puts outside.
    is_clipped_N = clipped_N > unclipped_N
    return clipped_N.where(is_clipped_N, unclipped_N), is_clipped_N


def clipped_weight(inputs: LossInputs, settings: Cispo) -> TokenLosses:
    """-w A logprob with the number w = clip(r, 1 - low, 1 + high), [N].

    Source: CISPO, MiniMax 2025, arXiv 2506.13585, equations 4 and 5. A ratio is above 0, so `clipRatioLow` from 1 on
    is no bound. Every token has a gradient, beyond +-20, too: for the rare tokens that turn a line of thought.
    """
    log_ratio_N = held_log_ratio(inputs).detach()
    ratio_N = log_ratio_N.exp()
    weights_N = ratio_N.clamp(1.0 - settings.clip_ratio_low, 1.0 + settings.clip_ratio_high)
    sums = {CLIPPED_SUM: (ratio_N != weights_N).sum(), KL_SUM: -log_ratio_N.sum()}
    return TokenLosses(-weights_N * inputs.advantages_N * inputs.logprobs_N, sums)


def policy_gradient(inputs: LossInputs) -> TokenLosses:
    """-A logprob, [N]; nothing is held, and the old log-probabilities are for the metrics alone.

    Source: GPG, Chu et al. 2025, arXiv 2504.02546, its objective; REINFORCE, Williams 1992. For one update per step:
    there is no trust region.
    """
    kl_sum = (inputs.old_logprobs_N - inputs.logprobs_N.detach()).sum()
    return TokenLosses(-inputs.advantages_N * inputs.logprobs_N, {KL_SUM: kl_sum})


def soft_gate(inputs: LossInputs, settings: Sapo) -> TokenLosses:
    """-(4 / t) sigmoid(t (r - 1)) A, where t is `temperaturePositive` for A > 0, else `temperatureNegative`, [N].

    Source: SAPO, Gao et al. 2025, arXiv 2511.20347, its objective and gate: the policy gradient's slope at ratio 1,
    and a gate that closes smoothly where PPO cuts.
    """
    log_ratio_N = held_log_ratio(inputs)
    temperatures_N = by_sign(inputs.advantages_N, settings.temperature_positive, settings.temperature_negative)
    gates_N = torch.sigmoid(temperatures_N * (log_ratio_N.exp() - 1.0))
    losses_N = -4.0 / temperatures_N * gates_N * inputs.advantages_N
    return TokenLosses(losses_N, {KL_SUM: -log_ratio_N.detach().sum()})


def within_divergence(inputs: LossInputs, settings: Dppo) -> TokenLosses:
    """-w A logprob with the number w = min(r, `maxRatio`), and 0 for tokens whose probability p has left the trust
    region in the direction that A pushes, [N].

    Source: DPPO, Qi et al. 2026, arXiv 2602.04879, its mask and binary approximations. With the old
    probability q: TV is |p - q|, KL is q log(q / p) + (1 - q) log((1 - q) / (1 - p)). The threshold is
    `thresholdHigh` where A > 0, and p > q is out; `thresholdLow` where A < 0, and p < q is. For vocabularies with many
    rare tokens, whose ratios are large while nothing has moved.
    """
    advantages_N = inputs.advantages_N
    log_ratio_N = held_log_ratio(inputs).detach()
    new_N, old_N = inputs.logprobs_N.detach().exp(), inputs.old_logprobs_N.exp()
    pushed_N = advantages_N.sign() * (new_N - old_N)
    thresholds_N = by_sign(advantages_N, filled(settings.threshold_high), filled(settings.threshold_low))
    match settings.divergence:
        case Divergence.TV:
            is_out_N = pushed_N > thresholds_N
        case Divergence.KL:
            # Rounding may put a probability above 1.
            rest_N, old_rest_N = ((1.0 - each_N).clamp(min=0.0) for each_N in (new_N, old_N))
            of_rest_N = old_rest_N * ((old_rest_N + LEAST_REST) / (rest_N + LEAST_REST)).log()
            is_out_N = (pushed_N > 0) & (of_rest_N - old_N * log_ratio_N > thresholds_N)
    ratio_N = log_ratio_N.exp()
    weights_N = ratio_N.clamp(max=settings.max_ratio).masked_fill(is_out_N, 0.0)
    sums = {
        CLIPPED_SUM: is_out_N.sum(),
        BOUNDED_SUM: ((ratio_N > settings.max_ratio) & ~is_out_N).sum(),
        KL_SUM: -log_ratio_N.sum(),
    }
    return TokenLosses(-weights_N * advantages_N * inputs.logprobs_N, sums)


def quadratic_penalty(inputs: LossInputs, settings: Dro) -> TokenLosses:
    """-A logprob + beta / 2 (logprob - old logprob)^2, [N]. Nothing is held: the penalty pulls from any distance.

    Source: DRO, Richemond et al. 2024, arXiv 2405.19107, its policy objective: the squared error
    (r - V - beta log-ratio)^2 / 2 has this gradient, times beta, with A = r - V. For responses that are many updates
    old.
    """
    log_ratio_N = inputs.logprobs_N - inputs.old_logprobs_N
    losses_N = -inputs.advantages_N * inputs.logprobs_N + settings.beta / 2 * log_ratio_N.square()
    return TokenLosses(losses_N, {KL_SUM: -log_ratio_N.detach().sum()})


def held_log_ratio(inputs: LossInputs) -> Tensor:
    """[N]: logprob - old logprob, within +-20."""
    return (inputs.logprobs_N - inputs.old_logprobs_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def by_sign(advantages_N: Tensor, positive: float, otherwise: float) -> Tensor:
    """[N]: `positive` where A > 0, else `otherwise`."""
    return torch.full_like(advantages_N, otherwise).masked_fill(advantages_N > 0, positive)
