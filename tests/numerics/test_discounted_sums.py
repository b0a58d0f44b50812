"""Sums of later values in a row against a loop from its end, for rows and blocks that end together or separately."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rljob_testing.training import token_rows
from rljob_trainer.algorithms.discounted_sums import WIDTH, discounted_sums, last_positions

LENGTH = st.one_of(
    st.integers(min_value=0, max_value=5),
    st.integers(min_value=0, max_value=3 * WIDTH),
    st.sampled_from([WIDTH - 1, WIDTH, WIDTH + 1, 2 * WIDTH]),
)
LENGTHS = st.lists(LENGTH, min_size=1, max_size=10)
FACTOR = st.one_of(st.sampled_from([0.0, 0.5, 0.95, 0.99, 1.0]), st.floats(min_value=0.0, max_value=1.0))


def slow_sums(values: list[float], lengths: list[int], factor: float) -> list[float]:
    found, stop = [0.0] * len(values), 0
    for length in lengths:
        start, stop, following = stop, stop + length, 0.0
        for position in reversed(range(start, stop)):
            following = values[position] + factor * following
            found[position] = following
    return found


def normal(count: int) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(count), dtype=torch.float64)


def test_sums_match_a_case_by_hand() -> None:
    sums_N = discounted_sums(torch.tensor([1.0, 2.0, 4.0, 8.0]), token_rows.segments_of(3, 0, 1), 0.5)
    assert sums_N.tolist() == [3.0, 4.0, 4.0, 8.0]
    assert last_positions(token_rows.segments_of(3, 0, 1)).tolist() == [2, 3]
    assert discounted_sums(torch.zeros(0), token_rows.segments_of(0, 0), 0.5).tolist() == []
    assert discounted_sums(torch.zeros(0), token_rows.segments_of(), 0.5).tolist() == []


@settings(max_examples=60)
@given(LENGTHS, FACTOR)
@example([WIDTH, WIDTH, 2 * WIDTH], 0.9)
@example([1, WIDTH * WIDTH + 1], 0.999)
@example([WIDTH * WIDTH - 1, 1, WIDTH], 1.0)
def test_sums_equal_a_loop_from_the_end_of_each_row(lengths: list[int], factor: float) -> None:
    values_N = normal(sum(lengths))
    before_N = values_N.clone()
    sums_N = discounted_sums(values_N, token_rows.segments_of(*lengths), factor)
    assert sums_N.tolist() == pytest.approx(slow_sums(values_N.tolist(), lengths, factor), rel=1e-10, abs=1e-10)
    assert torch.equal(values_N, before_N)


@pytest.mark.parametrize("factor", [1.0, 0.99, 0.95, 0.5])
def test_long_rows_in_float32_are_as_exact_as_the_type(factor: float) -> None:
    lengths = [4096, 3000, 4096, 17]
    values_N = normal(sum(lengths)).float()
    sums_N = discounted_sums(values_N, token_rows.segments_of(*lengths), factor)
    expected_N = torch.tensor(slow_sums(values_N.tolist(), lengths, factor), dtype=torch.float64)
    assert sums_N.dtype == torch.float32
    # Of sums of up to 4,096 values: their largest magnitudes.
    assert (sums_N - expected_N).abs().max() <= 1e-6 * expected_N.abs().max()
    torch.testing.assert_close(sums_N.double(), expected_N, rtol=1e-5, atol=1e-5)


def test_a_discounted_sum_does_not_cross_rows() -> None:
    """Not even by rounding, if one row has numbers that are a billion times as large."""
    lengths = [100, 100, 100]
    values_N = normal(300).float()
    alone_N = discounted_sums(values_N[100:200].clone(), token_rows.segments_of(100), 0.99)
    values_N[:100] *= 1e9
    values_N[200:] *= 1e9
    torch.testing.assert_close(discounted_sums(values_N, token_rows.segments_of(*lengths), 0.99)[100:200], alone_N)
