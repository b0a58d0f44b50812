"""Per-token estimates of KL(policy || reference) from the log-probabilities of the sampled tokens.

Shapes: B sequences, T response tokens. Source of k1, k2, k3: Schulman 2020, http://joschu.net/blog/kl-approx.html,
with d = logprob - reference logprob (Schulman's log r is -d).
"""

from __future__ import annotations

from torch import Tensor

from rljob_api.v1alpha1.algorithm import KlEstimator

MAX_LOG_RATIO = 20.0
MAX_K3 = 10.0


def kl_estimate(logprobs_BT: Tensor, reference_logprobs_BT: Tensor, estimator: KlEstimator) -> Tensor:
    """The estimate for each token, [B, T]; differentiable in `logprobs_BT`.

    K1: d, unbiased, may be negative. Its gradient has expectation 0: as a term of the loss it does nothing but add
    noise; use it in the reward.
    K2: d^2 / 2, biased; its gradient is that of the true KL in expectation.
    K3: exp(-d) - 1 + d, unbiased, never negative; d is held within +-20 and the value below 10, so that one unlikely
    token cannot overflow the loss (no gradient beyond these bounds).
    """
    difference_BT = logprobs_BT - reference_logprobs_BT
    match estimator:
        case KlEstimator.K1:
            return difference_BT
        case KlEstimator.K2:
            return difference_BT.square() / 2
        case KlEstimator.K3:
            log_ratio_BT = (-difference_BT).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
            return (log_ratio_BT.expm1() - log_ratio_BT).clamp(max=MAX_K3)


def kl_sums(kl_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """[B]: the estimate summed over the response tokens of each sequence, as a number: no gradient flows."""
    return (kl_BT.detach() * mask_BT).sum(dim=1)


def kl_in_reward(scores_B: Tensor, kl_sums_B: Tensor, coefficient: float) -> Tensor:
    """Reward of each sequence, [B]: its score minus `coefficient` times its KL (`kl_sums`).

    Source: Stiennon et al. 2020, arXiv 2009.01325, section 3.3.
    """
    return scores_B - coefficient * kl_sums_B
