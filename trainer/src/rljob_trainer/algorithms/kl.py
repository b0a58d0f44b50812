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
"""Of an adaptive controller, on both sides."""
MAX_LOG_RATIO = 20.0
"""Logarithms of ratios are held within +- this before they are exponentiated, here, in losses and in corrections."""
MAX_K3 = 10.0
ROUNDING = 1e-5
"""Differences of log-probabilities below it are those of 32-bit arithmetic."""


def kl_estimate(
    logprobs_N: Tensor, reference_logprobs_N: Tensor, estimator: KlEstimator, *, straight_through: bool = False
) -> Tensor:
    """The estimate for each token, [N]; differentiable in `logprobs_N`.

    K1: d, unbiased, may be negative. Its gradient has expectation 0: as a term of the loss it does nothing but add
    noise; use it in the reward.
    K2: d^2 / 2, biased; its gradient is that of the true KL in expectation.
    K3: exp(-d) - 1 + d, unbiased, never negative; d is held within +-20 and the value below 10, so that one unlikely
    token cannot overflow the loss (no gradient beyond these bounds). Autograd makes of its gradient exp(-d) - 1, by
    which its error near 0 is 6e-8: in float32 that is 1e-3 of it at |d| = 1e-4, as much as the log-probabilities
    themselves are rounded by.
    Absolute: |d|, biased, by `absolute_difference`; its gradient is as large near the reference as far from it.

    `straight_through`: the estimator's value with the gradient of K2, d, also where K3 is held; none where d is
    infinite. Source: verl 0.9.1, `kl_penalty` with "+"; Tang and Munos 2025, arXiv 2506.09477, on why a value that
    estimates the KL well does not have the KL's gradient.
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
    # Of infinite numbers the difference below would be no number.
    k2_N = difference_N.masked_fill(difference_N.isinf(), 0.0).square() / 2
    return estimates_N.detach() + (k2_N - k2_N.detach())


def absolute_difference(logprobs_N: Tensor, others_N: Tensor) -> Tensor:
    """|d|, [N]. Within ROUNDING no gradient flows: where two log-probabilities are meant to be equal, rounding would
    decide on its sign, and with it the number of workers."""
    distances_N = (logprobs_N - others_N).abs()
    return distances_N.where(distances_N > ROUNDING, distances_N.detach())


def kl_sums(kl_N: Tensor, segments: Segments) -> Tensor:
    """[B]: the estimate summed over the response tokens of each row, as a number: no gradient flows."""
    return segments.sum(kl_N.detach())


def kl_in_reward(scores_B: Tensor, kl_sums_B: Tensor, coefficient: float) -> Tensor:
    """Reward of each row, [B]: its score minus `coefficient` times its KL (`kl_sums`).

    Source: Stiennon et al. 2020, arXiv 2009.01325, section 3.3.
    """
    return scores_B - coefficient * kl_sums_B


def next_coefficient(controller: KlController, coefficient: float, measured_kl: float, num_responses: int) -> float:
    """The coefficient after a step that was made with `coefficient`. `measured_kl` is the mean of the step's estimates
    over its response tokens, `num_responses` what it has learned from. Unchanged by a KL that is no number.

    Source: Ziegler et al. 2019, arXiv 1909.08593, section 2.2, with K_beta = responses / horizon, as in its program.
    There the KL is that of a response; here it is per token, as in verl, which has the mean of the responses' means.
    """
    adaptive = controller.adaptive
    if adaptive is None or not math.isfinite(measured_kl):
        return coefficient
    error = min(max(measured_kl / adaptive.target - 1, -MAX_ERROR), MAX_ERROR)
    return coefficient * (1 + error * num_responses / adaptive.horizon)
