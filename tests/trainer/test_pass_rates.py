"""Sampling of prompts by pass rate: in which epochs a row is drawn, recorded rates, exact resume, and what is
refused."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_trainer.controller.checkpointing import StateParts
from rljob_trainer.controller.prompt_sets import Cursor, restore_position, state_parts
from rljob_trainer.datasets.cursor import CursorState, PromptCursor
from rljob_trainer.datasets.mixture import MixtureCursor, Source
from rljob_trainer.datasets.pass_rates import MAX_GAP, MAX_LEVEL, PassRates
from rljob_trainer.datasets.prompts import PromptRow

NUM_ROWS = 40


def rows(name: str = "") -> list[PromptRow]:
    """Rows with the numbers 0, 2, 4, ...: the others were dropped."""
    return [PromptRow(2 * number, f"{name}{number}", "", (1,), None, {}, dataset=name) for number in range(NUM_ROWS)]


def cursor(name: str = "", digest: str = "same", *, by_pass_rate: bool = True) -> PromptCursor[PromptRow]:
    made = rows(name)
    pass_rates = PassRates([row.index for row in made], 3) if by_pass_rate else None
    return PromptCursor(made, seed=3, shuffle=True, digest=digest, pass_rates=pass_rates)


def rate_of(row: PromptRow) -> float:
    """A third of the rows is never solved, a third always, and a third in half of the cases."""
    return (row.index // 2 % 3) / 2


def steps(stream: PromptCursor[PromptRow], num_steps: int, size: int = 8) -> list[list[int]]:
    """The rows of these steps, whose pass rates are recorded after each step."""
    found = []
    for _ in range(num_steps):
        drawn = stream.next_batch(size)
        found.append([each.row.index for each in drawn])
        if stream.pass_rates is not None:
            for each in drawn:
                stream.pass_rates.record(each.row.index, rate_of(each.row))
    return found


def test_the_first_epoch_has_all_rows_in_the_order_of_uniform_sampling() -> None:
    assert steps(cursor(), NUM_ROWS // 8) == steps(cursor(by_pass_rate=False), NUM_ROWS // 8)


def test_solved_and_unsolved_rows_are_drawn_in_every_tenth_epoch_and_fitting_ones_in_each() -> None:
    stream, counts = cursor(), dict.fromkeys(range(0, 2 * NUM_ROWS, 2), 0)
    while stream.epochs < 21:
        for index in steps(stream, 1)[0]:
            counts[index] += 1
    for row in rows():
        # One epoch with all rows, then 20 epochs; the last batch may reach into the next epoch.
        expected = (21, 22) if rate_of(row) == 0.5 else (3, 4)
        assert counts[row.index] in expected, row


@given(seed=st.integers(0, 2**64 - 1), rate=st.floats(0, 1), first=st.integers(0, 1000))
def test_a_row_is_drawn_in_the_right_fraction_of_epochs_with_bounded_gaps(seed: int, rate: float, first: int) -> None:
    pass_rates = PassRates([0], seed)
    pass_rates.record(0, rate)
    epochs = [epoch for epoch in range(first, first + 1000) if pass_rates.is_drawn(0, epoch)]
    # Pass rates are stored as one byte.
    stored = round(MAX_LEVEL * rate) / MAX_LEVEL
    weight = max(0.1, 4 * stored * (1 - stored))
    assert len(epochs) == pytest.approx(1000 * weight, abs=6)
    assert max(later - epoch for epoch, later in pairwise(epochs)) <= min(MAX_GAP, 1 / weight + 1)


def test_the_pass_rate_is_a_moving_average() -> None:
    pass_rates = PassRates([7, 9], 0)
    assert pass_rates.mean() is None
    pass_rates.record(9, 1.0)
    assert pass_rates.mean() == 1
    pass_rates.record(9, 0.0)
    assert pass_rates.mean() == 0.5
    pass_rates.record(7, 0.5)
    pass_rates.record(9, 0.5)
    assert pass_rates.mean() == 0.5


@pytest.mark.parametrize("num_before", [0, 1, 4, 5, 6, 17])
def test_a_resumed_run_draws_the_same_rows(num_before: int) -> None:
    whole = steps(cursor(), num_before + 12)
    first = cursor()
    assert steps(first, num_before) == whole[:num_before]
    resumed = cursor()
    resumed.restore(CursorState.model_validate_json(first.state().model_dump_json()))
    assert steps(resumed, 12) == whole[num_before:]
    # The rows do depend on the pass rates.
    without = cursor()
    without.restore(first.state().model_copy(update={"pass_rates": None}))
    assert (steps(without, 12) != whole[num_before:]) is (num_before > 0)


def test_pass_rates_of_other_prompts_are_dropped_and_uniform_sampling_continues_at_its_position() -> None:
    first = cursor()
    steps(first, 6)
    other = cursor(digest="other")
    other.restore(first.state())
    assert other.pass_rates is not None
    assert other.pass_rates.mean() is None
    uniform = cursor(by_pass_rate=False)
    uniform.restore(first.state())
    assert uniform.epochs == first.epochs
    first.restore(uniform.state())
    assert first.pass_rates is not None
    assert first.pass_rates.mean() is not None


def test_going_back_within_a_step_draws_the_same_rows_again() -> None:
    stream = cursor()
    steps(stream, 9)
    drawn = stream.next_batch(20)
    state = stream.state()
    stream.rewind(drawn[4].ordinal)
    assert stream.next_batch(15) == drawn[5:]
    assert stream.state() == state


def test_rows_of_several_datasets_have_pass_rates_of_their_own() -> None:
    streams = {name: cursor(name) for name in "ab"}
    mixture = MixtureCursor([Source(name, 1.0, each) for name, each in streams.items()])
    drawn = mixture.next_batch(2 * NUM_ROWS)
    assert streams["a"].pass_rates is not None
    for each in drawn:
        if each.row.dataset == "a":
            streams["a"].pass_rates.record(each.row.index, 1.0)
    # The next epoch of b is whole, and that of a is not; both still have half of the prompts.
    later = mixture.next_batch(2 * NUM_ROWS)
    assert [each.row.dataset for each in later] == list("ab") * NUM_ROWS
    assert (streams["a"].epochs > 5, streams["b"].epochs) == (True, 2)
    state = mixture.state()
    mixture.rewind(later[9].ordinal)
    assert mixture.next_batch(2 * NUM_ROWS - 10) == later[10:]
    assert mixture.state() == state


@pytest.mark.parametrize("names", ["", "ab"])
def test_a_checkpoint_has_the_pass_rates_of_all_datasets(names: str) -> None:
    def stream() -> Cursor:
        return MixtureCursor([Source(name, 1.0, cursor(name)) for name in names]) if names else cursor()

    def drawn(stream: Cursor) -> list[str]:
        found = [each.row.prompt for _ in range(8) for each in stream.next_batch(10)]
        for each in stream.next_batch(30):
            cursors = {"": stream} if isinstance(stream, PromptCursor) else {e.name: e.cursor for e in stream.sources}
            rates = cursors[each.row.dataset].pass_rates
            assert rates is not None
            rates.record(each.row.index, rate_of(each.row))
        return found

    first, resumed = stream(), stream()
    for _ in range(3):
        drawn(first)
    saved = state_parts(first, None).model_dump_json(by_alias=True)
    restore_position(resumed, StateParts.from_wire(json.loads(saved)))
    for _ in range(3):
        assert drawn(resumed) == drawn(first)
    assert state_parts(resumed, None) == state_parts(first, None)
    assert (saved.count("passRates"), saved.count('"passRates":null')) == (3 if names else 1, 0)
