"""Operations on columns of any kind: checks, size, comparison and the name of the kind for messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from rljob_trainer.batch.columns import same_tensor, same_value, tensor_bytes, value_bytes
from rljob_trainer.batch.ragged import RaggedColumn
from rljob_trainer.batch.remote import RemoteBlock
from rljob_trainer.errors import DataError

Column = torch.Tensor | tuple[object, ...] | RaggedColumn | RemoteBlock
"""A remote column is represented by its block, which may hold other columns too."""


def object_column(name: str, values: Iterable[object]) -> tuple[object, ...]:
    """An object column, one value per row. Raises DataError with the column's name if `values` is a string or not
    iterable."""
    _check_name(name)
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise DataError(f"batch: object column '{name}' needs one value per row (seen: {values!r:.80})")
    return tuple(values)


def check_kinds(tensors: Mapping[str, torch.Tensor], ragged: Mapping[str, RaggedColumn]) -> None:
    """Raises DataError with the column's name unless `tensors` are tensors with rows and `ragged` are RaggedColumns."""
    for name in (*tensors, *ragged):
        _check_name(name)
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise DataError(
                f"batch: tensor column '{name}' is a {type(tensor).__name__}; use DataProto.from_columns to convert it"
            )
        if not tensor.dim():
            raise DataError(f"batch: tensor column '{name}' is a single number and has no rows; put it into meta")
        if tensor.is_nested:
            raise DataError(f"batch: tensor column '{name}' is a nested tensor; make it a RaggedColumn of its rows")
    for name, column in ragged.items():
        if not isinstance(column, RaggedColumn):
            raise DataError(f"batch: ragged column '{name}' is a {type(column).__name__}; make it a RaggedColumn")


def _check_name(name: object) -> None:
    if not isinstance(name, str):
        raise DataError(f"batch: column names are strings (seen: {name!r})")


def kind_of(column: Column) -> str:
    """The kind of a column for messages: tensor, ragged, remote or object."""
    match column:
        case torch.Tensor():
            return "tensor"
        case RaggedColumn():
            return "ragged"
        case RemoteBlock():
            return "remote"
    return "object"


def local_bytes(name: str, column: Column) -> int:
    """The size in bytes of a local column, estimated for objects; 0 for a remote column. Raises DataError for objects
    that contain themselves."""
    match column:
        case torch.Tensor():
            return tensor_bytes(column)
        case RaggedColumn():
            return column.num_bytes
        case RemoteBlock():
            return 0
    try:
        return value_bytes(column)
    except RecursionError as error:
        raise _nested_too_deep(f"num_bytes: object column '{name}'") from error


def check_same_columns(where: str, batches: Sequence[Mapping[str, Column]]) -> None:
    """Raises DataError, starting with `where`, unless all batches have the same columns of the same kinds."""
    first = batches[0]
    for batch in batches[1:]:
        if odd := first.keys() ^ batch.keys():
            raise DataError(f"{where}: batches have different columns ({', '.join(sorted(odd))} not in all of them)")
        for name, column in first.items():
            _check_same_kind(where, name, column, batch[name])


def _check_same_kind(where: str, name: str, left: Column, right: Column) -> None:
    kinds = kind_of(left), kind_of(right)
    if kinds[0] != kinds[1]:
        advice = "; fetch it first" if "remote" in kinds else ""
        raise DataError(f"{where}: column '{name}' is {kinds[0]} in one batch and {kinds[1]} in another{advice}")


def check_same(where: str, name: str, left: Column, right: Column) -> None:
    """Raises DataError, starting with `where`, if a column that two batches share differs in kind or content."""
    _check_same_kind(where, name, left, right)
    match left, right:
        case torch.Tensor(), torch.Tensor():
            is_same = same_tensor(left, right)
        case RaggedColumn(), RaggedColumn():
            is_same = left.same_as(right)
        case RemoteBlock(), RemoteBlock():
            if not left.is_same_column(name, right):
                raise DataError(
                    f"{where}: remote column '{name}' refers to different rows or shards in the two batches; fetch it "
                    "in both to compare the values"
                )
            return
        case _:
            try:
                is_same = same_value(left, right)
            except RecursionError as error:
                raise _nested_too_deep(f"{where}: object column '{name}'") from error
    if not is_same:
        raise DataError(f"{where}: {kind_of(left)} column '{name}' differs between the two batches")


def _nested_too_deep(what: str) -> DataError:
    return DataError(f"{what} has values that contain themselves or are nested too deep; flatten them")
