"""Columns from what people have at hand: lists, arrays and tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np
import numpy.typing as npt
import torch

from rljob_trainer.data.ragged import RaggedColumn
from rljob_trainer.data.remote import LocalColumns
from rljob_trainer.errors import DataError


def coerced_columns(columns: Mapping[str, object]) -> LocalColumns:
    """Columns by kind; `DataProto.from_columns` says what becomes what. Raises DataError, naming the column."""
    local = LocalColumns()
    for name, column in columns.items():
        where = f"from_columns: '{name}'"
        match column:
            case RaggedColumn():
                local.ragged[name] = column
            case torch.Tensor():
                local.tensors[name] = column
            case np.ndarray() if column.dtype.kind in "OUS":
                local.objects[name] = tuple(column.tolist())
            case np.ndarray():
                local.tensors[name] = _from_array(where, column)
            case list() | tuple():
                _add_sequence(local, name, where, column)
            case _:
                raise DataError(
                    f"{where} is a {type(column).__name__}; a column is a tensor, an array, a RaggedColumn, or a list "
                    "or tuple with one value per row; what holds for the whole batch goes into meta"
                )
    return local


def _add_sequence(local: LocalColumns, name: str, where: str, values: Sequence[object]) -> None:
    kinds = set(map(type, values))
    if kinds and all(issubclass(kind, torch.Tensor) for kind in kinds):
        local.ragged[name] = RaggedColumn.from_rows(cast("Sequence[torch.Tensor]", values))
        return
    for number_types, dtype in (
        ((bool, np.bool_), torch.bool),
        ((int, np.integer), torch.int64),
        ((int, float, np.integer, np.floating), torch.float32),
    ):
        if kinds and all(
            issubclass(kind, number_types) and (kind is not bool or dtype is torch.bool) for kind in kinds
        ):
            try:
                local.tensors[name] = torch.tensor(values, dtype=dtype)
            except (OverflowError, RuntimeError) as error:
                raise DataError(f"{where} holds a number that does not fit into {dtype}: {error}") from error
            return
    local.objects[name] = tuple(values)


def _from_array(where: str, array: npt.NDArray[np.generic]) -> torch.Tensor:
    # torch takes no negative strides and no foreign byte order, and warns of read-only memory.
    plain = np.require(array, dtype=array.dtype.newbyteorder("="), requirements=["C", "W"])
    try:
        return torch.from_numpy(plain)
    except TypeError as error:
        raise DataError(f"{where} is an array of {array.dtype}, of which torch has no tensors; convert it") from error
