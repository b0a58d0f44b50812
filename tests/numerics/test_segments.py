"""Rows of different lengths: compared with loops over Python lists, and differentiated numerically."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rljob_testing.training import token_rows
from rljob_trainer.algorithms.segments import Segments

ROWS = st.lists(st.lists(st.integers(-1000, 1000), max_size=5), max_size=8)


def test_segments_match_a_case_by_hand() -> None:
    segments = token_rows.segments_of(2, 0, 3)
    values_N = torch.tensor([1.0, 2.0, 10.0, 20.0, 60.0])
    assert segments.sum(values_N).tolist() == [3.0, 0.0, 90.0]
    assert segments.mean(values_N).tolist() == [1.5, 0.0, 30.0]
    assert segments.spread(torch.tensor([7.0, 8.0, 9.0])).tolist() == [7.0, 7.0, 9.0, 9.0, 9.0]
    assert segments.positions_N.tolist() == [0, 1, 0, 1, 2]
    assert (segments.num_rows, segments.num_values, segments.num_nonempty_rows) == (3, 5, 2)


@given(ROWS)
def test_segments_equal_loops(rows: list[list[int]]) -> None:
    segments = token_rows.segments_of(*map(len, rows))
    values_N = torch.tensor([float(value) for row in rows for value in row])
    assert segments.sum(values_N).tolist() == [sum(row) for row in rows]
    means = [sum(row) / len(row) if row else 0.0 for row in rows]
    assert segments.mean(values_N).tolist() == pytest.approx(means, rel=1e-6)
    spread_N = segments.spread(torch.tensor([float(len(row)) for row in rows]))
    assert spread_N.tolist() == [len(row) for row in rows for _ in row]
    assert segments.positions_N.tolist() == [position for row in rows for position in range(len(row))]


def test_gradients_equal_finite_differences() -> None:
    segments = token_rows.segments_of(2, 0, 3)
    values_N = torch.randn(5, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    values_B = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(segments.sum, (values_N,))
    assert torch.autograd.gradcheck(segments.mean, (values_N,))
    assert torch.autograd.gradcheck(segments.spread, (values_B,))
    # As in a loss on whole sequences: a mean, a function of it, and back to the tokens.
    assert torch.autograd.gradcheck(lambda x_N: segments.spread(segments.mean(x_N).exp()) * x_N, (values_N,))


def test_a_row_is_bitwise_equal_beside_any_other_rows() -> None:
    generator = torch.Generator().manual_seed(1)
    lengths = [700, 3, 0, 4096, 1]
    values_N = torch.randn(sum(lengths), generator=generator)
    together_B = token_rows.segments_of(*lengths).sum(values_N)
    alone = [
        float(token_rows.segments_of(length).sum(row_T))
        for length, row_T in zip(lengths, torch.split_with_sizes(values_N, lengths), strict=True)
    ]
    assert together_B.tolist() == alone
    assert torch.equal(token_rows.segments_of(*lengths).sum(values_N), together_B)


def test_long_rows_are_summed_in_float64() -> None:
    # In float32, 2^24 + 1 is 2^24.
    values_N = torch.ones(4097)
    values_N[0] = 2.0**24
    assert token_rows.segments_of(4097).sum(values_N).item() == 2.0**24 + 4096


def test_negative_lengths_are_rejected() -> None:
    with pytest.raises(ValueError, match="cannot have a length of -1"):
        Segments.of([2, -1], token_rows.CPU)
