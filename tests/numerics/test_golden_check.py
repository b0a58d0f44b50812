"""What compares with the golden numbers can fail."""

from __future__ import annotations

import pytest
import torch

from rljob_testing.golden import Comparison, GoldenCase, check, largest_difference, number


def test_a_number_that_is_off_is_named_and_measured() -> None:
    near = number("loss", 1.0 + 4e-7, 1.0, atol=1e-6)
    case = GoldenCase("loss X", "x", lambda: [near, number("share", 0.25, 0.5, rtol=1e-5)])
    with pytest.raises(AssertionError, match="share: "):
        check(case)
    assert largest_difference(case) == 0.25
    check(GoldenCase("loss X", "x", lambda: [near]))


def test_a_tensor_that_is_off_is_seen() -> None:
    off = Comparison("gradient", torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.1]), rtol=1e-6, atol=2e-7)
    with pytest.raises(AssertionError, match="gradient: "):
        check(GoldenCase("loss X", "x", lambda: [off]))
