"""Every advantage against numbers that verl 0.9.1 computed; `rljob_testing.golden` says what they are."""

from __future__ import annotations

import pytest

from rljob_api.v1alpha1.advantage import AdvantageType
from rljob_testing.golden import GoldenCase, check
from rljob_testing.golden_advantages import ADVANTAGE_CASES


@pytest.mark.parametrize("case", ADVANTAGE_CASES, ids=str)
def test_is_verls(case: GoldenCase) -> None:
    check(case)


def test_cases_are_of_advantages() -> None:
    others = {"discounted returns", "whitening"}
    assert {case.function for case in ADVANTAGE_CASES} - others <= set(AdvantageType)
