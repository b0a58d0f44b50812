"""The largest numbers across several workers, and random draws: exact, and the same however tokens are distributed.

Legend: N response tokens of one worker.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rljob_testing.training import token_rows
from rljob_trainer.algorithms.interfaces import OneWorker, Reduce
from rljob_trainer.algorithms.selection import Threshold, drawn_keys, largest, nth_largest, ordered_keys
from rljob_trainer.algorithms.several_workers import on_workers


def drawn(logprobs_N: Tensor, *lengths: int) -> Tensor:
    """Draws for all tokens."""
    return drawn_keys(logprobs_N, token_rows.segments_of(*lengths), torch.arange(len(logprobs_N)))


KEY = st.one_of(st.integers(0, 2**32 - 1), st.integers(2**31 - 3, 2**31 + 3), st.integers(0, 3))
WORKERS = st.lists(st.lists(KEY, max_size=6), min_size=1, max_size=3)


@settings(max_examples=60, deadline=None)
@given(WORKERS, st.integers(1, 20))
def test_the_nth_largest_equals_that_of_all_sorted(workers: list[list[int]], nth: int) -> None:
    def bound(keys: list[int], reduce: Reduce) -> Threshold:
        return nth_largest(torch.tensor(keys, dtype=torch.int64), nth, reduce)

    ordered = sorted((key for keys in workers for key in keys), reverse=True)
    key = ordered[min(nth, len(ordered)) - 1] if ordered else -1
    expected = Threshold(key, sum(each > key for each in ordered), ordered.count(key))
    assert set(on_workers(workers, bound)) == {expected if ordered else Threshold(-1, 0, 0)}


@settings(max_examples=60, deadline=None)
@given(WORKERS, st.integers(1, 20))
def test_the_exact_number_is_selected_and_ties_are_drawn(workers: list[list[int]], num_wanted: int) -> None:
    # Draws that all differ, and do not depend on the worker.
    draws = iter((index * 7919) % 1009 for index in range(1, 99))
    parts = [[(key % 1000, next(draws)) for key in keys] for keys in workers]

    def taken(part: list[tuple[int, int]], reduce: Reduce) -> list[tuple[int, int]]:
        values_N, draws_N = (torch.tensor([each[index] for each in part], dtype=torch.int64) for index in range(2))
        indices_C = largest(values_N.float(), num_wanted, reduce, lambda indices_C: draws_N[indices_C])
        return [part[index] for index in indices_C.tolist()]

    found = sorted(each for mine in on_workers(parts, taken) for each in mine)
    assert found == sorted((each for part in parts for each in part), reverse=True)[:num_wanted][::-1]


def test_nothing_is_drawn_without_a_tie() -> None:
    def draw(_: Tensor) -> Tensor:
        raise AssertionError

    values_N = torch.tensor([5.0, 9.0, 9.0, 7.0])
    assert sorted(largest(values_N, 2, OneWorker(), draw).tolist()) == [1, 2]
    assert sorted(largest(values_N, 9, OneWorker(), draw).tolist()) == [0, 1, 2, 3]


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=2, max_size=8))
def test_keys_have_the_order_of_the_numbers(numbers: list[float]) -> None:
    values_N = torch.tensor(numbers)
    keys_N = ordered_keys(values_N)
    assert int(keys_N.min()) >= 0
    assert int(keys_N.max()) < 2**32
    assert torch.equal(keys_N[:, None] < keys_N, values_N[:, None] < values_N)


def test_draws_depend_on_the_response_alone() -> None:
    lengths = (40, 1, 0, 300, 40)
    logprobs_N = -torch.rand(sum(lengths), generator=torch.Generator().manual_seed(3))
    rows = torch.split_with_sizes(logprobs_N, list(lengths))
    together = torch.split_with_sizes(drawn(logprobs_N, *lengths), list(lengths))
    for row, length, keys in zip(rows, lengths, together, strict=True):
        assert torch.equal(drawn(row, length), keys)
    reordered = torch.cat([rows[3], rows[0]])
    assert torch.equal(drawn(reordered, 300, 40), torch.cat([together[3], together[0]]))


def test_tokens_of_equal_numbers_draw_differently_and_a_last_token_changes_all() -> None:
    same_N = torch.full((50,), -0.5)
    keys_N = drawn(same_N, 50)
    assert len(set(keys_N.tolist())) == 50
    other_N = drawn(torch.cat([same_N[:-1], torch.tensor([-0.25])]), 50)
    assert not bool((keys_N == other_N).any())
    # Two swapped tokens make another response.
    swapped_N = torch.tensor([-0.25, -0.5, -1.0])
    assert not torch.equal(drawn(swapped_N, 3), drawn(swapped_N.flip(0), 3).flip(0))


@pytest.mark.parametrize("index", range(3))
def test_draws_are_uniform(index: int) -> None:
    """In the upper bits, in all bits, and from token to token."""
    num_tokens = 200_000
    logprobs_N = -torch.rand(num_tokens, generator=torch.Generator().manual_seed(7)).round(decimals=2)
    keys_N = drawn(logprobs_N, *[200] * 1000)
    if index == 2:
        keys_N = (keys_N[1:] - keys_N[:-1]) % 2**32
    bins_N = (keys_N >> 24 if index == 0 else keys_N & 0xFF) if index < 2 else keys_N >> 24
    counts = torch.bincount(bins_N, minlength=256).double()
    chi_squared = float(((counts - counts.mean()) ** 2 / counts.mean()).sum())
    # 255 degrees of freedom: 255 with a standard deviation of 22.6.
    assert 165 < chi_squared < 345
