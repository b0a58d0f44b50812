"""Which rows are meant: integers, slices, masks and lists, checked once and in one form; other arguments of batch
operations, checked before anything is done with them.

Consecutive rows stay a `range`, so that columns can give views of them instead of copies.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

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


def reordered_rows(order: RowIndex, num_rows: int) -> Positions:
    """The rows in a new order. Raises DataError unless it names each row once."""
    positions = row_positions(order, num_rows)
    if not np.array_equal(np.sort(positions), np.arange(num_rows)):
        raise DataError(f"reorder: the order must name each of {num_rows} rows once; use rows() to pick some")
    return positions


def checked_count(what: str, number: int, least: int = 1, most: int | None = None) -> int:
    """A whole number. Raises DataError, naming `what`, for anything else and for one that is too small or too large."""
    if isinstance(number, bool) or not isinstance(number, int | np.integer):
        raise DataError(f"{what} must be a whole number (seen: {number!r})")
    if number < least or (most is not None and number > most):
        upper = "or more" if most is None else f"to {most}"
        raise DataError(f"{what} must be {least} {upper} (seen: {number})")
    return int(number)


def checked_names(where: str, names: Iterable[str]) -> list[str]:
    """Names of columns. Raises DataError for a text, whose letters would be taken for names."""
    if isinstance(names, str):
        raise DataError(f"{where}: names of columns are a list (seen: the text {names!r})")
    return list(names)


def _as_array(
    index: int | Sequence[int] | npt.NDArray[np.integer] | npt.NDArray[np.bool_] | torch.Tensor,
) -> np.ndarray:
    try:
        return index.detach().cpu().numpy() if isinstance(index, torch.Tensor) else np.asarray(index)
    except (TypeError, ValueError) as error:
        raise DataError(f"rows: not an index: {error}") from error
