"""The order of prompts: every epoch is complete, orders differ between epochs, and a resumed run continues exactly."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_trainer.datasets.cursor import CursorState, PromptCursor
from rljob_trainer.errors import ConfigurationError, DatasetError


def cursor(num_rows: int, seed: int = 0, shuffle: bool = True) -> PromptCursor[int]:
    return PromptCursor(range(num_rows), seed=seed, shuffle=shuffle, digest="any")


def test_without_shuffling_rows_come_in_order_again_and_again() -> None:
    batches = cursor(5, shuffle=False)
    assert [batches.next_batch(3) for _ in range(4)] == [[0, 1, 2], [3, 4, 0], [1, 2, 3], [4, 0, 1]]


def test_a_batch_may_be_larger_than_the_data() -> None:
    assert cursor(2, shuffle=False).next_batch(5) == [0, 1, 0, 1, 0]


def test_the_order_for_a_seed_never_changes() -> None:
    # Recorded once: runs that resume under a newer NumPy must see the same stream.
    assert cursor(8, seed=3).next_batch(16) == [6, 1, 5, 2, 7, 4, 3, 0, 7, 3, 5, 6, 4, 0, 2, 1]


@given(num_rows=st.integers(1, 40), seed=st.integers(0, 2**31 - 1))
def test_every_epoch_visits_each_row_once(num_rows: int, seed: int) -> None:
    batches = cursor(num_rows, seed)
    epochs = [batches.next_batch(num_rows) for _ in range(3)]
    assert all(sorted(epoch) == list(range(num_rows)) for epoch in epochs)
    if num_rows >= 12:
        assert epochs[0] != epochs[1]
        assert epochs[0] != cursor(num_rows, seed + 1).next_batch(num_rows)


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
        "epoch": 1,
        "position": 3,
        "numRows": 10,
        "seed": 4,
        "shuffle": True,
        "digest": "any",
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


@pytest.mark.parametrize("num_rows", [1, 4, 10, 24])
def test_returned_rows_are_drawn_again(num_rows: int) -> None:
    """Also for the state in a checkpoint: the first 20 rows end an epoch, and the next one has not begun."""
    rows = cursor(10)
    rows.next_batch(20)
    before = rows.state()
    again = rows.next_batch(num_rows)
    rows.return_rows(num_rows)
    assert rows.state() == before
    rows.return_rows(0)
    assert rows.state() == before
    assert rows.next_batch(num_rows) == again


@pytest.mark.parametrize("shuffle", [False, True])
@given(
    unusable=st.sets(st.integers(0, 9), max_size=9),
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=5),
    given_back=st.integers(0, 12),
)
def test_skipped_rows_change_nothing_else(shuffle: bool, unusable: set[int], sizes: list[int], given_back: int) -> None:
    """The stream is that of all rows without them; returned rows count as never drawn; a resumed cursor continues."""

    def leaving_out() -> PromptCursor[int]:
        def are_usable(rows: Sequence[int]) -> list[bool]:
            return [row not in unusable for row in rows]

        return PromptCursor(range(10), seed=4, shuffle=shuffle, digest="any", are_usable=are_usable)

    everything = cursor(10, 4, shuffle).next_batch(10 * (sum(sizes) + given_back + 1))
    expected = iter([row for row in everything if row not in unusable])
    rows = leaving_out()
    for size in sizes:
        assert rows.next_batch(size) == [next(expected) for _ in range(size)]
    before, num_left_out = rows.state(), rows.num_left_out
    again = rows.next_batch(given_back)
    rows.return_rows(given_back)
    assert (rows.state(), rows.num_left_out) == (before, num_left_out)
    resumed = leaving_out()
    resumed.restore(before)
    assert rows.next_batch(given_back) == resumed.next_batch(given_back) == again
    assert rows.num_left_out == num_left_out + resumed.num_left_out


def test_the_first_rows_are_returned_with_the_skipped_rows_before_them() -> None:
    rows = PromptCursor(
        range(4), seed=0, shuffle=False, digest="any", are_usable=lambda rows: [row > 1 for row in rows]
    )
    before = rows.state()
    assert rows.next_batch(1) == [2]
    assert (rows.state().position, rows.num_left_out) == (3, 2)
    rows.return_rows(1)
    assert (rows.state(), rows.num_left_out) == (before, 0)


def test_a_stream_whose_rows_are_all_skipped_ends() -> None:
    rows = PromptCursor(range(4), seed=0, shuffle=True, digest="any", are_usable=lambda rows: [False for _ in rows])
    with pytest.raises(DatasetError, match="no row is usable"):
        rows.next_batch(3)


def test_other_data_with_as_many_rows_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def cursor_for(digest: str) -> PromptCursor[int]:
        return PromptCursor(range(10), seed=0, shuffle=True, digest=digest)

    cursor_for("a").restore(cursor_for("a").state())
    assert caplog.text == ""
    cursor_for("b").restore(cursor_for("a").state())
    assert "the prompts differ from those of the checkpoint's run" in caplog.text


def test_an_empty_dataset_is_rejected() -> None:
    with pytest.raises(ConfigurationError, match="no rows are left to train on"):
        cursor(0)
