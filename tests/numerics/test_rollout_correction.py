"""Weights and masks of rollout correction: against verl's numbers, and against their definitions in slow form.

Legend: B rows, T columns of a table, N tokens that are not masked, R response tokens of a row.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rljob_api.v1alpha1.rollout_correction import (
    RejectionEstimator,
    RejectionLevel,
    RolloutCorrection,
    RolloutCorrectionType,
    RolloutRejection,
)
from rljob_testing.golden import correction_cases, verl_cases
from rljob_testing.training import replays
from rljob_trainer.algorithms.rollout_correction import correction_weights, is_kept
from rljob_trainer.algorithms.segments import Segments
from rljob_trainer.dispatch.worker import WorkerContext
from rljob_trainer.observability.metrics import (
    CORRECTION_MEAN,
    CORRECTION_SAMPLE_SIZE,
    ROLLOUT_K3_KL,
    ROLLOUT_KL,
)
from rljob_trainer.workers.rollout_mismatch import add_agreement, agreement_metrics
from rljob_trainer.workers.update_loss import update_metrics, weight_sums
from rljob_trainer.workers.update_sums import UpdateSums

TRUNCATED_TOKEN, TRUNCATED_SEQUENCE, MASKED_TOKEN, MASKED_SEQUENCE = (
    RolloutCorrectionType.TOKEN_TRUNCATED,
    RolloutCorrectionType.SEQUENCE_TRUNCATED,
    RolloutCorrectionType.TOKEN_MASKED,
    RolloutCorrectionType.SEQUENCE_MASKED,
)


def test_every_golden_case_is_compared() -> None:
    assert set(correction_cases.CORRECTIONS) == {*correction_cases.WEIGHTS, *correction_cases.REJECTIONS}


@pytest.mark.parametrize("case", correction_cases.WEIGHT_CASES, ids=str)
def test_weights_equal_verls(case: verl_cases.GoldenCase) -> None:
    verl_cases.check(case)


@pytest.mark.parametrize("case", correction_cases.MASK_CASES, ids=str)
def test_masks_equal_verls(case: verl_cases.GoldenCase) -> None:
    verl_cases.check(case)


@pytest.mark.parametrize("name", correction_cases.WEIGHTS)
def test_metrics_equal_verls(context: WorkerContext, name: str) -> None:
    engine = replays.replayed_run(replays.Replay(), context).actor.engine
    golden, weights = correction_cases.CORRECTIONS[name]["metrics"], correction_cases.WEIGHTS[name]
    agreement, sums = UpdateSums(), UpdateSums()
    # In two parts, as in two micro-batches.
    for part in correction_cases.LOG_RATIOS_N.tensor_split(2):
        add_agreement(agreement, part)
    for part in correction_weights(correction_cases.LOG_RATIOS_N, verl_cases.ROWS, weights).tensor_split(2):
        sums.add(weight_sums(part, weights.max_ratio), len(part))
    found = agreement_metrics(agreement, engine) | update_metrics(sums, engine, 1)
    for metric in (CORRECTION_MEAN, CORRECTION_SAMPLE_SIZE, ROLLOUT_KL, ROLLOUT_K3_KL):
        assert found[metric] == pytest.approx(golden[metric], abs=2e-6)


def slow_weights(rows: list[list[float]], weights: RolloutCorrection) -> list[float]:
    found = []
    highest, is_of_sequence = weights.max_ratio, weights.type in (TRUNCATED_SEQUENCE, MASKED_SEQUENCE)
    assert highest is not None
    for row in rows:
        for value in row:
            ratio = math.exp(max(-20.0, min(20.0, sum(row) if is_of_sequence else value)))
            is_inside = ratio <= highest and (weights.min_ratio is None or ratio >= weights.min_ratio)
            if weights.min_ratio is None:
                found.append(min(ratio, highest))
            else:
                found.append(ratio if is_inside else 0.0)
    return found


def slow_values(rows: list[list[float]], rejection: RolloutRejection) -> list[float]:
    """The value that is compared with the bounds, for each token."""
    found = []
    for row in rows:
        held = [max(-20.0, min(20.0, value)) for value in row]
        each = {
            RejectionEstimator.K1: held,
            RejectionEstimator.K2: [value * value / 2 for value in held],
            RejectionEstimator.K3: [math.exp(value) - 1 - value for value in held],
        }[rejection.estimator]
        of_row = {
            RejectionLevel.TOKEN: each,
            RejectionLevel.SEQUENCE_SUM: [sum(each)] * len(row),
            RejectionLevel.SEQUENCE_MEAN: [sum(each) / max(len(row), 1)] * len(row),
            RejectionLevel.SEQUENCE_MAX: [max(each, default=0.0)] * len(row),
        }[rejection.level]
        if rejection.estimator is RejectionEstimator.K1:
            of_row = [math.exp(max(-20.0, min(20.0, value))) for value in of_row]
        found += of_row
    return found


# Eighths: sums are exact, so that no ratio is at a bound by rounding alone.
LOG_RATIO_ROWS = st.lists(st.lists(st.integers(-200, 200).map(lambda n: n / 8), max_size=5), min_size=1, max_size=5)
BOUNDS = st.tuples(st.floats(1.01, 9.0), st.floats(0.01, 0.99))


@settings(deadline=None, max_examples=150)
@given(LOG_RATIO_ROWS, BOUNDS, st.sampled_from([TRUNCATED_TOKEN, TRUNCATED_SEQUENCE, MASKED_TOKEN, MASKED_SEQUENCE]))
def test_weights_match_their_definitions(
    rows: list[list[float]], bounds: tuple[float, float], chosen: RolloutCorrectionType
) -> None:
    highest, lowest = bounds
    weights = RolloutCorrection(
        type=chosen, max_ratio=highest, min_ratio=lowest if chosen in (MASKED_TOKEN, MASKED_SEQUENCE) else None
    )
    found_N = correction_weights(flat_rows(rows), segments_of(rows), weights)
    torch.testing.assert_close(
        found_N, torch.tensor(slow_weights(rows, weights), dtype=torch.float64), rtol=1e-9, atol=0
    )


@settings(deadline=None, max_examples=150)
@given(LOG_RATIO_ROWS, BOUNDS, st.sampled_from(list(RejectionLevel)), st.sampled_from(list(RejectionEstimator)))
def test_masks_match_their_definitions(
    rows: list[list[float]], bounds: tuple[float, float], level: RejectionLevel, estimator: RejectionEstimator
) -> None:
    highest, lowest = bounds
    rejection = RolloutRejection(
        level=level, estimator=estimator, max=highest, min=lowest if estimator is RejectionEstimator.K1 else None
    )
    found = is_kept(flat_rows(rows), segments_of(rows), rejection).tolist()
    low = -math.inf if rejection.min is None else rejection.min
    assert found == [low <= value <= highest for value in slow_values(rows, rejection)]


def flat_rows(rows: list[list[float]]) -> Tensor:
    return torch.tensor([value for row in rows for value in row], dtype=torch.float64)


def segments_of(rows: list[list[float]]) -> Segments:
    return Segments.of([len(row) for row in rows], torch.device("cpu"))
