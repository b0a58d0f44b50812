"""Arguments of batch operations, checked before anything is done with them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from rljob_trainer.errors import DataError

MAX_SEED = 2**63 - 1


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
