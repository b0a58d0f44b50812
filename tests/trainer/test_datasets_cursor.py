"""The order of prompts: every epoch is complete, orders differ between epochs, and a resumed run continues exactly."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_trainer.datasets.cursor import CursorState, DrawnRow, PromptCursor, shuffled_order
from rljob_trainer.errors import ConfigurationError, DatasetError


def cursor(num_rows: int, seed: int = 0, shuffle: bool = True) -> PromptCursor[int]:
    return PromptCursor(range(num_rows), seed=seed, shuffle=shuffle, digest="any")


def next_rows(batches: PromptCursor[int], num_rows: int) -> list[int]:
    """The next rows without their ordinals."""
    return [drawn.row for drawn in batches.next_batch(num_rows)]


def test_without_shuffling_rows_come_in_order_again_and_again() -> None:
    batches = cursor(5, shuffle=False)
    assert [next_rows(batches, 3) for _ in range(4)] == [[0, 1, 2], [3, 4, 0], [1, 2, 3], [4, 0, 1]]


def test_a_batch_may_be_larger_than_the_data() -> None:
    assert next_rows(cursor(2, shuffle=False), 5) == [0, 1, 0, 1, 0]


def test_ordinals_count_the_rows_of_all_epochs() -> None:
    batches = cursor(3, shuffle=False)
    assert batches.next_batch(2) == [DrawnRow(0, 0), DrawnRow(1, 1)]
    assert batches.next_batch(3) == [DrawnRow(2, 2), DrawnRow(3, 0), DrawnRow(4, 1)]


def test_the_order_for_a_seed_never_changes() -> None:
    # Recorded once: runs that resume under a newer NumPy must see the same stream.
    assert next_rows(cursor(8, seed=3), 16) == [6, 1, 5, 2, 7, 4, 3, 0, 7, 3, 5, 6, 4, 0, 2, 1]


@given(num_rows=st.integers(1, 40), seed=st.integers(0, 2**31 - 1))
def test_every_epoch_visits_each_row_once(num_rows: int, seed: int) -> None:
    batches = cursor(num_rows, seed)
    epochs = [next_rows(batches, num_rows) for _ in range(3)]
    assert all(sorted(epoch) == list(range(num_rows)) for epoch in epochs)
    if num_rows >= 12:
        assert epochs[0] != epochs[1]
        assert epochs[0] != next_rows(cursor(num_rows, seed + 1), num_rows)


@given(
    num_rows=st.integers(1, 20),
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    cut=st.integers(0, 6),
    shuffle=st.booleans(),
)
def test_a_resumed_cursor_gives_exactly_the_rest(num_rows: int, sizes: list[int], cut: int, shuffle: bool) -> None:
    whole, before = cursor(num_rows, 5, shuffle), cursor(num_rows, 5, shuffle)
    expected = [whole.next_batch(size) for size in sizes]
    first = [before.next_batch(size) for size in sizes[:cut]]
    text = before.state().model_dump_json(by_alias=True)
    after = cursor(num_rows, 5, shuffle)
    after.restore(CursorState.model_validate_json(text))
    assert first + [after.next_batch(size) for size in sizes[cut:]] == expected


def test_the_state_is_plain_json() -> None:
    batches = cursor(10, seed=4)
    batches.next_batch(13)
    assert batches.state().model_dump(mode="json", by_alias=True) == {
        "ordinal": 13,
        "numRows": 10,
        "seed": 4,
        "shuffle": True,
        "digest": "any",
        "passRates": None,
    }


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            cursor(9),
            r"number of rows was 10 when .*, but now it is 9; resume with the same data and seed, or start a new job",
        ),
        (cursor(10, seed=1), r"seed was 0 when .*, but now it is 1"),
        (cursor(10, shuffle=False), r"shuffle setting was True when .*, but now it is False"),
    ],
)
def test_a_state_of_other_data_is_rejected(other: PromptCursor[int], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        other.restore(cursor(10).state())


@pytest.mark.parametrize("num_rows", [0, 1, 4, 10, 24])
def test_after_a_rewind_the_same_rows_are_drawn_again(num_rows: int) -> None:
    """The first 20 rows end an epoch, and the next one has not begun."""
    rows = cursor(10)
    last = rows.next_batch(20)[-1]
    before = rows.state()
    again = rows.next_batch(num_rows)
    rows.rewind(last.ordinal)
    assert rows.state() == before
    assert rows.next_batch(num_rows) == again


def stream(num_rows: int, seed: int, shuffle: bool, unusable: set[int]) -> Iterator[DrawnRow[int]]:
    """Every usable row that a cursor without rewinding draws."""
    ordinal = 0
    while True:
        order = shuffled_order(num_rows, seed, ordinal // num_rows).tolist() if shuffle else range(num_rows)
        for row in order:
            if row not in unusable:
                yield DrawnRow(ordinal, row)
            ordinal += 1


@given(
    num_rows=st.integers(1, 12),
    shuffle=st.booleans(),
    unusable=st.sets(st.integers(1, 11)),
    actions=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=6),
)
def test_the_stream_is_the_same_whatever_is_drawn_rewound_and_skipped(
    num_rows: int, shuffle: bool, unusable: set[int], actions: list[tuple[int, int]]
) -> None:
    """Each action draws rows, and then goes back by some. The state follows from the last row that is left."""

    def fresh() -> PromptCursor[int]:
        return PromptCursor(
            range(num_rows), seed=4, shuffle=shuffle, digest="any",
            are_usable=lambda rows: [row not in unusable for row in rows],
        )  # fmt: skip

    expected = list(islice(stream(num_rows, 4, shuffle, unusable), 31 * len(actions)))
    rows, num_used = fresh(), 0
    for num_drawn, num_back in actions:
        assert rows.next_batch(num_drawn) == expected[num_used : num_used + num_drawn]
        num_used += num_drawn
        if num_back:
            num_used = max(0, num_used - num_back)
            rows.rewind(expected[num_used - 1].ordinal if num_used else -1)
        ordinal = rows.state().ordinal
        assert ordinal == (expected[num_used - 1].ordinal + 1 if num_used else 0)
        assert rows.num_skipped == ordinal - num_used
        resumed = fresh()
        resumed.restore(rows.state())
        assert resumed.next_batch(1) == [expected[num_used]]


def test_a_rewind_to_a_row_that_was_not_drawn_is_refused() -> None:
    rows = cursor(4)
    rows.next_batch(6)
    rows.rewind(5)
    with pytest.raises(AssertionError, match="row 6 was not drawn, the next row is 6"):
        rows.rewind(6)


def test_a_rewind_to_the_beginning_goes_back_over_skipped_rows() -> None:
    rows = PromptCursor(
        range(4), seed=0, shuffle=False, digest="any", are_usable=lambda rows: [row > 1 for row in rows]
    )
    before = rows.state()
    assert rows.next_batch(1) == [DrawnRow(2, 2)]
    assert (rows.state().ordinal, rows.num_skipped) == (3, 2)
    rows.rewind(-1)
    assert (rows.state(), rows.num_skipped) == (before, 0)


def test_a_stream_whose_rows_are_all_skipped_ends() -> None:
    rows = PromptCursor(range(4), seed=0, shuffle=True, digest="any", are_usable=lambda rows: [False for _ in rows])
    with pytest.raises(DatasetError, match="all rows were skipped, because their answers cannot be scored"):
        rows.next_batch(3)


def test_other_data_with_as_many_rows_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def cursor_for(digest: str) -> PromptCursor[int]:
        return PromptCursor(range(10), seed=0, shuffle=True, digest=digest)

    cursor_for("a").restore(cursor_for("a").state())
    assert caplog.text == ""
    cursor_for("b").restore(cursor_for("a").state())
    assert "the prompts have changed since the checkpoint was saved" in caplog.text
