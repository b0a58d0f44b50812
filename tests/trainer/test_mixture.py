"""Several datasets in one stream: proportions, exact resume, rewinding, and changes after a resume."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_trainer.datasets.cursor import PromptCursor
from rljob_trainer.datasets.mixture import MixtureCursor, MixtureState, Source

WEIGHTS = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=6)


def is_usable(row: tuple[str, int]) -> bool:
    """Some rows are skipped when they are drawn."""
    return row[1] % 3 != 1


def are_usable(rows: Sequence[tuple[str, int]]) -> list[bool]:
    return [is_usable(row) for row in rows]


def mixture(
    weights: Sequence[float], *, num_rows: int = -90, skips: bool = False, names: str = "abcdef"
) -> MixtureCursor[tuple[str, int]]:
    """Datasets of different sizes, with the rows (name, number)."""
    return MixtureCursor(
        [
            Source(
                name,
                weight,
                PromptCursor(
                    [(name, row) for row in range(num_rows + ord(name))],
                    seed=5,
                    shuffle=True,
                    digest="any",
                    are_usable=are_usable if skips else None,
                ),
            )
            for name, weight in zip(names, weights, strict=False)
        ]
    )


def sources_of(cursor: MixtureCursor[tuple[str, int]], num_rows: int) -> str:
    return "".join(drawn.row[0] for drawn in cursor.next_batch(num_rows))


def test_the_order_of_the_datasets_is_fixed() -> None:
    assert sources_of(mixture([3, 1]), 12) == "aabaaabaaaba"
    assert sources_of(mixture([0.3, 0.1]), 12) == "aabaaabaaaba"
    assert sources_of(mixture([1, 1]), 4) == "abab"


def test_many_small_datasets_do_not_come_in_a_row() -> None:
    drawn = sources_of(mixture([8] + [1] * 15, num_rows=0, names="abcdefghijklmnop"), 230)
    assert sorted(drawn[:23]) == sorted("a" * 8 + "bcdefghijklmnop")
    assert "a" in drawn[:4]
    assert max(len(part) for part in drawn.split("a")) <= 4


@given(weights=WEIGHTS, first=st.integers(0, 200), length=st.integers(1, 200))
def test_any_range_of_prompts_has_the_proportions(weights: list[float], first: int, length: int) -> None:
    cursor = mixture(weights)
    before = sources_of(cursor, first)
    drawn = sources_of(cursor, length)
    limit = 1 - 1 / (2 * len(weights) - 2) if len(weights) > 1 else 0
    for name, weight in zip("abcdef", weights, strict=False):
        share = weight / sum(weights)
        assert abs(before.count(name) - first * share) <= limit + 1e-6
        assert abs(drawn.count(name) - length * share) <= 2 * limit + 1e-6


@given(weights=WEIGHTS, before=st.integers(0, 60), skips=st.booleans())
def test_a_resumed_run_draws_the_same_rows(weights: list[float], before: int, skips: bool) -> None:
    whole = mixture(weights, skips=skips)
    whole.next_batch(before)
    resumed = mixture(weights, skips=skips)
    resumed.restore(MixtureState.from_wire(whole.state().to_wire()))
    assert resumed.next_batch(40) == whole.next_batch(40)
    assert resumed.state() == whole.state()


@given(
    weights=WEIGHTS, batches=st.lists(st.integers(1, 25), min_size=1, max_size=4), skips=st.booleans(), data=st.data()
)
def test_after_going_back_the_state_is_as_if_no_later_row_had_been_drawn(
    weights: list[float], batches: list[int], skips: bool, data: st.DataObject
) -> None:
    cursor = mixture(weights, skips=skips)
    for size in batches:
        cursor.next_batch(size)
    ordinal = data.draw(st.integers(-1, sum(batches) - 1))
    cursor.rewind(ordinal)
    other = mixture(weights, skips=skips)
    other.next_batch(ordinal + 1)
    assert cursor.state() == other.state()
    assert cursor.num_skipped == other.num_skipped
    assert cursor.next_batch(20) == other.next_batch(20)


def test_skipped_rows_do_not_change_the_proportions() -> None:
    assert sources_of(mixture([3, 1], skips=True), 12) == sources_of(mixture([3, 1]), 12)


def test_changed_weights_hold_from_the_resume_on(caplog: pytest.LogCaptureFixture) -> None:
    before = mixture([3, 1])
    before.next_batch(8)
    after = mixture([1, 1])
    with caplog.at_level(logging.WARNING):
        after.restore(before.state())
    assert "a: 3, b: 1" in caplog.text
    drawn = after.next_batch(6)
    assert "".join(each.row[0] for each in drawn) == "ababab"
    assert [each.ordinal for each in drawn] == list(range(8, 14))
    # Each dataset continues at its position.
    whole = mixture([3, 1]).sources[0].cursor
    whole.next_batch(6)
    assert [each.row for each in drawn if each.row[0] == "a"] == [each.row for each in whole.next_batch(3)]


def test_a_new_dataset_begins_at_its_start_and_a_missing_one_is_dropped() -> None:
    before = mixture([1, 1])
    before.next_batch(8)
    after = mixture([1, 1], names="bc")
    state = before.state()
    after.restore(state.model_copy(update={"sources": state.sources[1:]}))
    epochs = after.epochs
    assert epochs["c"] == 0
    assert epochs["b"] > 0
