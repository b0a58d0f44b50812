"""Policy losses per token. Aggregation to one number is `aggregation`'s work.

Legend: N response tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rljob_trainer.algorithms.interfaces import TokenLosses
from rljob_trainer.algorithms.slopes import with_slopes

MAX_LOG_RATIO = 20.0

CLIPPED_SUM = "pg_clipfrac"
"""Tokens whose ratio is out of the trust region in the direction that the advantage pushes."""
DUAL_CLIPPED_SUM = "pg_clipfrac_lower"
"""Tokens with a negative advantage whose loss met the dual clip's bound."""
KL_SUM = "ppo_kl"
"""Old less new log-probability: K1 estimate of KL(old policy || policy)."""


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

    The log-ratio is held within +-20. Differentiable in `logprobs_N`, once; the derivative is -A ratio, which is the
    loss itself, where no bound was met, else 0.
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
