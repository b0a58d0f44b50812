"""Micro-batches: within the token budget, similar lengths together, the same number on every rank; rows flat or
padded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_trainer.engines.train.micro_batching import plan_micro_batches
from rljob_trainer.errors import ConfigurationError

either_form = pytest.mark.parametrize("is_padded", [True, False], ids=["padded", "flat"])


def same(count: int) -> int:
    return count


@pytest.mark.parametrize(
    ("is_padded", "plan"),
    [
        # 10 alone (2 x 10 > 16); 8 and 5 cost 16; 3, 2 and 2 cost 9.
        (True, [[1], [3, 4], [0, 2, 5]]),
        # 10 alone (10 + 8 > 16); 8, 5 and 3 cost 16; 2 and 2 cost 4.
        (False, [[1], [3, 4, 0], [2, 5]]),
    ],
    ids=["padded", "flat"],
)
def test_rows_are_packed_longest_first(is_padded: bool, plan: list[list[int]]) -> None:
    assert plan_micro_batches([3, 10, 2, 8, 5, 2], 16, same, is_padded=is_padded) == plan


@either_form
def test_missing_micro_batches_are_added_empty(is_padded: bool) -> None:
    assert plan_micro_batches([4], 16, lambda _: 3, is_padded=is_padded) == [[0], [], []]
    assert plan_micro_batches([0, 0], 16, lambda _: 1, is_padded=is_padded) == [[]]


@either_form
def test_a_row_longer_than_the_budget_is_rejected(is_padded: bool) -> None:
    with pytest.raises(ConfigurationError, match=r"maxTokensPerMicroBatch.*17 tokens, limit 16"):
        plan_micro_batches([1, 17], 16, same, is_padded=is_padded)


@either_form
@given(lengths=st.lists(st.integers(0, 50), max_size=40), budget=st.integers(50, 200))
def test_every_row_is_in_one_batch_and_no_batch_exceeds_the_budget(
    is_padded: bool, lengths: list[int], budget: int
) -> None:
    plan = plan_micro_batches(lengths, budget, same, is_padded=is_padded)
    assert sorted(row for rows in plan for row in rows) == [row for row, length in enumerate(lengths) if length]
    assert all(plan)
    for rows in plan:
        of_rows = [lengths[row] for row in rows]
        # For a single row that is its own length, which the budget admits or `plan_micro_batches` rejects.
        assert (len(rows) * max(of_rows) if is_padded else sum(of_rows)) <= budget
    in_order = [lengths[row] for rows in plan for row in rows]
    assert in_order == sorted(in_order, reverse=True)
