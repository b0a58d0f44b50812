"""Distributions of response lengths, compared with many drawn samples and with the numbers they were made from."""

from __future__ import annotations

import math
import random

import pytest

from rljob_planner.timing.lengths import Lengths, lengths_of
from rljob_planner.workload import TokenLengths


def drawn(lengths: Lengths, count: int = 100_000) -> list[float]:
    draw = random.Random(0)
    return [min(lengths.cap, draw.lognormvariate(lengths.location, lengths.scale)) for _ in range(count)]


@pytest.mark.parametrize("mean", [50.0, 400.0, 900.0])
@pytest.mark.parametrize("cv", [0.35, 0.8, 1.5])
def test_the_mean_is_that_of_truncated_lengths(mean: float, cv: float) -> None:
    found = lengths_of(TokenLengths(10, 10, mean, 1000, response_cv=cv))
    sample = drawn(found)
    assert found.mean == pytest.approx(mean, rel=1e-6)
    assert sum(sample) / len(sample) == pytest.approx(mean, rel=0.01)
    assert found.mean_square == pytest.approx(sum(each * each for each in sample) / len(sample), rel=0.03)
    assert found.clipped_share == pytest.approx(sum(each >= 1000 for each in sample) / len(sample), abs=0.005)


def test_the_truncated_share_gives_the_spread() -> None:
    found = lengths_of(TokenLengths(10, 10, 250.0, 1000, clipped_share=0.02))
    assert found.mean == pytest.approx(250.0, rel=1e-6)
    assert found.clipped_share == pytest.approx(0.02, rel=1e-3)


def test_all_responses_at_the_limit() -> None:
    found = lengths_of(TokenLengths(10, 10, 100.0, 100))
    assert (found.mean, found.quantile(0.01), found.clipped_share) == (100.0, pytest.approx(100.0), 1.0)


def test_another_mean_replaces_the_given_one() -> None:
    given = TokenLengths(10, 10, 100.0, 1000)
    assert lengths_of(given, 300.0).mean == pytest.approx(300.0)


def test_the_longest_of_more_responses_is_longer_up_to_the_limit() -> None:
    found = Lengths(10_000, location=5.0, scale=0.8)
    longest = [found.longest_of(count) for count in (1, 10, 100, 1000, 10**9)]
    assert longest == sorted(longest)
    assert longest[0] == pytest.approx(math.exp(5.0))
    assert longest[-1] <= 10_000
