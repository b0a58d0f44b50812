"""Micro-batches: within the token budget, similar lengths together, the same number on every rank; rows flat or
padded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rljob_testing.messages import Mentions
from rljob_trainer.engines.train import micro_batching
from rljob_trainer.engines.train.attention import AttentionPlan
from rljob_trainer.engines.train.layout import ParallelLayout
from rljob_trainer.engines.train.micro_batching import micro_batches_of, plan_micro_batches
from rljob_trainer.engines.train.settings import TrainEngineSettings
from rljob_trainer.engines.train.token_batch import batch_of_rows
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


FLAT = AttentionPlan(is_flat=True, implementation="", reason="", max_row_tokens=None)
PADDED = replace(FLAT, is_flat=False)


def of_plan(lengths: list[int], numbers: list[int] | None, attention: AttentionPlan = FLAT) -> list[list[int]]:
    """The micro-batches, of at most 16 tokens, of rows with these lengths and planned micro-batches."""
    # The first token of a row is not predicted, the last one is not read.
    batch = batch_of_rows([torch.zeros(length + 1, dtype=torch.int64) for length in lengths])
    if numbers is not None:
        batch = replace(batch, micro_batches_B=torch.tensor(numbers, dtype=torch.int32))
    settings = TrainEngineSettings(Path(), torch.device("cpu"), torch.float32, False, 16, None)
    return micro_batches_of(batch, settings, ParallelLayout.of(1), attention, lambda value: value)


def test_planned_micro_batches_are_followed() -> None:
    assert of_plan([5, 6, 7, 8], None) == [[3, 2], [1, 0]]
    assert of_plan([5, 6, 7, 8], [1, 0, 2, 0]) == [[1, 3], [0], [2]]
    assert of_plan([5, 0, 7, 8], [1, -1, 2, 0]) == [[3], [0], [2]]


def test_a_number_that_no_row_of_this_rank_has_is_an_empty_micro_batch() -> None:
    assert of_plan([5, 6], [2, 0]) == [[1], [], [0]]


@given(rows=st.lists(st.tuples(st.integers(0, 16), st.integers(-1, 4)), min_size=1, max_size=12))
def test_no_plan_drops_or_repeats_a_row(rows: list[tuple[int, int]]) -> None:
    lengths = [length for length, _ in rows]
    micro_batches = of_plan(lengths, [number for _, number in rows])
    found = sorted(row for each in micro_batches for row in each)
    assert found == [row for row, length in enumerate(lengths) if length]
    assert all(sum(lengths[row] for row in each) <= 16 for each in micro_batches)


@pytest.mark.parametrize(
    ("lengths", "numbers", "attention", "is_warned"),
    [
        ([9, 8, 3], [0, 0, 1], FLAT, True),
        ([9, 8, 3], [0, 1, -1], FLAT, True),
        ([9, 8, 3], [-1, -1, -1], FLAT, False),
        ([9, 8, 3], [0, 1, 2], PADDED, False),
    ],
    ids=["too many tokens", "a row without a number", "a single data rank", "padded rows"],
)
def test_rows_are_packed_alone_if_the_plan_does_not_fit(
    lengths: list[int],
    numbers: list[int],
    attention: AttentionPlan,
    is_warned: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A warning says so once, if there is a plan that this model could follow."""
    micro_batching._warn_of_other_plan.cache_clear()
    for _ in range(2):
        assert of_plan(lengths, numbers, attention) == of_plan(lengths, None, attention)
    assert len(caplog.messages) == is_warned
    assert all(message == Mentions("micro-batches", "packs its own rows") for message in caplog.messages)
