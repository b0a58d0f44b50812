"""`DataProto`: a batch that controller and workers exchange.

Columns are tensors, Python objects, ragged (rows of different lengths, packed) or remote (stored in an object store),
all with the same number of rows; `meta` holds values of the whole batch. Operations return new batches and share column
memory if possible; they never change their arguments.

Legend: B rows (sequences).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from types import MappingProxyType

import numpy as np
import torch

from rljob_trainer.batch.coercion import coerced_columns
from rljob_trainer.batch.column_checks import (
    Column,
    check_kinds,
    check_same,
    check_same_columns,
    kind_of,
    local_bytes,
    object_column,
)
from rljob_trainer.batch.columns import concat_tensors, take_objects, take_tensor
from rljob_trainer.batch.meta import MetaValue, coerced_meta, merged_meta
from rljob_trainer.batch.ragged import RaggedColumn
from rljob_trainer.batch.remote import BYTES_PER_ROW, RemoteBlock, concat_blocks, fetch_shards
from rljob_trainer.batch.row_index import (
    Positions,
    RowIndex,
    checked_count,
    checked_names,
    reordered_rows,
    row_positions,
)
from rljob_trainer.batch.wire import PackedTensor, pack, unpack
from rljob_trainer.errors import DataError


@dataclass(frozen=True, eq=False)
class DataProto:
    """A batch of B rows.

    `tensors`: name -> tensor whose first dimension is B. `objects`: name -> tuple of B Python values (they must
    pickle). `meta`: name -> plain value for the whole batch. `ragged`: name -> column of B rows of different lengths.
    `remote`: columns in an object store, until `fetched`. Column names are unique over all kinds.
    Raises DataError if columns differ in their number of rows, share a name, or have another type.
    """

    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    objects: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    meta: Mapping[str, MetaValue] = field(default_factory=dict)
    ragged: Mapping[str, RaggedColumn] = field(default_factory=dict)
    remote: tuple[RemoteBlock, ...] = ()

    def __post_init__(self) -> None:
        # Copies, so that later changes of the arguments do not change this batch.
        objects = {name: object_column(name, column) for name, column in self.objects.items()}
        object.__setattr__(self, "tensors", MappingProxyType(dict(self.tensors)))
        object.__setattr__(self, "objects", MappingProxyType(objects))
        object.__setattr__(self, "meta", MappingProxyType(coerced_meta(self.meta)))
        object.__setattr__(self, "ragged", MappingProxyType(dict(self.ragged)))
        object.__setattr__(self, "remote", tuple(block for block in self.remote if block.columns))
        check_kinds(self.tensors, self.ragged)
        lengths: dict[str, int] = {}
        for name, column in self.columns():
            if name in lengths:
                raise DataError(f"batch: there are two columns '{name}'; column names must be unique")
            lengths[name] = len(column)
        if len(set(lengths.values())) > 1:
            raise DataError(f"batch: columns must have the same number of rows (seen: {lengths})")

    @staticmethod
    def from_columns(columns: Mapping[str, object], meta: Mapping[str, object] | None = None) -> DataProto:
        """A batch from lists, arrays and tensors.

        Tensor columns: tensors and numeric arrays (sharing memory), and lists and tuples of booleans (bool), integers
        (int64) or numbers (float32). Ragged columns: lists of tensors, and RaggedColumns. Object columns: other lists
        and tuples, and arrays of objects or strings. In `meta`, lists become tuples.

        verl makes object columns of arrays and of lists of numbers; this method does not. TensorDicts are not
        supported. Raises DataError with the column's name for anything else, and for numbers outside the range of the
        column's dtype."""
        local = coerced_columns(columns)
        return DataProto(local.tensors, local.objects, coerced_meta(meta or {}), local.ragged)

    def columns(self) -> Iterator[tuple[str, Column]]:
        """The name and content of every column of any kind; for a remote column the block that it belongs to."""
        yield from chain(self.tensors.items(), self.objects.items(), self.ragged.items())
        yield from ((name, block) for block in self.remote for name in block.columns)

    def __contains__(self, name: object) -> bool:
        return any(present == name for present, _ in self.columns())

    def __len__(self) -> int:
        return next((len(column) for _, column in self.columns()), 0)

    def column_names(self) -> list[str]:
        """The names of all columns of any kind."""
        return [name for name, _ in self.columns()]

    def _column(self, name: str) -> Column:
        for present, column in self.columns():
            if present == name:
                return column
        raise DataError(f"batch: no column '{name}' (there are: {', '.join(sorted(self.column_names()))})")

    def __getitem__(self, name: str) -> torch.Tensor:
        """The tensor column of that name. Raises DataError if there is none, or if it is remote."""
        if not isinstance(name, str):
            raise DataError(
                f"batch: column names are strings (seen: {name!r}); use batch.rows({name!r}) to select rows"
            )
        if name not in self.tensors:
            raise self._no_column("tensor", name, self.tensors)
        return self.tensors[name]

    def object_column(self, name: str) -> tuple[object, ...]:
        """The object column of that name. Raises as `batch[name]`."""
        if name not in self.objects:
            raise self._no_column("object", name, self.objects)
        return self.objects[name]

    def ragged_column(self, name: str) -> RaggedColumn:
        """The ragged column of that name. Raises as `batch[name]`."""
        if name not in self.ragged:
            raise self._no_column("ragged", name, self.ragged)
        return self.ragged[name]

    def _no_column(self, kind: str, name: str, present: Iterable[str]) -> DataError:
        seen = dict(self.columns()).get(name)
        if isinstance(seen, RemoteBlock):
            return DataError(f"batch: column '{name}' is remote; get it with fetched(['{name}']) first")
        others = "" if seen is None else f"; '{name}' is of kind {kind_of(seen)}"
        return DataError(f"batch: no {kind} column '{name}' (there are: {', '.join(sorted(present))}){others}")

    def is_remote(self, name: str) -> bool:
        """Whether a column must be fetched before it can be read. Raises DataError if there is no such column."""
        return isinstance(self._column(name), RemoteBlock)

    @property
    def has_remote(self) -> bool:
        """Whether any column is remote."""
        return bool(self.remote)

    def column_bytes(self, name: str) -> int:
        """The size in bytes of a local column; 0 for a remote one. Objects are estimated (the length of strings and
        bytes, 8 per number). Raises DataError if there is no such column."""
        return local_bytes(name, self._column(name))

    def num_bytes(self) -> int:
        """The approximate size of the pickled batch in bytes: local columns (objects are estimated), and 8 bytes per
        row for each remote block."""
        return sum(map(self.column_bytes, self.column_names())) + len(self.remote) * len(self) * BYTES_PER_ROW

    def tensor_versions(self) -> dict[str, int]:
        """torch's version counter (number of in-place changes) of each tensor column and of each ragged column's
        values.

        All tensors that share memory share the counter. Tensors made in inference mode have none and are omitted."""
        ragged = {name: column.values for name, column in self.ragged.items()}
        tensors = {**self.tensors, **ragged}
        return {name: tensor._version for name, tensor in tensors.items() if not tensor.is_inference()}

    def only(self, names: Iterable[str]) -> DataProto:
        """The named columns of any kind, without meta. Raises DataError (verl: KeyError) for unknown names.

        Instead of verl's `pop`, which removes columns from a batch, use `only` and `without`."""
        return replace(self._selected({name: name for name in checked_names("only", names)}), meta={})

    def without(self, names: Iterable[str]) -> DataProto:
        """All columns except the named ones, and meta. Raises DataError for unknown names."""
        dropped = set(checked_names("without", names))
        for name in dropped:
            self._column(name)
        return self._selected({name: name for name in self.column_names() if name not in dropped})

    def rename(self, names: Mapping[str, str]) -> DataProto:
        """Renames columns of any kind (verl: tensors only); `names` maps old to new names and may swap names.

        Raises DataError for an unknown name, or if two columns would have the same name."""
        for name in names:
            self._column(name)
        return self._selected({name: names.get(name, name) for name in self.column_names()})

    def _selected(self, names: Mapping[str, str]) -> DataProto:
        """A batch with only the named columns, and with all of meta. `names` maps names in this batch to names in the
        result."""
        for name in names:
            self._column(name)
        new_names = list(names.values())
        for name in new_names:
            if new_names.count(name) > 1:
                raise DataError(f"rename: two columns would be called '{name}'")
        blocks = [
            block.with_columns({names[name]: source for name, source in block.columns.items() if name in names})
            for block in self.remote
        ]
        return DataProto(
            {new: self.tensors[name] for name, new in names.items() if name in self.tensors},
            {new: self.objects[name] for name, new in names.items() if name in self.objects},
            self.meta,
            {new: self.ragged[name] for name, new in names.items() if name in self.ragged},
            tuple(blocks),
        )

    def with_columns(
        self,
        tensors: Mapping[str, torch.Tensor] | None = None,
        objects: Mapping[str, Sequence[object]] | None = None,
        meta: Mapping[str, MetaValue] | None = None,
        ragged: Mapping[str, RaggedColumn] | None = None,
    ) -> DataProto:
        """A batch with these columns and values added or replaced."""
        new = {**(tensors or {}), **(objects or {}), **(ragged or {})}
        others = self._selected({name: name for name in self.column_names() if name not in new})
        return DataProto(
            {**others.tensors, **(tensors or {})},
            {**others.objects, **{name: object_column(name, column) for name, column in (objects or {}).items()}},
            {**self.meta, **(meta or {})},
            {**others.ragged, **(ragged or {})},
            others.remote,
        )

    def with_remote(self, blocks: Iterable[RemoteBlock]) -> DataProto:
        """A batch with these remote columns added. Raises DataError if a name exists already."""
        return replace(self, remote=(*self.remote, *blocks))

    def fetched(self, names: Iterable[str] | None = None) -> DataProto:
        """The same batch with these remote columns (by default all) fetched; local columns are unchanged.

        If all rows of the batch are consecutive rows of one shard, columns are views of the store's memory where
        possible; otherwise they are copies. Raises DataError for unknown names, and if shards do not match each
        other."""
        wanted = set(self.column_names() if names is None else checked_names("fetched", names))
        for name in wanted:
            self._column(name)
        blocks = [block for block in self.remote if wanted & block.columns.keys()]
        shard_of = fetch_shards(blocks)
        batch = self
        for block in blocks:
            local = block.local_columns([name for name in block.columns if name in wanted], shard_of)
            batch = batch.with_columns(local.tensors, local.objects, ragged=local.ragged)
        return batch

    def union(self, other: DataProto) -> DataProto:
        """The columns and meta of both batches. If both have a column, its content must be equal (NaN equals NaN); a
        remote column must have the same rows of the same shards. Raises DataError on a conflict. verl changes the first
        batch in place."""
        theirs = dict(_checked_batch("union", other).columns())
        for name, column in self.columns():
            if name in theirs:
                check_same("union", name, column, theirs[name])
        added = other.without(set(self.column_names()) & theirs.keys())
        meta = merged_meta("union", (self.meta, other.meta))
        return self.with_columns(added.tensors, added.objects, meta, added.ragged).with_remote(added.remote)

    def rows(self, index: RowIndex) -> DataProto:
        """The rows at `index`, in that order: row numbers (negative ones count from the end), a mask, a slice, or one
        row.

        Slices with step 1 share memory. A single row is also a batch (verl: an item without batch dimension). Raises
        DataError for rows that do not exist."""
        return self._at(row_positions(index, len(self)))

    def _at(self, positions: Positions) -> DataProto:
        return DataProto(
            {name: take_tensor(column, positions) for name, column in self.tensors.items()},
            {name: take_objects(column, positions) for name, column in self.objects.items()},
            self.meta,
            {name: column.take_rows(positions) for name, column in self.ragged.items()},
            tuple(block.take_rows(positions) for block in self.remote),
        )

    def slice(self, start: int, stop: int) -> DataProto:
        """Rows start..stop-1, sharing memory."""
        return self.rows(slice(start, stop))

    def split(self, num_rows: int) -> Iterator[DataProto]:
        """Consecutive batches of `num_rows` rows, sharing memory; the last one may be shorter."""
        num_rows = checked_count("split: number of rows", num_rows)
        return (self.slice(start, start + num_rows) for start in range(0, len(self), num_rows))

    def chunk(self, num_chunks: int) -> list[DataProto]:
        """`num_chunks` consecutive batches of equal size, sharing memory. Raises DataError if B is not divisible.

        As in verl, except that verl's chunks share one mutable meta dictionary."""
        num_chunks = checked_count("chunk: number of chunks", num_chunks)
        if len(self) % num_chunks:
            raise DataError(f"chunk: {len(self)} rows cannot be split into {num_chunks} equal parts; pad first")
        return list(self.split(len(self) // num_chunks)) if len(self) else [self] * num_chunks

    def repeat(self, num_times: int, interleaved: bool = True) -> DataProto:
        """Each row `num_times` times: interleaved (0 0 1 1), otherwise batch after batch (0 1 0 1)."""
        num_times = checked_count("repeat: number of times", num_times, least=0)
        rows = np.arange(len(self))
        return self._at(np.repeat(rows, num_times) if interleaved else np.tile(rows, num_times))

    def reorder(self, order: RowIndex) -> DataProto:
        """All rows in a new order. Raises DataError unless `order` names each row once.

        verl reorders in place and accepts any rows; use `rows` to select or repeat rows."""
        return self._at(reordered_rows(order, len(self)))

    def padded_to_multiple(self, size: int) -> tuple[DataProto, int]:
        """Repeats the last row until B is a multiple of `size`; returns the batch and the number of added rows.
        `unpadded` removes them. An empty batch stays empty.

        All added rows are at the end. verl has two ways: auto padding repeats the last row in the caller's own batch,
        and pad_dataproto_to_divisor repeats rows from the first one."""
        size = checked_count("padded_to_multiple: size", size)
        num_added = -len(self) % size
        if not num_added:
            return self, 0
        return self._at(np.minimum(np.arange(len(self) + num_added), len(self) - 1)), num_added

    def unpadded(self, num_added: int) -> DataProto:
        """The batch without the last `num_added` rows. Raises DataError if there are fewer."""
        return self.slice(0, len(self) - checked_count("unpadded: number of rows", num_added, 0, len(self)))

    @staticmethod
    def concat(batches: Sequence[DataProto]) -> DataProto:
        """All rows one after the other. Raises DataError unless the batches have the same columns of the same kinds and
        dtypes, and equal values for shared names in `meta`.

        verl also merges a meta value called `metrics`; here methods return metrics separately from batches."""
        if not isinstance(batches, Sequence):
            raise DataError(f"concat: takes a list of batches (seen: a {type(batches).__name__})")
        if not batches:
            return DataProto()
        for batch in batches:
            _checked_batch("concat", batch)
        check_same_columns("concat", [dict(batch.columns()) for batch in batches])
        first = batches[0]
        where = "concat: column '{}'".format
        return DataProto(
            {name: concat_tensors(where(name), [batch.tensors[name] for batch in batches]) for name in first.tensors},
            {name: tuple(chain.from_iterable(batch.objects[name] for batch in batches)) for name in first.objects},
            merged_meta("concat", [batch.meta for batch in batches]),
            {n: RaggedColumn.concat([batch.ragged[n] for batch in batches], where(n)) for n in first.ragged},
            concat_blocks([batch.remote for batch in batches]),
        )

    def __reduce__(self) -> tuple[Callable[..., DataProto], tuple[object, ...]]:
        tensors = {name: pack(name, tensor) for name, tensor in self.tensors.items()}
        return _unpickled, (tensors, dict(self.objects), dict(self.meta), dict(self.ragged), self.remote)


def _checked_batch(where: str, batch: object) -> DataProto:
    if not isinstance(batch, DataProto):
        raise DataError(f"{where}: takes batches, which are DataProto (seen: a {type(batch).__name__})")
    return batch


def _unpickled(
    tensors: Mapping[str, PackedTensor],
    objects: Mapping[str, tuple[object, ...]],
    meta: Mapping[str, MetaValue],
    ragged: Mapping[str, RaggedColumn],
    remote: tuple[RemoteBlock, ...],
) -> DataProto:
    return DataProto({name: unpack(packed) for name, packed in tensors.items()}, objects, meta, ragged, remote)
