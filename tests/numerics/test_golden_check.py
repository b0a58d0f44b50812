"""The comparison with the golden numbers can fail."""

from __future__ import annotations

import pytest
import torch

from rljob_testing.golden import verl_cases


def test_a_wrong_number_is_named_and_measured() -> None:
    near = verl_cases.number("loss", 1.0 + 4e-7, 1.0, atol=1e-6)
    case = verl_cases.GoldenCase("loss X", "x", lambda: [near, verl_cases.number("share", 0.25, 0.5, rtol=1e-5)])
    with pytest.raises(AssertionError, match="share: "):
        verl_cases.check(case)
    assert verl_cases.largest_difference(case) == 0.25
    verl_cases.check(verl_cases.GoldenCase("loss X", "x", lambda: [near]))


def test_a_wrong_tensor_is_found() -> None:
    off = verl_cases.Comparison("gradient", torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.1]), rtol=1e-6, atol=2e-7)
    with pytest.raises(AssertionError, match="gradient: "):
        verl_cases.check(verl_cases.GoldenCase("loss X", "x", lambda: [off]))
