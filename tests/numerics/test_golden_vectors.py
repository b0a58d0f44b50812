"""Our losses, KL estimates and aggregations against numbers that verl 0.9.1 computed (`rljob_testing.golden`)."""

from __future__ import annotations

import pytest

from rljob_api.v1alpha1.algorithm import LossAggregation
from rljob_testing.golden import GOLDEN, LOSSES, GoldenCase, check
from rljob_testing.golden_losses import (
    AGGREGATION_CASES,
    AGGREGATIONS,
    CLIPPED_CASES,
    KL_CASES,
    POLICY_LOSS_CASES,
    POLICY_LOSSES,
)


@pytest.mark.parametrize("case", KL_CASES, ids=str)
def test_kl_estimates_and_their_gradients(case: GoldenCase) -> None:
    check(case)


@pytest.mark.parametrize("case", AGGREGATION_CASES, ids=str)
def test_aggregation(case: GoldenCase) -> None:
    check(case)


@pytest.mark.parametrize("case", CLIPPED_CASES, ids=str)
def test_clipped_surrogate(case: GoldenCase) -> None:
    check(case)


@pytest.mark.parametrize("case", POLICY_LOSS_CASES, ids=str)
def test_policy_losses_and_their_gradients(case: GoldenCase) -> None:
    check(case)


def test_every_golden_number_is_compared() -> None:
    assert set(POLICY_LOSSES) == set(LOSSES["policy_loss"])
    assert {case.name for case in KL_CASES} == {*GOLDEN["kl"], *LOSSES["kl"]}
    assert set(AGGREGATIONS.values()) == set(LossAggregation)
