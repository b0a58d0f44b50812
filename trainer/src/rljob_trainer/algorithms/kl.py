"""Per-token estimates of KL(policy || reference) from the log-probabilities of the sampled tokens.

Legend: B rows, N response tokens of all rows. Source of k1, k2, k3: Schulman 2020,
http://joschu.net/blog/kl-approx.html, with d = logprob - reference logprob (Schulman's log r is -d).
"""

from __future__ import annotations

import math

from torch import Tensor

from rljob_api.v1alpha1.kl import KlController, KlEstimator
from rljob_trainer.algorithms.segments import Segments

MAX_ERROR = 0.2
"""The relative error of the KL is clamped to +- this before it changes the adaptive coefficient."""
MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +- this before they are exponentiated: here, in losses and in rollout correction."""
MAX_K3 = 10.0
"""The upper bound of a K3 estimate."""
ROUNDING = 1e-5
"""Smaller differences of log-probabilities are rounding errors of float32."""


def kl_estimate(
    logprobs_N: Tensor, reference_logprobs_N: Tensor, estimator: KlEstimator, *, straight_through: bool = False
) -> Tensor:
    """The KL estimate of each token, [N]; differentiable with respect to `logprobs_N`.

    K1: d; unbiased, may be negative. Its gradient has expectation 0, so as a term of the loss it only adds noise. When
    to use: in the reward.
    K2: d^2 / 2; biased, but the expected gradient is that of the true KL. When to use: in the loss.
    K3: exp(-d) - 1 + d; unbiased and never negative. d is clamped to +-20 and the value to at most 10, so that one
    unlikely token cannot overflow the loss; beyond these bounds no gradient flows. When to use: in the loss, as in
    GRPO's paper. Autograd computes the gradient 1 - exp(-d) with an error of 6e-8 near 0. At |d| = 1e-4 this is a
    relative error of 1e-3, as large as that of rounding the log-probabilities to float32.
    Absolute: |d|; biased. Its gradient has the same size at any distance from the reference. See `absolute_difference`.

    With `straight_through` the result has the estimator's value and the gradient of K2, which is d. K3 has this
    gradient even where it is clamped. No gradient flows where d is infinite. Source: verl 0.9.1, `kl_penalty` with "+";
    Tang and Munos 2025, arXiv 2506.09477, explain why a good estimate of the KL need not have the KL's gradient.
    """
    difference_N = logprobs_N - reference_logprobs_N
    match estimator:
        case KlEstimator.K1:
            estimates_N = difference_N
        case KlEstimator.K2:
            estimates_N = difference_N.square() / 2
        case KlEstimator.K3:
            log_ratio_N = (-difference_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
            estimates_N = (log_ratio_N.expm1() - log_ratio_N).clamp(max=MAX_K3)
        case KlEstimator.ABSOLUTE:
            estimates_N = absolute_difference(logprobs_N, reference_logprobs_N)
    if not straight_through:
        return estimates_N
    # The difference of two infinite numbers in the last line would be NaN.
    k2_N = difference_N.masked_fill(difference_N.isinf(), 0.0).square() / 2
    return estimates_N.detach() + (k2_N - k2_N.detach())


def absolute_difference(logprobs_N: Tensor, others_N: Tensor) -> Tensor:
    """|d|, [N]; no gradient flows where |d| is at most ROUNDING. There the sign of d, and so the gradient, would be a
    rounding error that depends on the number of workers."""
    distances_N = (logprobs_N - others_N).abs()
    return distances_N.where(distances_N > ROUNDING, distances_N.detach())


def kl_sums(kl_N: Tensor, segments: Segments) -> Tensor:
    """[B]: the KL estimate summed over the response tokens of each row, without gradient."""
    return segments.sum(kl_N.detach())


def kl_in_reward(scores_B: Tensor, kl_sums_B: Tensor, coefficient: float) -> Tensor:
    """The reward of each row, [B]: its score minus `coefficient` times its KL (`kl_sums`).

    Source: Stiennon et al. 2020, arXiv 2009.01325, section 3.3.
    """
    return scores_B - coefficient * kl_sums_B


def next_coefficient(controller: KlController, coefficient: float, measured_kl: float, num_responses: int) -> float:
    """The KL coefficient for the step after one that used `coefficient`; unchanged if `measured_kl` is not finite.

    `measured_kl` is the mean of the step's estimates over response tokens, `num_responses` the number of responses that
    were trained on.

    Source: Ziegler et al. 2019, arXiv 1909.08593, section 2.2, with K_beta = responses / horizon, as in the authors'
    code. The paper's KL is per response. Here it is per token as in verl, except that verl takes the mean of the
    responses' means.
    """
    adaptive = controller.adaptive
    if adaptive is None or not math.isfinite(measured_kl):
        return coefficient
    error = min(max(measured_kl / adaptive.target - 1, -MAX_ERROR), MAX_ERROR)
    return coefficient * (1 + error * num_responses / adaptive.horizon)
