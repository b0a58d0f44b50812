"""DataProto: a batch of tensor and object columns."""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rljob_trainer.data.proto import DataProto, pad_columns
from rljob_trainer.errors import DataError


def batch(num_rows: int) -> DataProto:
    return DataProto(
        {"number": torch.arange(num_rows), "square": torch.arange(num_rows)[:, None] ** 2},
        {"name": tuple(f"row {row}" for row in range(num_rows))},
        {"step": 3},
    )


def numbers(proto: DataProto) -> list[int]:
    return [int(value) for value in proto["number"].tolist()]


def test_columns_of_different_lengths_are_refused() -> None:
    with pytest.raises(DataError, match=r"same number of rows \(seen: .*'a': 2.*'b': 3"):
        DataProto({"a": torch.zeros(2)}, {"b": (1, 2, 3)})


def test_a_missing_column_names_those_there_are() -> None:
    with pytest.raises(DataError, match="no tensor column 'reward' \\(there are: number, square\\)"):
        batch(2)["reward"]


def test_rows_picks_in_the_given_order() -> None:
    picked = batch(4).rows([3, 0, 3])
    assert numbers(picked) == [3, 0, 3]
    assert picked.object_column("name") == ("row 3", "row 0", "row 3")
    assert picked.meta == {"step": 3}


def test_repeat_keeps_repetitions_together() -> None:
    assert numbers(batch(2).repeat(3)) == [0, 0, 0, 1, 1, 1]


def test_split_may_end_with_a_shorter_part() -> None:
    assert [numbers(part) for part in batch(5).split(2)] == [[0, 1], [2, 3], [4]]


def test_chunk_refuses_uneven_parts() -> None:
    assert [numbers(part) for part in batch(6).chunk(3)] == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(DataError, match="6 rows cannot be split into 4 equal parts"):
        batch(6).chunk(4)


def test_padding_repeats_the_last_row_and_leaves_the_original_alone() -> None:
    original = batch(2)
    padded, num_added = original.padded_to_multiple(5)
    assert (numbers(padded), num_added) == ([0, 1, 1, 1, 1], 3)
    assert numbers(original) == [0, 1]
    assert batch(4).padded_to_multiple(2)[1] == 0


def test_union_adds_columns_and_refuses_conflicts() -> None:
    extra = DataProto({"reward": torch.tensor([0.5, 1.0])}, {}, {"version": 7})
    united = batch(2).union(extra)
    assert united["reward"].tolist() == [0.5, 1.0]
    assert united.meta == {"step": 3, "version": 7}
    assert numbers(batch(2).union(batch(2))) == [0, 1]
    with pytest.raises(DataError, match="tensor column 'number' differs"):
        batch(2).union(DataProto({"number": torch.tensor([0, 2])}))
    with pytest.raises(DataError, match=r"meta 'step' differs \(3 and 4\)"):
        batch(2).union(DataProto({}, {}, {"step": 4}))


def test_concat_refuses_other_columns() -> None:
    with pytest.raises(DataError, match="different columns"):
        DataProto.concat([batch(2), batch(2).select(["number"])])


def test_pad_columns_fills_on_the_right() -> None:
    padded = pad_columns([torch.tensor([1, 2]), torch.tensor([3])], 3, -1)
    assert padded.tolist() == [[1, 2, -1], [3, -1, -1]]


@given(num_rows=st.integers(1, 20), size=st.integers(1, 7))
def test_padding_then_chunks_then_concat_gives_the_rows_back(num_rows: int, size: int) -> None:
    padded, num_added = batch(num_rows).padded_to_multiple(size)
    together = DataProto.concat(padded.chunk(size))
    assert numbers(together.slice(0, len(together) - num_added)) == list(range(num_rows))


def test_survives_a_pickle_round_trip() -> None:
    copy = pickle.loads(pickle.dumps(batch(3)))
    assert torch.equal(copy["square"], batch(3)["square"])
    assert copy.objects == batch(3).objects
