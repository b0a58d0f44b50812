"""`DataProto.from_columns`: which column each kind of input becomes."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

from rljob_trainer.batch.proto import DataProto
from rljob_trainer.batch.ragged import RaggedColumn
from rljob_trainer.errors import DataError


@pytest.mark.parametrize(
    ("column", "dtype"),
    [
        ([True, False], torch.bool),
        ([1, 2], torch.int64),
        ((1.5, 2.5), torch.float32),
        ([1, 2.5], torch.float32),
        ([np.int8(1), np.int8(2)], torch.int64),
        ([np.float64(1), 2], torch.float32),
        ([np.bool_(True), False], torch.bool),
        (np.array([1, 2], dtype=np.int16), torch.int16),
        (np.array([1.0, 2.0]), torch.float64),
        (np.array([1, 2], dtype=">i4"), torch.int32),
        (np.array([1, 2, 3, 4])[::-2], torch.int64),
        (np.frombuffer(b"\x01\x02", dtype=np.uint8), torch.uint8),
        (torch.tensor([1, 2], dtype=torch.bfloat16), torch.bfloat16),
    ],
)
def test_numbers_become_a_tensor(column: list[float] | np.ndarray, dtype: torch.dtype) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        batch = DataProto.from_columns({"x": column})
    assert batch["x"].dtype == dtype
    assert batch["x"].tolist() == [float(number) for number in column]


@pytest.mark.parametrize(
    "column",
    [
        ["a", "b"],
        [1, None],
        [1, "a"],
        [True, 2],
        [[1], [2]],
        ({"a": 1}, {"a": 2}),
        np.array(["a", "b"]),
        np.array([None, 1], dtype=object),
    ],
)
def test_other_lists_become_objects(column: list[object] | np.ndarray) -> None:
    batch = DataProto.from_columns({"x": column})
    assert batch.object_column("x") == tuple(column)


def test_arrays_and_tensors_share_memory() -> None:
    array, tensor = np.zeros(2), torch.zeros(2)
    batch = DataProto.from_columns({"array": array, "tensor": tensor})
    array[0] = tensor[0] = 1
    assert batch["array"].tolist() == batch["tensor"].tolist() == [1, 0]


def test_lists_of_tensors_become_ragged() -> None:
    batch = DataProto.from_columns(
        {"tokens": [torch.tensor([1, 2]), torch.tensor([3])], "same": RaggedColumn.from_rows([[1], [2]])}
    )
    assert batch.ragged["tokens"].lengths.tolist() == [2, 1]
    assert batch.ragged["same"].values.tolist() == [1, 2]


def test_meta_becomes_plain_values() -> None:
    meta = {
        "step": np.int64(3),
        "rate": 0.5,
        "names": ["a", "b"],
        "sizes": (np.int32(1), 2),
        "mixed": [1, 0.5],
        "no": [],
    }
    batch = DataProto.from_columns({}, meta)
    assert batch.meta == {"step": 3, "rate": 0.5, "names": ("a", "b"), "sizes": (1, 2), "mixed": (1, 0.5), "no": ()}
    assert type(batch.meta["step"]) is int
    for value in ({"a": 1}, [["a"]], [1, "a"], [True, None], torch.zeros(1), b"x"):
        with pytest.raises(DataError, match=r"meta 'odd' is .*; it must be a string, a number"):
            DataProto.from_columns({}, {"odd": value})


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ("text", "'x' is a str; a column is a tensor, an array"),
        (3, "'x' is a int"),
        ({"a": [1]}, "'x' is a dict"),
        (None, "'x' is a NoneType"),
        ([2**63], "'x' cannot become a column of torch.int64: Overflow"),
        (np.array(["2026-01-01"], dtype="datetime64[D]"), r"'x' is an array of datetime64\[D\], .*torch"),
        (torch.tensor(1), "'x' is a single number and has no rows"),
        (np.array(1), "'x' is a single value and has no rows"),
        (
            [torch.zeros(1, 2), torch.zeros(1, 3)],
            "'x' cannot become a column of tensors: .*parts differ in dtype, shape or device",
        ),
    ],
)
def test_values_that_are_no_column_are_rejected_by_name(column: object, message: str) -> None:
    with pytest.raises(DataError, match=message):
        DataProto.from_columns({"x": column})


def test_columns_of_different_lengths_are_rejected() -> None:
    with pytest.raises(DataError, match=r"same number of rows \(seen: {'a': 2, 'b': 3}\)"):
        DataProto.from_columns({"a": [1, 2], "b": ["a", "b", "c"]})
