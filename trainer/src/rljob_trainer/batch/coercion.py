"""Converts lists, arrays and tensors to columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np
import torch

from rljob_trainer.batch.columns import tensor_of_array
from rljob_trainer.batch.ragged import RaggedColumn
from rljob_trainer.batch.remote import LocalColumns
from rljob_trainer.errors import DataError


def coerced_columns(columns: Mapping[str, object]) -> LocalColumns:
    """Columns by kind, converted as `DataProto.from_columns` documents. Raises DataError with the column's name."""
    if not isinstance(columns, Mapping):
        raise DataError(f"from_columns: columns must be a mapping from names (seen: a {type(columns).__name__})")
    local = LocalColumns()
    for name, column in columns.items():
        where = f"from_columns: '{name}'"
        match column:
            case RaggedColumn():
                local.ragged[name] = column
            case torch.Tensor():
                local.tensors[name] = column
            case np.ndarray() if (
                column.ndim and column.dtype.kind in "OUST" and not isinstance(column, np.ma.MaskedArray)
            ):
                local.objects[name] = tuple(column.tolist())
            case np.ndarray():
                local.tensors[name] = tensor_of_array(where, column)
            case list() | tuple():
                _add_sequence(local, name, where, column)
            case _:
                raise DataError(
                    f"{where} is a {type(column).__name__}; a column is a tensor, an array, a RaggedColumn, or a list "
                    "or tuple with one value per row; put values of the whole batch into meta"
                )
    return local


def _add_sequence(local: LocalColumns, name: str, where: str, values: Sequence[object]) -> None:
    """Adds a list or tuple to `local`: numbers as a tensor column, tensors as a ragged one, others as objects."""
    kinds = set(map(type, values))
    dtype = _number_dtype(kinds)
    try:
        if dtype is not None:
            local.tensors[name] = _numbers(values, dtype)
        elif kinds and all(issubclass(kind, torch.Tensor) for kind in kinds):
            local.ragged[name] = RaggedColumn.from_rows(cast("Sequence[torch.Tensor]", values))
        else:
            local.objects[name] = tuple(values)
    except (OverflowError, RuntimeError, ValueError) as error:
        raise DataError(f"{where} cannot become a column of {dtype or 'tensors'}: {error}") from error


def _numbers(values: Sequence[object], dtype: torch.dtype) -> torch.Tensor:
    tensor = torch.tensor(values, dtype=dtype)
    if dtype.is_floating_point and bool((tensor.isinf() & torch.tensor(values, dtype=torch.float64).isfinite()).any()):
        raise OverflowError(f"a number is larger than {torch.finfo(dtype).max:.4g}; pass a float64 tensor")
    return tensor


def _number_dtype(kinds: set[type]) -> torch.dtype | None:
    """The dtype for a list of values of these types; None unless all are booleans, or all are numbers."""
    if not kinds:
        return None
    if all(issubclass(kind, bool | np.bool_) for kind in kinds):
        return torch.bool
    if bool in kinds or not all(issubclass(kind, int | float | np.integer | np.floating) for kind in kinds):
        return None
    return torch.int64 if all(issubclass(kind, int | np.integer) for kind in kinds) else torch.float32
