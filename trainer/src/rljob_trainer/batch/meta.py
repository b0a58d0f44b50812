"""Metadata of a whole batch: plain values by name."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping
from typing import cast

import numpy as np

from rljob_trainer.batch.columns import same_value
from rljob_trainer.errors import DataError

MetaValue = str | int | float | bool | None | tuple[int, ...] | tuple[float, ...] | tuple[str, ...]
"""Values are immutable, so batches can share them."""


def coerced_meta(meta: Mapping[str, object]) -> dict[str, MetaValue]:
    """Converts metadata to plain values: lists to tuples, NumPy numbers to Python numbers. Raises DataError with the
    name for any other value."""
    if not isinstance(meta, Mapping):
        raise DataError(f"batch: meta must be a mapping from names to values (seen: a {type(meta).__name__})")
    return {name: _coerced(name, value) for name, value in meta.items()}


def merged_meta(where: str, metas: Iterable[Mapping[str, MetaValue]]) -> dict[str, MetaValue]:
    """The union of all values. Raises DataError, starting with `where`, if a name has different values."""
    merged: dict[str, MetaValue] = {}
    for meta in metas:
        for name, value in meta.items():
            if not same_value(merged.setdefault(name, value), value):
                raise DataError(f"{where}: meta '{name}' differs ({merged[name]!r} and {value!r})")
    return merged


def _coerced(name: str, value: object) -> MetaValue:
    if not isinstance(name, str):
        raise DataError(f"batch: names in meta are strings (seen: {name!r})")
    plain = _python_number(value)
    if isinstance(plain, list | tuple):
        items = tuple(map(_python_number, plain))
        kinds = set(map(type, items))
        if kinds <= {int, float} or kinds in ({str}, {bool}):
            return cast("tuple[int, ...] | tuple[float, ...] | tuple[str, ...]", items)
    elif plain is None or isinstance(plain, str | int | float):
        return plain
    raise DataError(
        f"batch: meta '{name}' is {reprlib.repr(value)}; it must be a string, a number, a boolean, None, or a list of "
        "strings, of numbers or of booleans"
    )


def _python_number(value: object) -> object:
    return value.item() if isinstance(value, np.generic) else value
