"""Columns of a batch that are stored in an object store, as shards that workers put there.

For each block of columns, two small arrays say in which rows of which shards the batch's rows are. Operations on rows
only index these arrays, so a batch can be sliced, shuffled and sent without moving its data. Data moves when a column
is fetched.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, compress
from typing import Protocol, Self, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from rljob_trainer.batch.columns import concat_tensors, take_objects, take_tensor
from rljob_trainer.batch.ragged import RaggedColumn
from rljob_trainer.batch.row_index import Positions
from rljob_trainer.errors import DataError

BYTES_PER_ROW = 8
"""A block stores for each row the number of its shard and its row number there, 32 bits each."""


class Shard(Protocol):
    """The content of a shard: a batch without remote columns."""

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Tensor columns."""

    @property
    def objects(self) -> Mapping[str, tuple[object, ...]]:
        """Object columns."""

    @property
    def ragged(self) -> Mapping[str, RaggedColumn]:
        """Ragged columns."""


class ShardReference(ABC):
    """A reference to one shard in a store. References must be hashable, and equal only if they are to the same
    shard."""

    @classmethod
    @abstractmethod
    def fetch_all(cls, references: Sequence[Self]) -> Sequence[Shard]:
        """The shards of several references, in that order; a single call, so that a store can fetch them together."""


@dataclass(frozen=True)
class LocalColumns:
    """Columns in the memory of this process, by kind."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    objects: dict[str, tuple[object, ...]] = field(default_factory=dict)
    ragged: dict[str, RaggedColumn] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class RemoteBlock:
    """Columns of a batch that are stored in the same rows of the same shards.

    `columns` maps names in the batch to names in the shards. Row i of the batch is row `row_in_shard[i]` of
    `shards[shard_of_row[i]]`; both arrays are int32 [B]. Raises DataError if they have different lengths, or if there
    is no shard: an empty batch needs one too, because only shards know the kinds of columns.
    """

    columns: Mapping[str, str]
    shards: tuple[ShardReference, ...]
    shard_of_row: npt.NDArray[np.int32]
    row_in_shard: npt.NDArray[np.int32]

    def __post_init__(self) -> None:
        if not self.shards:
            raise DataError(f"remote columns {sorted(self.columns)}: there must be at least one shard")
        if self.shard_of_row.shape != self.row_in_shard.shape or self.shard_of_row.ndim != 1:
            raise DataError(
                f"remote columns {sorted(self.columns)}: shard_of_row and row_in_shard must both be [B] (seen: "
                f"{self.shard_of_row.shape} and {self.row_in_shard.shape})"
            )
        if len(self) and not 0 <= int(self.shard_of_row.min()) <= int(self.shard_of_row.max()) < len(self.shards):
            raise DataError(
                f"remote columns {sorted(self.columns)}: shard_of_row must be from 0 to {len(self.shards) - 1} (seen: "
                f"{self.shard_of_row.min()} to {self.shard_of_row.max()})"
            )
        if len(self) and int(self.row_in_shard.min()) < 0:
            raise DataError(f"remote columns {sorted(self.columns)}: a shard has no row {self.row_in_shard.min()}")

    @staticmethod
    def of_shard(reference: ShardReference, names: Iterable[str], num_rows: int) -> RemoteBlock:
        """A block of all rows of one shard. The columns keep the names that they have in the shard."""
        return RemoteBlock(
            {name: name for name in names},
            (reference,),
            np.zeros(num_rows, dtype=np.int32),
            np.arange(num_rows, dtype=np.int32),
        )

    def __len__(self) -> int:
        return len(self.shard_of_row)

    def with_columns(self, columns: Mapping[str, str]) -> RemoteBlock:
        """The same rows of these columns (name here -> name in the shards)."""
        return RemoteBlock(columns, self.shards, self.shard_of_row, self.row_in_shard)

    def take_rows(self, positions: Positions) -> RemoteBlock:
        """The rows at these positions, in that order. References to shards without any of these rows are released."""
        index = slice(positions.start, positions.stop) if isinstance(positions, range) else positions
        return _block(self.columns, self.shards, self.shard_of_row[index], self.row_in_shard[index])

    def is_same_column(self, name: str, other: RemoteBlock) -> bool:
        """Whether column `name` of both blocks is the same rows of the same shards."""
        if self.columns[name] != other.columns[name] or len(self) != len(other):
            return False
        if not np.array_equal(self.row_in_shard, other.row_in_shard):
            return False
        numbers = {shard: number for number, shard in enumerate(self.shards)}
        renumbered = np.array([numbers.get(shard, -1) for shard in other.shards], dtype=np.int32)
        return np.array_equal(self.shard_of_row, renumbered[other.shard_of_row])

    def local_columns(self, names: Iterable[str], shard_of: Mapping[ShardReference, Shard]) -> LocalColumns:
        """The columns `names` of the batch, from fetched shards. If all rows are consecutive rows of one shard, tensors
        and ragged values are views, otherwise copies.

        Raises DataError if a shard lacks a column or rows of it, or if shards differ in a column's kind, dtype or
        shape.
        """
        shards = [shard_of[reference] for reference in self.shards]
        pieces, order = self._pieces()
        used = [(shards[piece.shard], piece.rows) for piece in pieces]
        local = LocalColumns()
        for name in names:
            source, where = self.columns[name], f"remote column '{name}'"
            if all(source in shard.tensors for shard in shards):
                tensors = [take_tensor(_long_enough(where, shard.tensors[source], rows), rows) for shard, rows in used]
                local.tensors[name] = _in_order(concat_tensors(where, tensors), order, take_tensor)
            elif all(source in shard.ragged for shard in shards):
                ragged = [_long_enough(where, shard.ragged[source], rows).take_rows(rows) for shard, rows in used]
                local.ragged[name] = _in_order(RaggedColumn.concat(ragged, where), order, RaggedColumn.take_rows)
            elif all(source in shard.objects for shard in shards):
                parts = [take_objects(_long_enough(where, shard.objects[source], rows), rows) for shard, rows in used]
                local.objects[name] = _in_order(tuple(chain.from_iterable(parts)), order, take_objects)
            else:
                raise DataError(f"{where}: not every shard has a column '{source}' of one kind; workers must agree")
        return local

    def _pieces(self) -> tuple[list[_Piece], Positions | None]:
        """The rows to take from each shard, and the order to bring them into (None if they are already in order)."""
        if not len(self):
            return [_Piece(0, range(0))], None
        is_start = np.ones(len(self), dtype=np.bool_)
        is_start[1:] = (np.diff(self.shard_of_row) != 0) | (np.diff(self.row_in_shard) != 1)
        starts = np.flatnonzero(is_start)
        if len(starts) <= len(self.shards) + len(self) // ROWS_PER_RUN:
            lengths = np.diff(starts, append=len(self))
            runs = zip(self.shard_of_row[starts], self.row_in_shard[starts], lengths, strict=True)
            return [_Piece(int(shard), range(int(row), int(row + length))) for shard, row, length in runs], None
        by_shard = np.argsort(self.shard_of_row, kind="stable")
        ends = np.cumsum(np.bincount(self.shard_of_row, minlength=len(self.shards)))
        rows = self.row_in_shard.astype(np.int64)
        pieces = [_Piece(shard, rows[taken]) for shard, taken in enumerate(np.split(by_shard, ends[:-1]))]
        return pieces, None if len(pieces) == 1 else np.argsort(by_shard)


def fetch_shards(blocks: Iterable[RemoteBlock]) -> dict[ShardReference, Shard]:
    """Fetches all shards of these blocks, each once, with one call per store."""
    references: dict[type[ShardReference], dict[ShardReference, None]] = {}
    for block in blocks:
        for reference in block.shards:
            references.setdefault(type(reference), {})[reference] = None
    return {
        reference: shard
        for kind, wanted in references.items()
        for reference, shard in zip(wanted, kind.fetch_all(list(wanted)), strict=True)
    }


def concat_blocks(blocks_of_batches: Sequence[Sequence[RemoteBlock]]) -> tuple[RemoteBlock, ...]:
    """Blocks of the rows of all batches, one after the other. Each batch has the same columns, but may group them in
    different blocks.

    Raises DataError if a column has different names in the shards of two batches.
    """
    block_numbers = [
        {name: number for number, block in enumerate(blocks) for name in block.columns} for blocks in blocks_of_batches
    ]
    names_of_blocks: dict[tuple[int, ...], list[str]] = {}
    for name in block_numbers[0]:
        names_of_blocks.setdefault(tuple(numbers[name] for numbers in block_numbers), []).append(name)
    return tuple(
        _concat([blocks[number] for blocks, number in zip(blocks_of_batches, numbers, strict=True)], names)
        for numbers, names in names_of_blocks.items()
    )


ROWS_PER_RUN = 8
"""Consecutive rows are copied in runs if the mean length of the runs is at least this. Copying a run costs as much as
gathering a few rows, but the result needs no reordering."""


@dataclass(frozen=True)
class _Piece:
    """Rows to take from one shard."""

    shard: int
    rows: Positions


def _concat(blocks: Sequence[RemoteBlock], names: Sequence[str]) -> RemoteBlock:
    columns = {name: blocks[0].columns[name] for name in names}
    number_of: dict[ShardReference, int] = {}
    shard_of_row = []
    for block in blocks:
        for name, source in columns.items():
            if block.columns[name] != source:
                raise DataError(
                    f"concat: remote column '{name}' is called '{source}' in the shards of one batch and "
                    f"'{block.columns[name]}' in those of another; fetch it first"
                )
        numbers = [number_of.setdefault(shard, len(number_of)) for shard in block.shards]
        shard_of_row.append(np.array(numbers, dtype=np.int32)[block.shard_of_row])
    rows = np.concatenate([block.row_in_shard for block in blocks])
    return _block(columns, tuple(number_of), np.concatenate(shard_of_row), rows)


def _block(
    columns: Mapping[str, str],
    shards: tuple[ShardReference, ...],
    shard_of_row: npt.NDArray[np.int32],
    row_in_shard: npt.NDArray[np.int32],
) -> RemoteBlock:
    """A block without unused shards. A block without rows keeps one shard, which knows the kinds of the columns."""
    is_used = np.bincount(shard_of_row, minlength=len(shards)) > 0
    is_used[0] |= not len(shard_of_row)
    if not is_used.all():
        shards = tuple(compress(shards, is_used))
        shard_of_row = (np.cumsum(is_used, dtype=np.int32) - np.int32(1))[shard_of_row]
    return RemoteBlock(columns, shards, shard_of_row, row_in_shard)


Column = TypeVar("Column", torch.Tensor, RaggedColumn, tuple[object, ...])


def _long_enough(where: str, column: Column, rows: Positions) -> Column:
    if len(rows) and len(column) <= (needed := int(max(rows[0], rows[-1]) if isinstance(rows, range) else rows.max())):
        raise DataError(f"{where}: a shard has no row {needed}; it has {len(column)} rows")
    return column


def _in_order(column: Column, order: Positions | None, take: Callable[[Column, Positions], Column]) -> Column:
    return column if order is None else take(column, order)
