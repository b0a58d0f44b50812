"""Policy losses with one ratio for a whole response.

Every token of a response has the response's loss. The gradient by a token's own log-probability is that of GSPO-token
(arXiv 2507.18071, section 4.3): as if that token alone moved the response's log-ratio, by its full amount rather than
by 1 / length. So for any weights that the tokens of a response have in common, as in every aggregation, the gradient of
the response's weighted sum is the exact one. SequenceMeanTokenMean gives what the papers write, one loss for each
response; TokenMean weighs responses by their lengths. Where weights differ within a response (rollout correction), or
advantages in GSPO, each token's are those of its own gradient.

Legend: B rows, N response tokens of all rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rljob_api.v1alpha1.policy_loss import Gmpo, Gspo
from rljob_trainer.algorithms.interfaces import LossInputs, TokenLosses
from rljob_trainer.algorithms.policy_losses import CLIPPED_SUM, KL_SUM, clipped_losses, held_log_ratio
from rljob_trainer.algorithms.segments import Segments

MAX_MEAN_LOG_RATIO = 10.0
"""Of a response."""


def clipped_sequence_ratio(inputs: LossInputs, settings: Gspo) -> TokenLosses:
    """max(-A s, -A clip(s, 1 - low, 1 + high)), [N], with s = exp(mean of the response's log-ratios).

    Source: GSPO, Zheng et al. 2025, arXiv 2507.18071, sections 4.1 and 4.3. The mean is held below 10, and no gradient
    flows beyond. For long responses and mixtures of experts: no single token's noise clips a response.
    """
    log_ratio_N = inputs.logprobs_N - inputs.old_logprobs_N
    means_N = _response_means(log_ratio_N, inputs.segments).clamp(max=MAX_MEAN_LOG_RATIO)
    low, high = settings.clip_ratio_low, settings.clip_ratio_high
    losses_N, is_clipped_N = clipped_losses(means_N.exp(), inputs.advantages_N, low, high)
    kl_sum = -log_ratio_N.detach().sum(dtype=torch.float64)
    return TokenLosses(losses_N, {CLIPPED_SUM: is_clipped_N.sum(), KL_SUM: kl_sum})


def clipped_geometric_mean(inputs: LossInputs, settings: Gmpo) -> TokenLosses:
    """-A exp(mean of the response's clipped log-ratios), [N], with the response's mean advantage as A. A token's
    log-ratio is clipped above at `high` where its advantage is positive, below at -`low` where it is negative, and
    counts as 0 where it is 0.

    Source: GMPO, Zhao et al. 2025, arXiv 2507.20673, whose objective is this loss by SequenceMeanTokenMean. verl 0.9.1
    takes the mean over the rows of a micro-batch, whatever the job's aggregation is. Log-ratios are held within +-20
    first. For wide bounds: a geometric mean is moved less by single outliers.
    """
    segments, advantages_N = inputs.segments, inputs.advantages_N
    log_ratio_N = held_log_ratio(inputs)
    clipped_N = log_ratio_N.clamp(max=settings.clip_log_ratio_high).where(
        advantages_N > 0, log_ratio_N.clamp(min=-settings.clip_log_ratio_low)
    )
    is_clipped_N = (clipped_N != log_ratio_N) & (advantages_N != 0)
    means_N = _response_means(clipped_N.masked_fill(advantages_N == 0, 0.0), segments)
    losses_N = -segments.spread(segments.mean(advantages_N)) * means_N.exp()
    return TokenLosses(losses_N, {CLIPPED_SUM: is_clipped_N.sum(), KL_SUM: -log_ratio_N.detach().sum()})


def _response_means(values_N: Tensor, segments: Segments) -> Tensor:
    """[N]: to each value its row's mean, whose gradient by the value itself is 1."""
    numbers_N = values_N.detach()
    return segments.spread(segments.mean(numbers_N)) + (values_N - numbers_N)
