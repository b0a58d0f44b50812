"""Policy losses with one ratio for a whole response.

All tokens of a response have the same loss. The gradient with respect to a token's log-probability is that of
GSPO-token (arXiv 2507.18071, section 4.3): a change of this log-probability counts as an equal change of the response's
mean log-ratio, although the mean changes only by 1 / length of this change. If all tokens of a response have the same
weight, as in every aggregation, the gradient of the weighted sum over the response is exact. With SequenceMeanTokenMean
the aggregated loss is the papers' objective (one loss per response); with TokenMean, responses are weighted by their
lengths. The tokens of a response may have different weights (rollout correction) or, in GSPO, different advantages.
Then each token's gradient is scaled by the token's own weight or advantage.

If a response has several rows, each row has a ratio of its own, and the aggregation gives all rows together the weight
of one response.

Legend: B rows, N response tokens of all rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rljob_api.v1alpha1.policy_loss import Gmpo, Gspo
from rljob_trainer.algorithms.interfaces import LossInputs, TokenLosses
from rljob_trainer.algorithms.policy_losses import CLIPPED_SUM, KL_SUM, clamped_log_ratio, clipped_losses
from rljob_trainer.algorithms.segments import Segments

MAX_MEAN_LOG_RATIO = 10.0
"""The upper bound of a response's mean log-ratio."""


def clipped_sequence_ratio(inputs: LossInputs, settings: Gspo) -> TokenLosses:
    """GSPO: max(-A s, -A clip(s, 1 - low, 1 + high)), [N], with s = exp(mean of the row's log-ratios).

    Source: Zheng et al. 2025, arXiv 2507.18071, sections 4.1 and 4.3. The mean is clamped to at most 10, beyond which
    no gradient flows. When to use: long responses and mixtures of experts, because clipping does not depend on the
    noise of single tokens.
    """
    log_ratio_N = inputs.logprobs_N - inputs.old_logprobs_N
    means_N = _response_means(log_ratio_N, inputs.segments).clamp(max=MAX_MEAN_LOG_RATIO)
    low, high = settings.clip_ratio_low, settings.clip_ratio_high
    losses_N, is_clipped_N = clipped_losses(means_N.exp(), inputs.advantages_N, low, high)
    kl_sum = -log_ratio_N.detach().sum(dtype=torch.float64)
    return TokenLosses(losses_N, {CLIPPED_SUM: is_clipped_N.sum(), KL_SUM: kl_sum})


def clipped_geometric_mean(inputs: LossInputs, settings: Gmpo) -> TokenLosses:
    """GMPO: -A exp(mean of the row's clipped log-ratios), [N], with the row's mean advantage as A.

    A token's log-ratio is clipped to at most `clipLogRatioHigh` if its advantage is positive, to at least
    -`clipLogRatioLow` if it is negative, and counts as 0 if the advantage is 0. Log-ratios are clamped to +-20 first.

    Source: Zhao et al. 2025, arXiv 2507.20673; the objective is this loss with SequenceMeanTokenMean. verl 0.9.1 takes
    the mean over the rows of a micro-batch for every aggregation. When to use: wide clip bounds, because single
    outliers change a geometric mean less.
    """
    segments, advantages_N = inputs.segments, inputs.advantages_N
    log_ratio_N = clamped_log_ratio(inputs)
    clipped_N = log_ratio_N.clamp(max=settings.clip_log_ratio_high).where(
        advantages_N > 0, log_ratio_N.clamp(min=-settings.clip_log_ratio_low)
    )
    is_clipped_N = (clipped_N != log_ratio_N) & (advantages_N != 0)
    means_N = _response_means(clipped_N.masked_fill(advantages_N == 0, 0.0), segments)
    losses_N = -segments.spread(segments.mean(advantages_N)) * means_N.exp()
    return TokenLosses(losses_N, {CLIPPED_SUM: is_clipped_N.sum(), KL_SUM: -log_ratio_N.detach().sum()})


def _response_means(values_N: Tensor, segments: Segments) -> Tensor:
    """[N]: for each value the mean of its row, with a gradient of 1 with respect to the value itself."""
    numbers_N = values_N.detach()
    return segments.spread(segments.mean(numbers_N)) + (values_N - numbers_N)
