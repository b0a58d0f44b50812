"""Weights and masks of rollout correction against verl's numbers.

Legend: N tokens that are not masked.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from rljob_api.v1alpha1.resolved_correction import ResolvedRejection, ResolvedWeights
from rljob_api.v1alpha1.rollout_correction import RejectionEstimator, RejectionLevel, RolloutCorrectionType
from rljob_testing.golden import (
    GOLDEN,
    LOGPROBS_N,
    OLD_LOGPROBS_N,
    ROWS,
    Comparison,
    GoldenCase,
    near,
    number,
    tokens_of,
)
from rljob_trainer.algorithms.rollout_correction import correction_weights, is_kept
from rljob_trainer.observability.metrics import REJECTED_FRACTION

CORRECTIONS = GOLDEN["rollout_correction"]
LOG_RATIOS_N = LOGPROBS_N - OLD_LOGPROBS_N
WEIGHTS = {
    "token tis 2.0": ResolvedWeights(RolloutCorrectionType.TOKEN_TRUNCATED, 2.0, None),
    "sequence tis 2.0": ResolvedWeights(RolloutCorrectionType.SEQUENCE_TRUNCATED, 2.0, None),
    "token icepop 0.5_2.0": ResolvedWeights(RolloutCorrectionType.TOKEN_MASKED, 2.0, 0.5),
}
REJECTIONS = {
    "rs token_k1 0.5_2.0": ResolvedRejection(RejectionLevel.TOKEN, RejectionEstimator.K1, 2.0, 0.5),
    "rs seq_mean_k3 0.1": ResolvedRejection(RejectionLevel.SEQUENCE_MEAN, RejectionEstimator.K3, 0.1, None),
    "rs seq_mean_k1 0.8_1.25": ResolvedRejection(RejectionLevel.SEQUENCE_MEAN, RejectionEstimator.K1, 1.25, 0.8),
    # verl bounds the inverse.
    "rs token_k1 0.5_1.1": ResolvedRejection(RejectionLevel.TOKEN, RejectionEstimator.K1, 1 / 0.5, 1 / 1.1),
    "rs seq_sum_k1 0.4_1.5": ResolvedRejection(RejectionLevel.SEQUENCE_SUM, RejectionEstimator.K1, 1 / 0.4, 1 / 1.5),
    "rs seq_max_k2 0.2": ResolvedRejection(RejectionLevel.SEQUENCE_MAX, RejectionEstimator.K2, 0.2, None),
}


def _weights(name: str) -> Sequence[Comparison]:
    weights_N = correction_weights(LOG_RATIOS_N, ROWS, WEIGHTS[name])
    return [near("weights", weights_N, tokens_of(CORRECTIONS[name]["weights"]))]


def _mask(name: str) -> Sequence[Comparison]:
    is_kept_N = is_kept(LOG_RATIOS_N, ROWS, REJECTIONS[name])
    share = 1 - float(is_kept_N.double().mean())
    return [
        Comparison("mask", is_kept_N.float(), tokens_of(CORRECTIONS[name]["mask"]), rtol=1.3e-6, atol=1e-5),
        number("rejected", share, CORRECTIONS[name]["metrics"][REJECTED_FRACTION], atol=1e-6),
    ]


WEIGHT_CASES = tuple(
    GoldenCase(f"correction {weights.type}", name, partial(_weights, name)) for name, weights in WEIGHTS.items()
)
MASK_CASES = tuple(
    GoldenCase(f"rejection {rejection.level}", name, partial(_mask, name)) for name, rejection in REJECTIONS.items()
)
CORRECTION_CASES = (*WEIGHT_CASES, *MASK_CASES)
