"""The distribution of a run's response lengths, from the few numbers in its metrics."""

from __future__ import annotations

from random import Random
from statistics import fmean

import pytest

from rljob_planner.advice.run_facts import ObservedLengths
from rljob_planner.timing.lengths import lengths_of
from rljob_planner.workload import TokenLengths
from rljob_testing.messages import Mentions


def drawn(mu: float, sigma: float, limit: int, count: int, seed: int = 0) -> list[int]:
    random = Random(seed)
    return [min(limit, max(1, round(random.lognormvariate(mu, sigma)))) for _ in range(count)]


def seen(lengths: list[int], limit: int) -> ObservedLengths:
    """The numbers in the trainer's metrics."""
    return ObservedLengths(20.0, fmean(lengths), max(lengths), sum(each >= limit for each in lengths) / len(lengths))


def planned(limit: int) -> TokenLengths:
    return TokenLengths(prompt_mean=32, prompt_max=64, response_mean=limit / 2, response_max=limit)


@pytest.mark.parametrize(("mu", "sigma"), [(5.0, 0.5), (6.0, 0.7), (6.5, 0.9), (6.9, 0.4)])
def test_a_truncated_log_normal_is_recovered(mu: float, sigma: float) -> None:
    """Compares mean, mean of squares (which attention depends on), median and truncated share of 5,000 lengths."""
    limit = 1024
    lengths = sorted(drawn(mu, sigma, limit, 5000))
    found = lengths_of(seen(lengths, limit).token_lengths(planned(limit), len(lengths)))
    assert found.mean == pytest.approx(fmean(lengths), rel=0.01)
    assert found.mean_square == pytest.approx(fmean(each**2 for each in lengths), rel=0.05)
    assert found.quantile(0.5) == pytest.approx(lengths[2500], rel=0.05)
    assert found.clipped_share == pytest.approx(seen(lengths, limit).clip_ratio, abs=0.01)
    assert found.longest_of(5000) == pytest.approx(max(lengths), rel=0.3)


def test_without_truncation_the_longest_response_gives_the_spread() -> None:
    """20 steps with 500 responses each."""
    steps = [seen(drawn(4.0, 0.6, 10_000, 500, seed), 10_000) for seed in range(20)]
    observed = ObservedLengths.together(steps)
    assert observed.clip_ratio == 0
    found = observed.token_lengths(planned(10_000), 500)
    assert found.response_cv == pytest.approx(0.658, rel=0.1)
    assert lengths_of(found).longest_of(500) == pytest.approx(observed.response_max, rel=0.02)


@pytest.mark.parametrize("observed", [ObservedLengths(6, 16.0, 16.0, 1.0), ObservedLengths(6, 5.0, 5.0, 0.0)])
def test_equal_lengths_stay_equal(observed: ObservedLengths) -> None:
    found = lengths_of(observed.token_lengths(planned(16), 512))
    assert found.mean == pytest.approx(observed.response_mean, rel=0.01)
    assert found.longest_of(512) == pytest.approx(observed.response_mean, rel=0.05)


def test_limits_stay_and_the_assumption_shows_the_measured_lengths() -> None:
    found = ObservedLengths(40.0, 100.0, 400.0, 0.0).token_lengths(planned(512), 512)
    assert (found.prompt_mean, found.prompt_max, found.response_mean, found.response_max) == (40.0, 64, 100.0, 512)
    assert found.response_mean_low is None
    assert found.assumption == Mentions("mean 100", "longest 400", "0.0% truncated at 512")


@pytest.mark.parametrize(
    ("observed", "prompt", "response"),
    [
        (ObservedLengths(0.0, 0.0, 0.0, 0.0), 32.0, 512.0),
        (ObservedLengths(-1.0, -1.0, -1.0, -1.0), 32.0, 512.0),
        (ObservedLengths(1e300, 1e300, 1e300, 1e300), 64.0, 1024.0),
        (ObservedLengths(1e-300, 1e-300, 1e-300, 1e-300), 1.0, 1.0),
    ],
)
def test_impossible_lengths_become_the_planned_ones_or_the_limits(
    observed: ObservedLengths, prompt: float, response: float
) -> None:
    found = observed.token_lengths(planned(1024), 512)
    assert (found.prompt_mean, found.response_mean) == (prompt, response)
    assert lengths_of(found).mean == pytest.approx(response, rel=0.01)
