"""Weights for what the rollout engine sampled from another distribution than the trainer's: rounding, kernels, weights
that are some updates old.

Legend: B rows, N response tokens of all rows. w = pi_old / pi_rollout by the trainer's and the rollout engine's
log-probabilities of the sampled token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rljob_api.v1alpha1.algorithm import RolloutCorrectionType
from rljob_api.v1alpha1.recipes import ResolvedRolloutCorrection
from rljob_trainer.algorithms.segments import Segments

MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class CorrectionWeights:
    """What each token's policy loss is multiplied by."""

    weights_N: Tensor
    """No gradient."""
    num_bounded: Tensor
    """0-d: tokens whose weight is not the ratio itself."""


def correction_weights(
    old_logprobs_N: Tensor, rollout_logprobs_N: Tensor, segments: Segments, correction: ResolvedRolloutCorrection
) -> CorrectionWeights:
    """Of each token.

    TokenTruncated: min(w, maxRatio). SequenceTruncated: the same for the product of a response's ratios, on all of its
    tokens. TokenMasked and SequenceMasked: the ratio between minRatio and maxRatio, and 0 outside. Log ratios are held
    within +-20.

    Source: truncated importance sampling, Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy
    RL Training"; masked, IcePop, Ling Team 2025, arXiv 2510.18855.
    """
    with torch.no_grad():
        log_ratios_N = (old_logprobs_N - rollout_logprobs_N).float()
        by_sequence = correction.type in (
            RolloutCorrectionType.SEQUENCE_TRUNCATED,
            RolloutCorrectionType.SEQUENCE_MASKED,
        )
        if by_sequence:
            log_ratios_N = segments.spread(segments.sum(log_ratios_N))
        ratios_N = log_ratios_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        if correction.min_ratio is None:
            weights_N = ratios_N.clamp(max=correction.max_ratio)
        else:
            is_inside_N = (ratios_N >= correction.min_ratio) & (ratios_N <= correction.max_ratio)
            weights_N = ratios_N * is_inside_N
        return CorrectionWeights(weights_N, (weights_N != ratios_N).sum())
