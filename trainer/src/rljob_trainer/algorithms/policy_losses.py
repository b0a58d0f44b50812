"""Policy losses of a token by itself. Aggregation to one number is `aggregation`'s work; losses of whole responses are
in `sequence_losses`, those that ask for statistics of the mini-batch in `covariance_losses`.

All are differentiable in `logprobs_N`, once. Log-ratios, logprob - old logprob, are held within +-20, and no gradient
flows beyond, unless a function says otherwise.

Legend: N response tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rljob_api.v1alpha1.policy_loss import NO_DUAL_CLIP, Cispo, Clipped, Divergence, Dppo, Dro, Sapo
from rljob_api.v1alpha1.recipes import filled
from rljob_trainer.algorithms.interfaces import LossInputs, TokenLosses
from rljob_trainer.algorithms.slopes import Columns, Sloped, applied

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


def clipped_surrogate(inputs: LossInputs, settings: Clipped) -> TokenLosses:
    """max(-A ratio, -A clip(ratio, 1 - low, 1 + high)) with ratio = exp(logprob - old logprob), [N].

    Source: PPO, Schulman et al. 2017, arXiv 1707.06347, equation 7; separate bounds: DAPO, arXiv 2503.14476,
    section 3.1. Dual clip: where A < 0 the loss is at most -A `dual_clip_ratio` (Ye et al. 2019, arXiv 1912.09729,
    equation 5); 0 for no such bound.

    The derivative is -A ratio, which is the loss itself, where no bound was met, else 0.
    """

    low, high = filled(settings.clip_ratio_low), filled(settings.clip_ratio_high)
    dual_clip_ratio = filled(settings.dual_clip_ratio)

    def formula(columns: Columns) -> Sloped:
        log_ratio_N, held_N, kl_sum = _held_log_ratio(columns)
        flows_N = log_ratio_N.eq_(held_N)
        ratio_N = held_N.exp_()
        costs_N = -columns[2].to(ratio_N.dtype)
        unclipped_N = costs_N * ratio_N
        clipped_N = ratio_N.clamp_(1.0 - low, 1.0 + high).mul_(costs_N)
        losses_N = torch.maximum(unclipped_N, clipped_N)
        num_clipped = clipped_N.gt_(unclipped_N).sum()
        num_dual_clipped = num_clipped.new_zeros(())
        if dual_clip_ratio != NO_DUAL_CLIP:
            # 0 where A >= 0: the loss is at most 0 there, so that the bound leaves it alone.
            bounds_N = costs_N.clamp_(min=0.0).mul_(dual_clip_ratio)
            unbounded_N, losses_N = losses_N, torch.minimum(losses_N, bounds_N)
            num_dual_clipped = unbounded_N.gt_(bounds_N).sum()
        slopes_N = flows_N.mul_(unclipped_N.eq_(losses_N)).mul_(losses_N)
        return Sloped(
            slopes_N, losses_N, {CLIPPED_SUM: num_clipped, DUAL_CLIPPED_SUM: num_dual_clipped, KL_SUM: kl_sum}
        )

    return TokenLosses(*applied(formula, inputs.logprobs_N, inputs.old_logprobs_N, inputs.advantages_N))


def clipped_weight(inputs: LossInputs, settings: Cispo) -> TokenLosses:
    """-w A logprob with the number w = clip(ratio, 1 - low, 1 + high), [N].

    Source: CISPO, MiniMax 2025, arXiv 2506.13585, equations 4 and 5. A ratio is above 0, so `clip_ratio_low` from 1 on
    is no bound. The derivative is -w A for every token; beyond +-20, where w is a bound, too.
    """

    def formula(columns: Columns) -> Sloped:
        _, held_N, kl_sum = _held_log_ratio(columns)
        ratio_N = held_N.exp_()
        weights_N = ratio_N.clamp(1.0 - settings.clip_ratio_low, 1.0 + settings.clip_ratio_high)
        num_clipped = ratio_N.ne_(weights_N).sum()
        slopes_N = weights_N.mul_(columns[2]).neg_()
        return Sloped(slopes_N, sums={CLIPPED_SUM: num_clipped, KL_SUM: kl_sum})

    return TokenLosses(*applied(formula, inputs.logprobs_N, inputs.old_logprobs_N, inputs.advantages_N))


def policy_gradient(inputs: LossInputs) -> TokenLosses:
    """-A logprob, [N]; nothing is held, and the old log-probabilities are for the metrics alone.

    Source: Chu et al. 2025, GPG, arXiv 2504.02546, its objective; REINFORCE, Williams 1992.
    """

    def formula(columns: Columns) -> Sloped:
        kl_sum = (columns[1] - columns[0]).sum()
        return Sloped(-columns[2], sums={KL_SUM: kl_sum})

    return TokenLosses(*applied(formula, inputs.logprobs_N, inputs.old_logprobs_N, inputs.advantages_N))


def soft_gate(inputs: LossInputs, settings: Sapo) -> TokenLosses:
    """-(4 / t) sigmoid(t (ratio - 1)) A, where t is `temperature_positive` for A > 0, else `temperature_negative`, [N].

    Source: SAPO, Gao et al. 2025, arXiv 2511.20347, its objective and gate. The derivative is
    -4 sigmoid (1 - sigmoid) ratio A: the policy gradient's at ratio 1.
    """

    def formula(columns: Columns) -> Sloped:
        _, held_N, kl_sum = _held_log_ratio(columns)
        # The gate is shut long before 20: the slope is 0 there without being told.
        ratio_N = held_N.exp_()
        temperatures = by_sign(columns[2], settings.temperature_positive, settings.temperature_negative)
        gates_N = (ratio_N - 1.0).mul_(temperatures).sigmoid_()
        losses_N = (columns[2] * -4.0).mul_(gates_N)
        slopes_N = ratio_N.mul_(losses_N).addcmul_(ratio_N, gates_N, value=-1.0)
        return Sloped(slopes_N, losses_N.div_(temperatures), {KL_SUM: kl_sum})

    return TokenLosses(*applied(formula, inputs.logprobs_N, inputs.old_logprobs_N, inputs.advantages_N))


def within_divergence(inputs: LossInputs, settings: Dppo) -> TokenLosses:
    """-w A logprob with the number w = min(ratio, `max_ratio`), and 0 for tokens whose probability p has left the trust
    region in the direction that A pushes, [N].

    Source: DPPO, Qi et al. 2026, arXiv 2602.04879, its mask and binary approximations. With the old
    probability q: TV is |p - q|, KL is q log(q / p) + (1 - q) log((1 - q) / (1 - p)). The threshold is
    `threshold_high` where A > 0, and p > q is out; `threshold_low` where A < 0, and p < q is.
    """

    def formula(columns: Columns) -> Sloped:
        new_logprobs_N, old_N, advantages_N = columns
        _, held_N, kl_sum = _held_log_ratio(columns)
        new_probabilities_N, old_probabilities_N = new_logprobs_N.exp(), old_N.exp()
        pushed_N = advantages_N.sign().mul_(new_probabilities_N - old_probabilities_N)
        thresholds = by_sign(advantages_N, filled(settings.threshold_high), filled(settings.threshold_low))
        match settings.divergence:
            case Divergence.TV:
                is_out_N = pushed_N.gt_(thresholds)
            case Divergence.KL:
                rests_N = _log_rests(new_probabilities_N, old_probabilities_N)
                distances_N = rests_N.addcmul_(old_probabilities_N, held_N, value=-1.0)
                is_out_N = pushed_N.gt_(0.0).mul_(distances_N.gt_(thresholds))
        num_out = is_out_N.sum()
        stays_N = is_out_N.neg_().add_(1.0)
        ratio_N = held_N.exp_()
        weights_N = ratio_N.clamp(max=settings.max_ratio)
        num_bounded = ratio_N.gt_(settings.max_ratio).mul_(stays_N).sum()
        slopes_N = weights_N.mul_(stays_N).mul_(advantages_N).neg_()
        return Sloped(slopes_N, sums={CLIPPED_SUM: num_out, BOUNDED_SUM: num_bounded, KL_SUM: kl_sum})

    return TokenLosses(*applied(formula, inputs.logprobs_N, inputs.old_logprobs_N, inputs.advantages_N))


def quadratic_penalty(inputs: LossInputs, settings: Dro) -> TokenLosses:
    """-A logprob + beta / 2 (logprob - old logprob)^2, [N]. Nothing is held: the penalty pulls from any distance.

    Source: DRO, Richemond et al. 2024, arXiv 2405.19107, its policy objective: the squared error
    (r - V - beta log-ratio)^2 / 2 has this gradient, times beta, with A = r - V.
    """

    def formula(columns: Columns) -> Sloped:
        new_logprobs_N, old_N, advantages_N = columns
        log_ratio_N = new_logprobs_N - old_N
        kl_sum = -log_ratio_N.sum()
        slopes_N = torch.sub(log_ratio_N.mul_(settings.beta), advantages_N)
        losses_N = log_ratio_N.square_().div_(2.0 * settings.beta).addcmul_(advantages_N, new_logprobs_N, value=-1.0)
        return Sloped(slopes_N, losses_N, {KL_SUM: kl_sum})

    return TokenLosses(*applied(formula, inputs.logprobs_N, inputs.old_logprobs_N, inputs.advantages_N))


def by_sign(advantages_N: Tensor, positive: float, otherwise: float) -> Tensor:
    """`positive` where A > 0, else `otherwise`, to rounding; 0-d where they are equal, else [N]."""
    if positive == otherwise:
        return advantages_N.new_full((), positive)
    return advantages_N.clone().gt_(0.0).mul_(positive - otherwise).add_(otherwise)


def _held_log_ratio(columns: Columns) -> tuple[Tensor, Tensor, Tensor]:
    """The log-ratio, [N], and held within bounds, to be overwritten both; KL_SUM."""
    log_ratio_N = columns[0] - columns[1]
    held_N = log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return log_ratio_N, held_N, -held_N.sum()


def _log_rests(probabilities_N: Tensor, old_probabilities_N: Tensor) -> Tensor:
    """[N]: (1 - q) log((1 - q) / (1 - p)) for old q and new p, to be overwritten."""
    # Rounding may put a probability above 1.
    rests_N, old_rests_N = ((1.0 - each_N).clamp_(min=0.0) for each_N in (probabilities_N, old_probabilities_N))
    logs_N = (old_rests_N + LEAST_REST).div_(rests_N.add_(LEAST_REST)).log_()
    return logs_N.mul_(old_rests_N)
