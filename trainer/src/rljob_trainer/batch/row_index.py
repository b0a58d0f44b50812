"""Checks the arguments of batch operations, and converts row indices (integers, slices, masks, lists) to one form.

Consecutive rows become a `range`, so that columns can return views instead of copies.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from rljob_trainer.errors import DataError

RowIndex = int | slice | Sequence[int] | npt.NDArray[np.integer] | npt.NDArray[np.bool_] | torch.Tensor
"""One row, a slice, row numbers (negative ones count from the end), or a mask with one boolean per row."""

Positions = range | npt.NDArray[np.int64]
"""Checked row numbers, none of them negative; a range has step 1."""


def row_positions(index: RowIndex, num_rows: int) -> Positions:
    """The row numbers that `index` selects from `num_rows` rows, in that order.

    Raises DataError for rows that do not exist, masks of another length, and indices that are not integers.
    """
    if isinstance(index, slice):
        try:
            chosen = range(num_rows)[index]
        except (TypeError, ValueError) as error:
            raise DataError(f"rows: {index} is not a valid slice: {error}") from error
        if not chosen:
            return range(0)
        return chosen if chosen.step == 1 else np.asarray(chosen, dtype=np.int64)
    given = _as_array(index)
    if given.ndim > 1:
        raise DataError(f"rows: an index must have one dimension (seen: {given.ndim}); flatten it")
    if given.dtype == np.bool_:
        if given.shape != (num_rows,):
            raise DataError(f"rows: a mask needs one value for each of {num_rows} rows (seen: {given.size})")
        return np.flatnonzero(given)
    if given.size and not np.issubdtype(given.dtype, np.integer):
        raise DataError(f"rows: an index must contain integers or booleans (seen: {given.dtype})")
    # Checked before the conversion to signed integers, in which the largest unsigned ones would become negative.
    wrong = (given < -num_rows) | (given >= num_rows)
    if wrong.any():
        raise DataError(f"rows: there is no row {given[wrong][0]}; the batch has {num_rows} rows")
    positions = given.astype(np.int64).reshape(-1)
    return np.where(positions < 0, positions + num_rows, positions)


def reordered_rows(order: RowIndex, num_rows: int) -> Positions:
    """The rows in a new order. Raises DataError unless `order` names each row once."""
    positions = row_positions(order, num_rows)
    if not np.array_equal(np.sort(positions), np.arange(num_rows)):
        raise DataError(f"reorder: the order must name each of {num_rows} rows once; use rows() to select rows")
    return positions


def checked_count(what: str, number: int, least: int = 1, most: int | None = None) -> int:
    """`number` as an int. Raises DataError, starting with `what`, unless it is an integer from `least` to `most`."""
    if isinstance(number, bool) or not isinstance(number, int | np.integer):
        raise DataError(f"{what} must be an integer (seen: {number!r})")
    if number < least or (most is not None and number > most):
        upper = "or more" if most is None else f"to {most}"
        raise DataError(f"{what} must be {least} {upper} (seen: {number})")
    return int(number)


def checked_names(where: str, names: Iterable[str]) -> list[str]:
    """Column names as a list. Raises DataError for a string, whose characters would be taken for names."""
    if isinstance(names, str):
        raise DataError(f"{where}: pass column names as a list (seen: the string {names!r})")
    return list(names)


def _as_array(
    index: int | Sequence[int] | npt.NDArray[np.integer] | npt.NDArray[np.bool_] | torch.Tensor,
) -> np.ndarray:
    try:
        return index.detach().cpu().numpy() if isinstance(index, torch.Tensor) else np.asarray(index)
    except (TypeError, ValueError) as error:
        raise DataError(f"rows: not an index: {error}") from error
