"""`RaggedColumn`: rows of different lengths one after the other, never padded.

Legend: B rows, N elements of all rows together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from rljob_trainer.batch.columns import (
    concat_tensors,
    same_tensor,
    take_tensor,
    tensor_bytes,
    tensor_of_array,
)
from rljob_trainer.batch.row_index import Positions, RowIndex, row_positions
from rljob_trainer.batch.wire import PackedTensor, pack, unpack
from rljob_trainer.errors import DataError

LONG_ROW = 128
"""If rows have at least this many elements on average, copying them one by one is faster than gathering all elements by
index."""


@dataclass(frozen=True, eq=False)
class RaggedColumn:
    """`values`: [N, ...], row after row. `lengths`: int64 [B] on the CPU, the number of elements of each row; a row may
    be empty.

    Raises DataError if the lengths have another type or shape, or do not sum to N.
    """

    values: torch.Tensor
    lengths: torch.Tensor

    def __post_init__(self) -> None:
        if self.values.dim() < 1:
            raise DataError("ragged column: values need a first dimension (seen: a single number)")
        if self.lengths.dim() != 1 or self.lengths.dtype != torch.int64 or self.lengths.device.type != "cpu":
            raise DataError(
                "ragged column: lengths must be int64 [B] on the CPU (seen: "
                f"{self.lengths.dtype} {list(self.lengths.shape)} on {self.lengths.device})"
            )
        if len(self.lengths) and int(self.lengths.min()) < 0:
            raise DataError(f"ragged column: lengths must not be negative (seen: {int(self.lengths.min())})")
        # Also checks the largest length, because the sum of very large ones may overflow to the right value.
        if int(self.lengths.sum()) != self.values.shape[0] or (
            len(self.lengths) and int(self.lengths.max()) > self.values.shape[0]
        ):
            raise DataError(
                f"ragged column: lengths must sum to the number of values (seen: {int(self.lengths.sum())} and "
                f"{self.values.shape[0]})"
            )

    @staticmethod
    def from_rows(
        rows: Sequence[torch.Tensor | npt.NDArray[np.generic] | Sequence[float]], dtype: torch.dtype | None = None
    ) -> RaggedColumn:
        """A column with one row per element of `rows`. The elements are tensors or arrays [length, ...], or sequences
        of numbers.

        The default `dtype` is that of the tensors, or the one that torch infers from the numbers (int64, float32,
        bool). Raises DataError if rows differ in more than their length, or if no dtype can be inferred.
        """
        given = [
            tensor_of_array(f"ragged column: row {number}", row) if isinstance(row, np.ndarray) else row
            for number, row in enumerate(rows)
        ]
        tensors = [row for row in given if isinstance(row, torch.Tensor)]
        sequences = [row for row in given if not isinstance(row, torch.Tensor)]
        for row in sequences:
            if isinstance(row, str | bytes) or not isinstance(row, Sequence):
                raise DataError(f"ragged column: a row is a tensor, an array or a list of numbers (seen: {row!r:.80})")
        if tensors and sequences:
            raise DataError("ragged column: some rows are tensors and some are not; convert them to one type")
        if any(not tensor.dim() for tensor in tensors):
            raise DataError("ragged column: a row is a single number; make it a row of one element")
        values = concat_tensors("ragged column", tensors) if tensors else _numbers(sequences, dtype)
        lengths = torch.tensor([len(row) for row in given], dtype=torch.int64)
        return RaggedColumn(values if dtype is None else values.to(dtype), lengths)

    def __len__(self) -> int:
        return int(self.lengths.shape[0])

    @cached_property
    def offsets(self) -> npt.NDArray[np.int64]:
        """[B + 1]: row i holds the values from offsets[i] up to offsets[i + 1]."""
        offsets = np.zeros(len(self) + 1, dtype=np.int64)
        np.cumsum(self.lengths.numpy(), out=offsets[1:])
        return offsets

    @property
    def num_bytes(self) -> int:
        """Bytes of values and lengths."""
        return tensor_bytes(self.values) + tensor_bytes(self.lengths)

    def row_tensors(self) -> tuple[torch.Tensor, ...]:
        """A view of each row."""
        return torch.split_with_sizes(self.values, self.lengths.tolist())

    def rows(self, index: RowIndex) -> RaggedColumn:
        """The rows at `index`, in that order. Raises DataError for rows that do not exist."""
        return self.take_rows(row_positions(index, len(self)))

    def take_rows(self, positions: Positions) -> RaggedColumn:
        """The rows at positions that were already checked; the values are a view if `positions` is a range, else a
        copy."""
        if isinstance(positions, range):
            start, stop = self.offsets[positions.start], self.offsets[positions.stop]
            return RaggedColumn(self.values[int(start) : int(stop)], self.lengths[positions.start : positions.stop])
        lengths = self.lengths.numpy()[positions]
        return RaggedColumn(self._values_at(positions, lengths), torch.from_numpy(lengths))

    def _values_at(self, positions: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> torch.Tensor:
        num_values = int(lengths.sum())
        if num_values > LONG_ROW * len(positions):
            starts, stops = self.offsets[:-1][positions].tolist(), self.offsets[1:][positions].tolist()
            return torch.cat([self.values[start:stop] for start, stop in zip(starts, stops, strict=True)])
        # Element j of a row lies at offset + j; in the result it lies at end - length + j.
        shifts = self.offsets[:-1][positions] - (np.cumsum(lengths) - lengths)
        return take_tensor(self.values, np.repeat(shifts, lengths) + np.arange(num_values))

    def slice(self, start: int, stop: int) -> RaggedColumn:
        """Rows start..stop-1, sharing memory."""
        return self.rows(slice(start, stop))

    @staticmethod
    def concat(columns: Sequence[RaggedColumn], name: str = "ragged column") -> RaggedColumn:
        """All rows of one or more columns, one after the other. Raises DataError, starting with `name`, if dtypes or
        shapes differ."""
        return RaggedColumn(
            concat_tensors(name, [column.values for column in columns]),
            torch.cat([column.lengths for column in columns]),
        )

    def same_as(self, other: RaggedColumn) -> bool:
        """Whether rows and dtype are equal; NaN equals NaN."""
        return same_tensor(self.lengths, other.lengths) and same_tensor(self.values, other.values)

    def __reduce__(self) -> tuple[object, ...]:
        return _unpickled, (pack("values of a ragged column", self.values), pack("lengths", self.lengths))


def _numbers(rows: Sequence[Sequence[float]], dtype: torch.dtype | None) -> torch.Tensor:
    numbers = [number for row in rows for number in row]
    if not numbers and dtype is None:
        raise DataError("ragged column: the dtype cannot be inferred, because there are no numbers; pass `dtype`")
    try:
        return torch.tensor(numbers, dtype=dtype)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise DataError(f"ragged column: rows must contain numbers of one type: {error}") from error


def _unpickled(values: PackedTensor, lengths: PackedTensor) -> RaggedColumn:
    return RaggedColumn(unpack(values), unpack(lengths))
