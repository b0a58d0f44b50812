"""Policy losses that treat each token separately.

`sequence_losses` has losses of whole responses, `covariance_losses` those that need statistics of the mini-batch, and
`aggregation` reduces losses to a scalar. Each loss is written as in its paper; autograd computes the gradient with
respect to `logprobs_N`, and what the paper treats as a constant is detached.

In the formulas A is the advantage, r = exp(logprob - old logprob) the ratio, and `low` and `high` are the clip bounds
`clipRatioLow` and `clipRatioHigh`. Log-ratios are clamped to +-20, beyond which no gradient flows, unless a function
says otherwise.

Legend: N response tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rljob_api.v1alpha1.policy_loss import NO_DUAL_CLIP, Cispo, Clipped, Divergence, Dppo, Dro, Sapo
from rljob_api.v1alpha1.recipes import resolved_value
from rljob_trainer.algorithms.interfaces import LossInputs, TokenLosses
from rljob_trainer.algorithms.kl import MAX_LOG_RATIO

CLIPPED_SUM = "pg_clipfrac"
"""The number of tokens whose ratio is outside the trust region in the direction that the advantage pushes (CISPO: in
any direction)."""
DUAL_CLIPPED_SUM = "pg_clipfrac_lower"
"""The number of tokens with a negative advantage whose loss was limited by the dual clip."""
KL_SUM = "ppo_kl"
"""The sum of old minus new log-probability: the K1 estimate of KL(old policy || policy)."""
BOUNDED_SUM = "pg_ratio_bounded"
"""The number of tokens whose ratio, used as a weight, was limited to its maximum."""

REST_EPSILON = 1e-8
"""Added to 1 - p before a division or logarithm, because 1 - p may be 0."""


def clipped_surrogate(inputs: LossInputs, settings: Clipped) -> TokenLosses:
    """PPO: max(-A r, -A clip(r, 1 - low, 1 + high)), [N].

    Source: Schulman et al. 2017, arXiv 1707.06347, equation 7; separate bounds: DAPO, arXiv 2503.14476, section 3.1.
    Dual clip: if A < 0 the loss is at most -A `dualClipRatio` (Ye et al. 2019, arXiv 1912.09729, equation 5);
    `dualClipRatio: 0` turns this off. When to use: the default.
    """
    advantages_N = inputs.advantages_N
    log_ratio_N = clamped_log_ratio(inputs)
    low, high, dual = map(resolved_value, (settings.clip_ratio_low, settings.clip_ratio_high, settings.dual_clip_ratio))
    losses_N, is_clipped_N = clipped_losses(log_ratio_N.exp(), advantages_N, low, high)
    sums = {CLIPPED_SUM: is_clipped_N.sum(), KL_SUM: -log_ratio_N.detach().sum()}
    if dual == NO_DUAL_CLIP:
        return TokenLosses(losses_N, {**sums, DUAL_CLIPPED_SUM: is_clipped_N.new_zeros((), dtype=torch.int64)})
    bounds_N = -advantages_N * dual
    is_bounded_N = (advantages_N < 0) & (losses_N > bounds_N)
    return TokenLosses(bounds_N.where(is_bounded_N, losses_N), {**sums, DUAL_CLIPPED_SUM: is_bounded_N.sum()})


def clipped_losses(ratio_N: Tensor, advantages_N: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """max(-A r, -A clip(r, 1 - low, 1 + high)), and whether the second (clipped) term is the larger, [N] each."""
    unclipped_N = -advantages_N * ratio_N
    clipped_N = -advantages_N * ratio_N.clamp(1.0 - low, 1.0 + high)
    # Not torch.maximum: for equal terms it would give half of the gradient to the clipped term, which has none.
    is_clipped_N = clipped_N > unclipped_N
    return clipped_N.where(is_clipped_N, unclipped_N), is_clipped_N


def clipped_weight(inputs: LossInputs, settings: Cispo) -> TokenLosses:
    """CISPO: -w A logprob with the constant w = clip(r, 1 - low, 1 + high), [N].

    Source: MiniMax 2025, arXiv 2506.13585, equations 4 and 5. A ratio is positive, so `clipRatioLow` of 1 or more means
    no lower bound. Every token has a gradient, also beyond log-ratios of +-20. When to use: long reasoning, where PPO's
    clip would remove the gradient of rare tokens that change the line of thought.
    """
    log_ratio_N = clamped_log_ratio(inputs).detach()
    ratio_N = log_ratio_N.exp()
    weights_N = ratio_N.clamp(1.0 - settings.clip_ratio_low, 1.0 + settings.clip_ratio_high)
    sums = {CLIPPED_SUM: (ratio_N != weights_N).sum(), KL_SUM: -log_ratio_N.sum()}
    return TokenLosses(-weights_N * inputs.advantages_N * inputs.logprobs_N, sums)


def policy_gradient(inputs: LossInputs) -> TokenLosses:
    """GPG, REINFORCE: -A logprob, [N]. Nothing is clamped; the old log-probabilities are used for metrics only.

    Source: objective of GPG, Chu et al. 2025, arXiv 2504.02546; REINFORCE, Williams 1992. When to use: one update per
    step, because there is no trust region.
    """
    kl_sum = (inputs.old_logprobs_N - inputs.logprobs_N.detach()).sum()
    return TokenLosses(-inputs.advantages_N * inputs.logprobs_N, {KL_SUM: kl_sum})


def soft_gate(inputs: LossInputs, settings: Sapo) -> TokenLosses:
    """SAPO: -(4 / t) sigmoid(t (r - 1)) A, [N]; t is `temperaturePositive` if A > 0, otherwise `temperatureNegative`.

    Source: objective and gate of SAPO, Gao et al. 2025, arXiv 2511.20347. At r = 1 the gradient is the policy
    gradient; away from it the gradient decreases smoothly where PPO cuts it off. When to use: if hard clipping makes
    training unstable, for example with mixtures of experts.
    """
    log_ratio_N = clamped_log_ratio(inputs)
    temperatures_N = by_sign(inputs.advantages_N, settings.temperature_positive, settings.temperature_negative)
    gates_N = torch.sigmoid(temperatures_N * (log_ratio_N.exp() - 1.0))
    losses_N = -4.0 / temperatures_N * gates_N * inputs.advantages_N
    return TokenLosses(losses_N, {KL_SUM: -log_ratio_N.detach().sum()})


def within_divergence(inputs: LossInputs, settings: Dppo) -> TokenLosses:
    """DPPO: -w A logprob with the constant w = min(r, `maxRatio`), [N]; w = 0 for tokens whose probability p has left
    the trust region in the direction that A pushes.

    Source: mask and binary approximations of DPPO, Qi et al. 2026, arXiv 2602.04879. With the old probability q, the
    divergence is TV = |p - q| or KL = q log(q / p) + (1 - q) log((1 - q) / (1 - p)). A token is masked if A > 0, p > q
    and the divergence exceeds `thresholdHigh`, or if A < 0, p < q and it exceeds `thresholdLow`. When to use: large
    vocabularies, whose rare tokens have large ratios although their probability has hardly changed.
    """
    advantages_N = inputs.advantages_N
    log_ratio_N = clamped_log_ratio(inputs).detach()
    new_N, old_N = inputs.logprobs_N.detach().exp(), inputs.old_logprobs_N.exp()
    pushed_N = advantages_N.sign() * (new_N - old_N)
    thresholds_N = by_sign(
        advantages_N, resolved_value(settings.threshold_high), resolved_value(settings.threshold_low)
    )
    match settings.divergence:
        case Divergence.TV:
            is_out_N = pushed_N > thresholds_N
        case Divergence.KL:
            # Rounding may make a probability larger than 1.
            rest_N, old_rest_N = ((1.0 - each_N).clamp(min=0.0) for each_N in (new_N, old_N))
            kl_of_rest_N = old_rest_N * ((old_rest_N + REST_EPSILON) / (rest_N + REST_EPSILON)).log()
            is_out_N = (pushed_N > 0) & (kl_of_rest_N - old_N * log_ratio_N > thresholds_N)
    ratio_N = log_ratio_N.exp()
    weights_N = ratio_N.clamp(max=settings.max_ratio).masked_fill(is_out_N, 0.0)
    sums = {
        CLIPPED_SUM: is_out_N.sum(),
        BOUNDED_SUM: ((ratio_N > settings.max_ratio) & ~is_out_N).sum(),
        KL_SUM: -log_ratio_N.sum(),
    }
    return TokenLosses(-weights_N * advantages_N * inputs.logprobs_N, sums)


def quadratic_penalty(inputs: LossInputs, settings: Dro) -> TokenLosses:
    """DRO: -A logprob + beta / 2 (logprob - old logprob)^2, [N]. Log-ratios are not clamped.

    Source: policy objective of DRO, Richemond et al. 2024, arXiv 2405.19107. The paper's squared error
    (reward - V - beta log-ratio)^2 / 2 has beta times this gradient, with A = reward - V. When to use: off-policy
    responses that are many updates old.
    """
    log_ratio_N = inputs.logprobs_N - inputs.old_logprobs_N
    losses_N = -inputs.advantages_N * inputs.logprobs_N + settings.beta / 2 * log_ratio_N.square()
    return TokenLosses(losses_N, {KL_SUM: -log_ratio_N.detach().sum()})


def clamped_log_ratio(inputs: LossInputs) -> Tensor:
    """[N]: logprob - old logprob, clamped to +-20."""
    return (inputs.logprobs_N - inputs.old_logprobs_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def by_sign(advantages_N: Tensor, positive: float, otherwise: float) -> Tensor:
    """[N]: `positive` for tokens with A > 0, `otherwise` for the rest."""
    return torch.full_like(advantages_N, otherwise).masked_fill(advantages_N > 0, positive)
