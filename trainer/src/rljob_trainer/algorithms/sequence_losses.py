"""Policy losses with one ratio for a whole response.

Every token of a response has the response's loss. The derivative by a token's own log-probability is given as if that
token alone moved the ratio, by its full amount rather than by 1 / length: so for any weights that the tokens of a
response have in common, as in every aggregation, the gradient of the response's weighted sum is the exact one.
SequenceMeanTokenMean gives what the papers write, one loss for each response; TokenMean weighs responses by their
lengths. Where weights differ within a response (rollout correction), or advantages in GSPO, each token's are those of
its own gradient: GSPO-token, arXiv 2507.18071, section 4.3.

Legend: B rows, N response tokens of all rows.
"""

from __future__ import annotations

import torch

from rljob_api.v1alpha1.policy_loss import Gmpo, Gspo
from rljob_trainer.algorithms.interfaces import LossInputs, TokenLosses
from rljob_trainer.algorithms.policy_losses import CLIPPED_SUM, KL_SUM, MAX_LOG_RATIO, by_sign
from rljob_trainer.algorithms.slopes import Columns, Sloped, applied, with_slopes

MAX_MEAN_LOG_RATIO = 10.0
"""Of a response."""


def clipped_sequence_ratio(inputs: LossInputs, settings: Gspo) -> TokenLosses:
    """max(-A s, -A clip(s, 1 - low, 1 + high)), [N], with s = exp(mean of the response's log-ratios).

    Source: GSPO, Zheng et al. 2025, arXiv 2507.18071, sections 4.1 and 4.3. The mean is held below 10, and no gradient
    flows beyond.
    """
    segments, logprobs_N = inputs.segments, inputs.logprobs_N
    with torch.no_grad():
        log_ratio_sums_B = segments.sum(logprobs_N.detach() - inputs.old_logprobs_N)
        means_B = log_ratio_sums_B / segments.lengths_B.clamp(min=1)
        held_B = means_B.clamp(max=MAX_MEAN_LOG_RATIO)
        flows_N = segments.spread(means_B.eq_(held_B))
        ratio_N = segments.spread(held_B.exp_())

    def formula(columns: Columns) -> Sloped:
        _, advantages_N, ratio_N, flows_N = columns
        gains_N = advantages_N * ratio_N
        clipped_N = ratio_N.clamp(1.0 - settings.clip_ratio_low, 1.0 + settings.clip_ratio_high).mul_(advantages_N)
        losses_N = torch.minimum(gains_N, clipped_N).neg_()
        is_clipped_N = gains_N.gt_(clipped_N)
        num_clipped = is_clipped_N.sum()
        slopes_N = is_clipped_N.neg_().add_(1.0).mul_(flows_N).mul_(losses_N)
        return Sloped(slopes_N, losses_N, {CLIPPED_SUM: num_clipped})

    losses_N, sums = applied(formula, logprobs_N, inputs.advantages_N, ratio_N, flows_N)
    return TokenLosses(losses_N, {**sums, KL_SUM: -log_ratio_sums_B.sum(dtype=torch.float64)})


def clipped_geometric_mean(inputs: LossInputs, settings: Gmpo) -> TokenLosses:
    """-A exp(mean of the response's clipped log-ratios), [N], with the response's mean advantage as A. A token's
    log-ratio is clipped above at `high` where its advantage is positive, below at -`low` where it is negative, and
    counts as 0 where it is 0.

    Source: GMPO, Zhao et al. 2025, arXiv 2507.20673, whose objective is this loss by SequenceMeanTokenMean. verl 0.9.1
    takes the mean over the rows of a micro-batch, whatever the job's aggregation is. Log-ratios are held within +-20
    first.
    """
    segments, logprobs_N, advantages_N = inputs.segments, inputs.logprobs_N, inputs.advantages_N
    with torch.no_grad():
        log_ratio_N = logprobs_N - inputs.old_logprobs_N
        held_N = log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        kl_sum = -held_N.sum()
        flows_N = log_ratio_N.eq_(held_N)
        signs_N = advantages_N.sign()
        pushed_N = held_N.mul_(signs_N)
        capped_N = torch.minimum(
            pushed_N, by_sign(advantages_N, settings.clip_log_ratio_high, settings.clip_log_ratio_low)
        )
        is_clipped_N = pushed_N.gt_(capped_N)
        num_clipped = is_clipped_N.sum()
        ratio_B = segments.mean(capped_N.mul_(signs_N)).exp_()
        losses_N = segments.spread(ratio_B.mul_(segments.mean(advantages_N)).neg_())
        has_slope_N = is_clipped_N.neg_().add_(1.0).mul_(flows_N).mul_(signs_N.square_())
        slopes_N = has_slope_N.mul_(losses_N)
    return TokenLosses(with_slopes(logprobs_N, losses_N, slopes_N), {CLIPPED_SUM: num_clipped, KL_SUM: kl_sum})
