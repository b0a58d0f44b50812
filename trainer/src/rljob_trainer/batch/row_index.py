"""Which rows are meant: integers, slices, masks and lists, checked once and in one form.

Consecutive rows stay a `range`, so that columns can give views of them instead of copies.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from rljob_trainer.batch.shuffle import shuffled_order
from rljob_trainer.errors import DataError

RowIndex = int | slice | Sequence[int] | npt.NDArray[np.integer] | npt.NDArray[np.bool_] | torch.Tensor
"""One row, a range of rows, row numbers (negative ones count from the end), or a mask with one truth value per row."""

Positions = range | npt.NDArray[np.int64]
"""Checked row numbers, none negative; a range has step 1."""


def row_positions(index: RowIndex, num_rows: int) -> Positions:
    """The rows that `index` means in a column of `num_rows` rows, in that order.

    Raises DataError for rows that are not there, masks of another length and indices that are no whole numbers.
    """
    if isinstance(index, slice):
        try:
            chosen = range(num_rows)[index]
        except (TypeError, ValueError) as error:
            raise DataError(f"rows: {index} is no range of rows: {error}") from error
        if not chosen:
            return range(0)
        return chosen if chosen.step == 1 else np.asarray(chosen, dtype=np.int64)
    given = _as_array(index)
    if given.ndim > 1:
        raise DataError(f"rows: an index has one dimension (seen: {given.ndim}); flatten it")
    if given.dtype == np.bool_:
        if given.shape != (num_rows,):
            raise DataError(f"rows: a mask needs one value for each of {num_rows} rows (seen: {given.size})")
        return np.flatnonzero(given)
    if given.size and not np.issubdtype(given.dtype, np.integer):
        raise DataError(f"rows: an index holds whole numbers or truth values (seen: {given.dtype})")
    # Before they become signed: the largest unsigned ones would count from the end.
    wrong = (given < -num_rows) | (given >= num_rows)
    if wrong.any():
        raise DataError(f"rows: row {given[wrong][0]} is not there; the batch has {num_rows} rows")
    positions = given.astype(np.int64).reshape(-1)
    return np.where(positions < 0, positions + num_rows, positions)


def repeated_rows(counts: Sequence[int] | npt.NDArray[np.integer] | torch.Tensor, num_rows: int) -> Positions:
    """Row i `counts[i]` times, repetitions side by side. Raises DataError unless each row has a count of 0 or more."""
    given = _as_array(counts)
    if given.shape != (num_rows,) or (given.size and not np.issubdtype(given.dtype, np.integer)) or (given < 0).any():
        raise DataError(
            f"repeat_rows: each of {num_rows} rows needs a whole number of times, 0 or more (seen: {counts})"
        )
    return np.repeat(np.arange(num_rows), given.astype(np.int64))


def reordered_rows(order: RowIndex, num_rows: int) -> Positions:
    """The rows in a new order. Raises DataError unless it names each row once."""
    positions = row_positions(order, num_rows)
    if not np.array_equal(np.sort(positions), np.arange(num_rows)):
        raise DataError(f"reorder: the order must name each of {num_rows} rows once; use rows() to pick some")
    return positions


def shuffled_rows(num_rows: int, seed: int, epoch: int) -> Positions:
    """An order that depends on nothing but the arguments."""
    return shuffled_order(num_rows, seed, epoch)


def _as_array(
    index: int | Sequence[int] | npt.NDArray[np.integer] | npt.NDArray[np.bool_] | torch.Tensor,
) -> np.ndarray:
    try:
        return index.detach().cpu().numpy() if isinstance(index, torch.Tensor) else np.asarray(index)
    except (TypeError, ValueError) as error:
        raise DataError(f"rows: not an index: {error}") from error
