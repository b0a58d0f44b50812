"""Per-token policy losses. Aggregation to one number is `aggregation`'s work.

Shapes: B sequences, T response tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class SurrogateStats:
    """Sums over response tokens (0-d tensors, no gradient), so that micro-batches and workers can be added up."""

    num_tokens: Tensor
    num_clipped: Tensor
    """Tokens whose ratio is out of the trust region in the direction that the advantage pushes."""
    num_dual_clipped: Tensor
    """Tokens with a negative advantage whose loss met the dual clip's bound."""
    kl_sum: Tensor
    """Sum of old logprob - logprob: K1 estimate of KL(old policy || policy)."""

    def __add__(self, other: SurrogateStats) -> SurrogateStats:
        return SurrogateStats(
            self.num_tokens + other.num_tokens,
            self.num_clipped + other.num_clipped,
            self.num_dual_clipped + other.num_dual_clipped,
            self.kl_sum + other.kl_sum,
        )


def clipped_surrogate(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
    dual_clip_ratio: float | None,
) -> tuple[Tensor, SurrogateStats]:
    """max(-A ratio, -A clip(ratio, 1 - low, 1 + high)) with ratio = exp(logprob - old logprob), [B, T].

    Source: PPO, Schulman et al. 2017, arXiv 1707.06347, equation 7; separate bounds: DAPO, arXiv 2503.14476,
    section 3.1. Dual clip: where A < 0 the loss is at most -A `dual_clip_ratio` (Ye et al. 2019, arXiv 1912.09729,
    equation 5); None for none.

    `advantages_BT` may be [B, 1]. The mask (1 for response tokens) enters the statistics only: the loss of other
    tokens is left as it comes and must be masked by the aggregation. The log-ratio is held within +-20.
    """
    log_ratio_BT = (logprobs_BT - old_logprobs_BT).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio_BT = log_ratio_BT.exp()
    unclipped_BT = -advantages_BT * ratio_BT
    clipped_BT = -advantages_BT * ratio_BT.clamp(1.0 - clip_ratio_low, 1.0 + clip_ratio_high)
    loss_BT = torch.maximum(unclipped_BT, clipped_BT)
    dual_clipped_BT = torch.zeros_like(loss_BT, dtype=torch.bool)
    if dual_clip_ratio is not None:
        bound_BT = -advantages_BT * dual_clip_ratio
        dual_clipped_BT = (advantages_BT < 0) & (loss_BT > bound_BT)
        loss_BT = torch.where(dual_clipped_BT, bound_BT, loss_BT)
    stats = SurrogateStats(
        num_tokens=mask_BT.sum(),
        num_clipped=((clipped_BT > unclipped_BT) * mask_BT).sum(),
        num_dual_clipped=(dual_clipped_BT * mask_BT).sum(),
        kl_sum=-(log_ratio_BT.detach() * mask_BT).sum(),
    )
    return loss_BT, stats
