"""Our losses, KL estimates and aggregations against numbers that verl 0.9.1 computed (`rljob_testing.golden`)."""

from __future__ import annotations

import pytest

from rljob_api.v1alpha1.algorithm import LossAggregation
from rljob_testing.golden import loss_cases, verl_cases


@pytest.mark.parametrize("case", loss_cases.KL_CASES, ids=str)
def test_kl_estimates_and_their_gradients_equal_verls(case: verl_cases.GoldenCase) -> None:
    verl_cases.check(case)


@pytest.mark.parametrize("case", loss_cases.AGGREGATION_CASES, ids=str)
def test_aggregation_equals_verls(case: verl_cases.GoldenCase) -> None:
    verl_cases.check(case)


@pytest.mark.parametrize("case", loss_cases.CLIPPED_CASES, ids=str)
def test_clipped_surrogate_equals_verls(case: verl_cases.GoldenCase) -> None:
    verl_cases.check(case)


@pytest.mark.parametrize("case", loss_cases.POLICY_LOSS_CASES, ids=str)
def test_policy_losses_and_their_gradients_equal_verls(case: verl_cases.GoldenCase) -> None:
    verl_cases.check(case)


def test_every_golden_number_is_compared() -> None:
    assert set(loss_cases.POLICY_LOSSES) == set(verl_cases.LOSSES["policy_loss"])
    assert {case.name for case in loss_cases.KL_CASES} == {*verl_cases.GOLDEN["kl"], *verl_cases.LOSSES["kl"]}
    assert set(loss_cases.AGGREGATIONS.values()) == set(LossAggregation)
