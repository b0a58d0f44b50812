"""RaggedColumn: rows of different lengths, packed."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rljob_trainer.batch.ragged import LONG_ROW, RaggedColumn
from rljob_trainer.errors import DataError

DTYPES = [
    *(torch.bool, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn),
]


def column() -> RaggedColumn:
    return RaggedColumn.from_rows([[1, 2, 3], [], [4]])


def lists(ragged: RaggedColumn) -> list[object]:
    return [row.tolist() for row in ragged.row_tensors()]


def test_rows_are_stored_one_after_the_other() -> None:
    assert column().values.tolist() == [1, 2, 3, 4]
    assert column().lengths.tolist() == [3, 0, 1]
    assert column().offsets.tolist() == [0, 3, 3, 4]
    assert len(column()) == 3
    assert column().num_bytes == 4 * 8 + 3 * 8
    assert [row.tolist() for row in column().row_tensors()] == [[1, 2, 3], [], [4]]


def test_numbers_get_torchs_dtype_unless_one_is_given() -> None:
    assert column().values.dtype == torch.int64
    assert RaggedColumn.from_rows([[1.5], [2]]).values.dtype == torch.float32
    assert RaggedColumn.from_rows([[True], []]).values.dtype == torch.bool
    assert RaggedColumn.from_rows([[1], [2]], torch.int16).values.dtype == torch.int16
    assert RaggedColumn.from_rows([np.array([1, 2], dtype=np.int8)]).values.dtype == torch.int8
    assert RaggedColumn.from_rows([torch.zeros(2, 3), torch.zeros(0, 3)]).values.shape == (2, 3)
    assert len(RaggedColumn.from_rows([], torch.int64)) == 0


def test_incompatible_rows_are_rejected() -> None:
    with pytest.raises(DataError, match="some rows are tensors and some are not"):
        RaggedColumn.from_rows([torch.zeros(1), [1.0]])
    with pytest.raises(DataError, match=r"differ in dtype.*float32 \[\*\] on cpu; torch.int64 \[\*\] on cpu"):
        RaggedColumn.from_rows([torch.zeros(1), torch.zeros(1, dtype=torch.int64)])
    with pytest.raises(DataError, match=r"\[\*, 2\] on cpu; torch.float32 \[\*, 3\]"):
        RaggedColumn.from_rows([torch.zeros(1, 2), torch.zeros(1, 3)])
    with pytest.raises(DataError, match="`dtype`"):
        RaggedColumn.from_rows([[], []])
    with pytest.raises(DataError, match="a row is a single number"):
        RaggedColumn.from_rows([torch.tensor(1)])
    with pytest.raises(DataError, match=r"rows must .*numbers"):
        RaggedColumn.from_rows([[1], ["a"]])  # type: ignore[list-item]


def test_lengths_that_do_not_fit_are_rejected() -> None:
    with pytest.raises(DataError, match=r"lengths must sum to .*\(seen: 3 and 4\)"):
        RaggedColumn(torch.zeros(4), torch.tensor([1, 2]))
    with pytest.raises(DataError, match=r"negative \(seen: -1\)"):
        RaggedColumn(torch.zeros(1), torch.tensor([2, -1]))
    with pytest.raises(DataError, match=r"int64 \[B\] on the CPU \(seen: torch.int32 \[1\] on cpu\)"):
        RaggedColumn(torch.zeros(1), torch.tensor([1], dtype=torch.int32))
    with pytest.raises(DataError, match="a first dimension"):
        RaggedColumn(torch.tensor(1), torch.tensor([1]))


def test_consecutive_rows_share_memory_and_selected_ones_do_not() -> None:
    ragged = column()
    assert lists(ragged.slice(1, 3)) == [[], [4]]
    assert ragged.slice(2, 3).values.data_ptr() == ragged.values[3:].data_ptr()
    assert lists(ragged.rows([2, 0, 2])) == [[4], [1, 2, 3], [4]]
    assert lists(ragged.rows(torch.tensor([True, False, True]))) == [[1, 2, 3], [4]]
    assert lists(ragged.rows([])) == []
    with pytest.raises(DataError, match=r"no row 3; .*3 rows"):
        ragged.rows([3])


@pytest.mark.parametrize("length", [1, LONG_ROW - 1, LONG_ROW + 1])
def test_long_rows_are_selected_like_short_ones(length: int) -> None:
    ragged = RaggedColumn(torch.arange(3 * length), torch.tensor([length - 1, 1, 2 * length]))
    whole = list(range(3 * length))
    assert lists(ragged.rows([2, 1, 0])) == [whole[length:], whole[length - 1 : length], whole[: length - 1]]


@given(
    rows=st.lists(st.lists(st.integers(0, 1), max_size=4), max_size=5),
    dtype=st.sampled_from(DTYPES),
    inner=st.sampled_from([(), (0,), (2,)]),
)
def test_every_dtype_and_shape_survives_selection_and_pickling(
    rows: list[list[int]], dtype: torch.dtype, inner: tuple[int, ...]
) -> None:
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    flat = torch.tensor([number for row in rows for number in row], dtype=torch.float32)
    values = flat.reshape(-1, *(1 for _ in inner)).expand(-1, *inner).to(dtype)
    ragged = RaggedColumn(values, lengths)
    assert ragged.same_as(pickle.loads(pickle.dumps(ragged)))
    backwards = ragged.rows(slice(None, None, -1))
    assert lists(backwards) == lists(ragged)[::-1]
    assert lists(RaggedColumn.concat([ragged, backwards])) == lists(ragged) + lists(backwards)


def test_equality_compares_rows_and_dtype() -> None:
    nan = RaggedColumn.from_rows([[float("nan")], [1.0]])
    assert nan.same_as(RaggedColumn.from_rows([[float("nan")], [1.0]]))
    assert not nan.same_as(RaggedColumn.from_rows([[float("nan"), 1.0], []]))
    assert not nan.same_as(RaggedColumn(nan.values.double(), nan.lengths))
    assert not nan.same_as(RaggedColumn.from_rows([[0.0], [1.0]]))
