"""Sequences are distributed so that no worker has much more work than the others."""

from __future__ import annotations

from itertools import product

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_trainer.batch.balancing import balanced_partitions
from rljob_trainer.errors import DataError

Lengths = npt.NDArray[np.int64]


def fullest(lengths: list[int] | Lengths, partitions: list[list[int]]) -> int:
    return max(sum(int(lengths[item]) for item in partition) for partition in partitions)


def best_possible(lengths: list[int], num_partitions: int) -> int:
    """The sum of the fullest partition under the best of all possible distributions."""
    best = sum(lengths)
    for numbers in product(range(num_partitions), repeat=len(lengths)):
        partitions = [[item for item, number in enumerate(numbers) if number == n] for n in range(num_partitions)]
        if len({len(partition) for partition in partitions}) == 1:
            best = min(best, fullest(lengths, partitions))
    return best


def response_lengths(seed: int) -> Lengths:
    return np.maximum(1, np.random.default_rng(seed).lognormal(6.5, 0.9, 8192)).astype(np.int64)


@pytest.mark.parametrize("num_partitions", [8, 64])
@pytest.mark.parametrize("seed", range(3))
def test_8192_responses_are_balanced_to_a_ten_thousandth(seed: int, num_partitions: int) -> None:
    lengths = response_lengths(seed)
    partitions = balanced_partitions(lengths, num_partitions)
    assert fullest(lengths, partitions) <= 1.0001 * lengths.sum() / num_partitions
    assert {len(partition) for partition in partitions} == {8192 // num_partitions}


def test_one_response_longer_than_a_share_gets_the_shortest_companions() -> None:
    lengths = response_lengths(0)
    lengths[5] = 10_000_000
    partitions = balanced_partitions(lengths, 64)
    assert fullest(lengths, partitions) == 10_000_000 + np.sort(lengths)[:127].sum()


def test_exchanges_improve_on_longest_first() -> None:
    # Longest first gives 15 + 8 + 8 = 31 and 14 + 12 + 1 = 27.
    assert balanced_partitions([12, 8, 1, 8, 14, 15], 2) == [[0, 1, 3], [2, 4, 5]]


@settings(max_examples=60)
@given(lengths=st.lists(st.integers(0, 30), min_size=1, max_size=7), num_partitions=st.integers(1, 3))
def test_no_distribution_of_few_lengths_is_much_better(lengths: list[int], num_partitions: int) -> None:
    if len(lengths) < num_partitions:
        return
    lengths = lengths[: len(lengths) // num_partitions * num_partitions]
    partitions = balanced_partitions(lengths, num_partitions)
    assert fullest(lengths, partitions) <= 1.2 * best_possible(lengths, num_partitions)


def test_few_lengths_are_mostly_distributed_optimally() -> None:
    random = np.random.default_rng(1)
    excess = []
    for _ in range(60):
        lengths = random.lognormal(6.5, 0.9, 6).astype(int).tolist()
        excess.append(fullest(lengths, balanced_partitions(lengths, 2)) / best_possible(lengths, 2) - 1)
    assert np.mean(np.array(excess) == 0) > 0.9
    assert np.mean(excess) < 0.005


@settings(max_examples=200)
@given(
    lengths=st.lists(st.one_of(st.integers(0, 3), st.integers(0, 10**6)), min_size=1, max_size=60),
    num_partitions=st.integers(1, 8),
)
def test_every_position_is_in_one_partition(lengths: list[int], num_partitions: int) -> None:
    lengths = lengths * num_partitions
    partitions = balanced_partitions(lengths, num_partitions)
    assert len(partitions) == num_partitions
    assert sorted(item for partition in partitions for item in partition) == list(range(len(lengths)))
    assert all(partition == sorted(partition) for partition in partitions)
    assert {len(partition) for partition in partitions} == {len(lengths) // num_partitions}
    assert partitions == balanced_partitions(np.array(lengths, dtype=np.int32), num_partitions)


def test_lengths_that_cannot_be_distributed_are_rejected() -> None:
    for lengths, num_partitions in (([1, 2], 3), ([1, 2], 0), ([1, 2, 3, 4, 5], 2)):
        with pytest.raises(DataError, match=r"\d partitions; pad first"):
            balanced_partitions(lengths, num_partitions)
    with pytest.raises(DataError, match=r"negative \(seen: -4\)"):
        balanced_partitions([1, -4], 2)
    with pytest.raises(DataError, match=r"integers \(seen: float64, shape \[2\]\)"):
        balanced_partitions(np.array([1.0, 2.0]), 2)
