"""Per-token estimates of KL(policy || reference) from the log-probabilities of the sampled tokens.

Legend: B rows, N response tokens of all rows. Source of k1, k2, k3: Schulman 2020,
http://joschu.net/blog/kl-approx.html, with d = logprob - reference logprob (Schulman's log r is -d).
"""

from __future__ import annotations

import torch
from torch import Tensor

from rljob_api.v1alpha1.kl import KlEstimator
from rljob_trainer.algorithms.segments import Segments
from rljob_trainer.algorithms.slopes import with_slopes

MAX_LOG_RATIO = 20.0
MAX_K3 = 10.0


def kl_estimate(logprobs_N: Tensor, reference_logprobs_N: Tensor, estimator: KlEstimator) -> Tensor:
    """The estimate for each token, [N]; differentiable in `logprobs_N`, once.

    K1: d, unbiased, may be negative. Its gradient has expectation 0: as a term of the loss it does nothing but add
    noise; use it in the reward.
    K2: d^2 / 2, biased; its gradient is that of the true KL in expectation.
    K3: exp(-d) - 1 + d, unbiased, never negative; d is held within +-20 and the value below 10, so that one unlikely
    token cannot overflow the loss (no gradient beyond these bounds).
    """
    with torch.no_grad():
        difference_N = logprobs_N - reference_logprobs_N
        match estimator:
            case KlEstimator.K1:
                values_N, slopes_N = difference_N, torch.ones_like(difference_N)
            case KlEstimator.K2:
                values_N, slopes_N = difference_N.square().div_(2), difference_N
            case KlEstimator.K3:
                values_N, slopes_N = _k3_with_slopes(difference_N)
    return with_slopes(logprobs_N, values_N, slopes_N)


def kl_sums(kl_N: Tensor, segments: Segments) -> Tensor:
    """[B]: the estimate summed over the response tokens of each row, as a number: no gradient flows."""
    return segments.sum(kl_N.detach())


def kl_in_reward(scores_B: Tensor, kl_sums_B: Tensor, coefficient: float) -> Tensor:
    """Reward of each row, [B]: its score minus `coefficient` times its KL (`kl_sums`).

    Source: Stiennon et al. 2020, arXiv 2009.01325, section 3.3.
    """
    return scores_B - coefficient * kl_sums_B


def _k3_with_slopes(difference_N: Tensor) -> tuple[Tensor, Tensor]:
    """Takes `difference_N` for itself."""
    log_ratio_N = difference_N.neg_().clamp_(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio_less_one_N = log_ratio_N.expm1()
    unbounded_N = ratio_less_one_N - log_ratio_N
    values_N = unbounded_N.clamp(max=MAX_K3)
    # Where d was held, the value was above its bound, too.
    flows_N = unbounded_N.eq_(values_N)
    return values_N, flows_N.mul_(ratio_less_one_N).neg_()
