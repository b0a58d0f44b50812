"""Off-policy correction for the mismatch between trainer and rollout engine (other kernels, rounding, older weights).

Weights and estimates of whole responses are those of a row: if a response has several rows, each has its own.

Legend: B rows, N response tokens of all rows. The log-ratio of a sampled token is its log-probability by the trainer
before the step's updates minus its log-probability by the rollout engine.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rljob_api.v1alpha1.recipes import resolved_value
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
    """Importance weights by which each token's policy loss is multiplied, [N], without gradient. `correction` is
    resolved and its type is not `None`.

    w is exp(log-ratio) of the token, or exp(sum of the log-ratios) of its response. Without a lower bound the weight is
    min(w, maxRatio). With a lower bound the weight is w if w is in [minRatio, maxRatio], otherwise 0. Log-ratios are
    clamped to +-20.

    Source: truncated importance sampling, Ionides 2008, doi 10.1198/106186008X320456; for rollout engines, Yao et al.
    2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"; with both bounds, IcePop, Ling Team
    2025, arXiv 2510.18855. When to use: a low-precision rollout engine, or responses from older weights.
    """
    if correction.type in _OF_SEQUENCE:
        log_ratios_N = segments.spread(segments.sum(log_ratios_N))
    ratios_N = log_ratios_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    highest, lowest = resolved_value(correction.max_ratio), correction.min_ratio
    if lowest is None:
        return ratios_N.clamp(max=highest)
    return ratios_N * ((ratios_N >= lowest) & (ratios_N <= highest))


@torch.no_grad()
def is_kept(log_ratios_N: Tensor, segments: Segments, rejection: RolloutRejection) -> Tensor:
    """[N] bool: whether each token is trained on. `rejection` is resolved.

    The estimate that decides about a token is that of the token itself, or the sum, mean or maximum over its response.
    With K1 a token is trained on if the ratio exp(log-ratio) is in [min, max]. With K2 = log-ratio^2 / 2 or K3 =
    exp(log-ratio) - 1 - log-ratio a token is trained on if the estimate is at most max. Log-ratios are clamped to +-20.
    The ratio is trainer / rollout engine, as in the weights. verl's rejection uses the inverse, so its bounds lo_hi are
    1/hi and 1/lo here.

    Source: estimators as in `kl`; masks by the geometric mean of ratios, Zheng et al. 2025, arXiv 2507.18071 (GSPO)."""
    clamped_N = log_ratios_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    match rejection.estimator:
        case RejectionEstimator.K1:
            values_N = clamped_N
        case RejectionEstimator.K2:
            values_N = clamped_N.square() / 2
        case RejectionEstimator.K3:
            values_N = clamped_N.expm1() - clamped_N
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
