"""Compares weights and masks of rollout correction with verl's numbers.

Legend: N tokens that are not masked.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from rljob_api.v1alpha1.rollout_correction import RolloutCorrection, RolloutRejection
from rljob_testing.golden import verl_cases
from rljob_trainer.algorithms.rollout_correction import correction_weights, is_kept
from rljob_trainer.observability.metrics import REJECTED_FRACTION

CORRECTIONS = verl_cases.GOLDEN["rollout_correction"]
LOG_RATIOS_N = verl_cases.LOGPROBS_N - verl_cases.OLD_LOGPROBS_N
WEIGHTS = {
    "token tis 2.0": RolloutCorrection.from_wire({"type": "TokenTruncated", "maxRatio": 2}),
    "sequence tis 2.0": RolloutCorrection.from_wire({"type": "SequenceTruncated", "maxRatio": 2}),
    "token icepop 0.5_2.0": RolloutCorrection.from_wire({"type": "TokenMasked", "maxRatio": 2, "minRatio": 0.5}),
}
REJECTIONS = {
    name: RolloutRejection.from_wire(wire)
    for name, wire in {
        "rs token_k1 0.5_2.0": {"level": "Token", "max": 2, "min": 0.5},
        "rs seq_mean_k3 0.1": {"level": "SequenceMean", "estimator": "K3", "max": 0.1},
        "rs seq_mean_k1 0.8_1.25": {"level": "SequenceMean", "max": 1.25, "min": 0.8},
        # verl sets bounds on the inverse ratio.
        "rs token_k1 0.5_1.1": {"level": "Token", "max": 1 / 0.5, "min": 1 / 1.1},
        "rs seq_sum_k1 0.4_1.5": {"level": "SequenceSum", "max": 1 / 0.4, "min": 1 / 1.5},
        "rs seq_max_k2 0.2": {"level": "SequenceMax", "estimator": "K2", "max": 0.2},
    }.items()
}


def _weights(name: str) -> Sequence[verl_cases.Comparison]:
    weights_N = correction_weights(LOG_RATIOS_N, verl_cases.ROWS, WEIGHTS[name])
    return [verl_cases.near("weights", weights_N, verl_cases.tokens_of(CORRECTIONS[name]["weights"]))]


def _mask(name: str) -> Sequence[verl_cases.Comparison]:
    is_kept_N = is_kept(LOG_RATIOS_N, verl_cases.ROWS, REJECTIONS[name])
    share = 1 - float(is_kept_N.double().mean())
    return [
        verl_cases.Comparison(
            "mask", is_kept_N.float(), verl_cases.tokens_of(CORRECTIONS[name]["mask"]), rtol=1.3e-6, atol=1e-5
        ),
        verl_cases.number("rejected", share, CORRECTIONS[name]["metrics"][REJECTED_FRACTION], atol=1e-6),
    ]


WEIGHT_CASES = tuple(
    verl_cases.GoldenCase(f"correction {weights.type}", name, partial(_weights, name))
    for name, weights in WEIGHTS.items()
)
MASK_CASES = tuple(
    verl_cases.GoldenCase(f"rejection {rejection.level}", name, partial(_mask, name))
    for name, rejection in REJECTIONS.items()
)
CORRECTION_CASES = (*WEIGHT_CASES, *MASK_CASES)
