"""Micro-batches: within the token budget, similar lengths together, equally many everywhere."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_trainer.engines.train.micro_batches import plan_micro_batches
from rljob_trainer.errors import ConfigurationError


def same(count: int) -> int:
    return count


def test_rows_are_packed_longest_first() -> None:
    # 10 alone (2 x 10 > 16); 8 and 5 cost 16; 3, 2 and 2 cost 9.
    assert plan_micro_batches([3, 10, 2, 8, 5, 2], 16, same, is_padded=True) == [[1], [3, 4], [0, 2, 5]]


def test_missing_micro_batches_are_added_empty() -> None:
    assert plan_micro_batches([4], 16, lambda _: 3, is_padded=True) == [[0], [], []]


def test_a_row_longer_than_the_budget_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"maxTokensPerMicroBatch.*17 tokens, limit 16"):
        plan_micro_batches([1, 17], 16, same, is_padded=True)


@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=40), budget=st.integers(50, 200))
def test_every_row_once_and_no_batch_over_budget(lengths: list[int], budget: int) -> None:
    plan = plan_micro_batches(lengths, budget, same, is_padded=True)
    assert sorted(row for rows in plan for row in rows) == list(range(len(lengths)))
    assert all(len(rows) * max(lengths[row] for row in rows) <= budget for rows in plan)
