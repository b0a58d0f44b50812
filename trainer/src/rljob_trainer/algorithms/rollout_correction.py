"""What is done about responses that were sampled from another distribution than the trainer's: other kernels, rounding,
weights that are some updates old.

Legend: B rows, N response tokens of all rows. Log ratios are the trainer's log-probability of a sampled token, before
the step's updates, less that which the rollout engine gave to it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rljob_api.v1alpha1.recipes import filled
from rljob_api.v1alpha1.rollout_correction import (
    RejectionEstimator,
    RejectionLevel,
    RolloutCorrection,
    RolloutCorrectionType,
    RolloutRejection,
)
from rljob_trainer.algorithms.kl import MAX_LOG_RATIO
from rljob_trainer.algorithms.segments import Segments

_OF_SEQUENCE = (RolloutCorrectionType.SEQUENCE_TRUNCATED, RolloutCorrectionType.SEQUENCE_MASKED)


@torch.no_grad()
def correction_weights(log_ratios_N: Tensor, segments: Segments, correction: RolloutCorrection) -> Tensor:
    """What each token's policy loss is multiplied by, [N], with a `correction` that is resolved and has a type; no
    gradient.

    With w = exp(log ratio) of the token, or of the sum over its response: min(w, maxRatio) where there is no bound
    below, else w from minRatio to maxRatio and 0 outside. Log ratios are held within +-20.

    Source: truncated importance sampling, Ionides 2008, doi 10.1198/106186008X320456, for rollout engines Yao et al.
    2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"; with both bounds IcePop, Ling Team
    2025, arXiv 2510.18855.
    """
    if correction.type in _OF_SEQUENCE:
        log_ratios_N = segments.spread(segments.sum(log_ratios_N))
    ratios_N = log_ratios_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    highest, lowest = filled(correction.max_ratio), correction.min_ratio
    if lowest is None:
        return ratios_N.clamp(max=highest)
    return ratios_N * ((ratios_N >= lowest) & (ratios_N <= highest))


@torch.no_grad()
def is_kept(log_ratios_N: Tensor, segments: Segments, rejection: RolloutRejection) -> Tensor:
    """Whether each token is learned from, [N] bool, by a `rejection` that is resolved.

    Of the token, or of the sum, mean or largest over its response: K1 is the ratio exp(log ratio), from min to max;
    K2, log ratio^2 / 2, and K3, exp(log ratio) - 1 - log ratio, are at most max. Log ratios are held within +-20. The
    ratio is the trainer's over the generator's, as in the weights; that of verl's rejection is the inverse, so that its
    bounds lo_hi are 1/hi and 1/lo here.

    Source: estimators as in `kl`; masks by the geometric mean of ratios, Zheng et al. 2025, arXiv 2507.18071 (GSPO)."""
    held_N = log_ratios_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    match rejection.estimator:
        case RejectionEstimator.K1:
            values_N = held_N
        case RejectionEstimator.K2:
            values_N = held_N.square() / 2
        case RejectionEstimator.K3:
            values_N = held_N.expm1() - held_N
    match rejection.level:
        case RejectionLevel.TOKEN:
            pass
        case RejectionLevel.SEQUENCE_SUM:
            values_N = segments.spread(segments.sum(values_N))
        case RejectionLevel.SEQUENCE_MEAN:
            values_N = segments.spread(segments.mean(values_N))
        case RejectionLevel.SEQUENCE_MAX:
            values_N = segments.spread(segments.max(values_N))
    if rejection.estimator is RejectionEstimator.K1:
        values_N = values_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    is_kept_N = values_N <= rejection.max
    return is_kept_N if rejection.min is None else is_kept_N & (values_N >= rejection.min)
