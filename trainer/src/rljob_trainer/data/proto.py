"""`DataProto`: a batch that travels between the controller and the workers.

Columns are tensors or Python objects, all with the same number of rows; `meta` holds what is true of the whole batch.
Operations return new batches and share column memory where they can; none changes its argument.

Legend: B rows (sequences).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from rljob_trainer.errors import DataError

MetaValue = str | int | float | bool | None | tuple[int, ...] | tuple[float, ...] | tuple[str, ...]


@dataclass(frozen=True)
class DataProto:
    """A batch of B rows.

    `tensors`: name -> tensor whose first dimension is B. `objects`: name -> tuple of B Python values (they must
    pickle). `meta`: name -> plain value for the whole batch.
    Raises DataError when columns differ in their number of rows.
    """

    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    objects: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    meta: Mapping[str, MetaValue] = field(default_factory=dict)

    def __post_init__(self) -> None:
        lengths = {name: int(column.shape[0]) for name, column in self.tensors.items()}
        lengths.update({name: len(column) for name, column in self.objects.items()})
        if len(set(lengths.values())) > 1:
            raise DataError(f"batch: columns must have the same number of rows (seen: {lengths})")

    def __len__(self) -> int:
        for tensor in self.tensors.values():
            return int(tensor.shape[0])
        for column in self.objects.values():
            return len(column)
        return 0

    def __getitem__(self, name: str) -> torch.Tensor:
        """The tensor column of that name."""
        if name not in self.tensors:
            raise DataError(f"batch: no tensor column '{name}' (there are: {', '.join(sorted(self.tensors))})")
        return self.tensors[name]

    def object_column(self, name: str) -> tuple[object, ...]:
        """The object column of that name."""
        if name not in self.objects:
            raise DataError(f"batch: no object column '{name}' (there are: {', '.join(sorted(self.objects))})")
        return self.objects[name]

    def select(self, tensors: Sequence[str] = (), objects: Sequence[str] = ()) -> DataProto:
        """Only the named columns; `meta` is kept."""
        return DataProto(
            {name: self[name] for name in tensors}, {name: self.object_column(name) for name in objects}, self.meta
        )

    def with_columns(
        self,
        tensors: Mapping[str, torch.Tensor] | None = None,
        objects: Mapping[str, Sequence[object]] | None = None,
        meta: Mapping[str, MetaValue] | None = None,
    ) -> DataProto:
        """A batch with these columns and values added or replaced."""
        return DataProto(
            {**self.tensors, **(tensors or {})},
            {**self.objects, **{name: tuple(column) for name, column in (objects or {}).items()}},
            {**self.meta, **(meta or {})},
        )

    def union(self, other: DataProto) -> DataProto:
        """Columns and meta of both. A name in both must have equal content. Raises DataError on a conflict."""
        for name in self.tensors.keys() & other.tensors.keys():
            if not torch.equal(self.tensors[name], other.tensors[name]):
                raise DataError(f"union: tensor column '{name}' differs between the two batches")
        for name in self.objects.keys() & other.objects.keys():
            if self.objects[name] != other.objects[name]:
                raise DataError(f"union: object column '{name}' differs between the two batches")
        for name in self.meta.keys() & other.meta.keys():
            if self.meta[name] != other.meta[name]:
                raise DataError(f"union: meta '{name}' differs ({self.meta[name]!r} and {other.meta[name]!r})")
        return self.with_columns(other.tensors, other.objects, other.meta)

    def rows(self, indices: Sequence[int] | torch.Tensor) -> DataProto:
        """The rows at `indices`, in that order."""
        index = torch.as_tensor(indices, dtype=torch.int64)
        positions = index.tolist()
        return DataProto(
            {name: column[index] for name, column in self.tensors.items()},
            {name: tuple(column[position] for position in positions) for name, column in self.objects.items()},
            self.meta,
        )

    def slice(self, start: int, stop: int) -> DataProto:
        """Rows start..stop-1, sharing memory."""
        return DataProto(
            {name: column[start:stop] for name, column in self.tensors.items()},
            {name: column[start:stop] for name, column in self.objects.items()},
            self.meta,
        )

    def split(self, num_rows: int) -> Iterator[DataProto]:
        """Consecutive batches of `num_rows` rows; the last one may be shorter."""
        for start in range(0, len(self), num_rows):
            yield self.slice(start, min(start + num_rows, len(self)))

    def chunk(self, num_chunks: int) -> list[DataProto]:
        """`num_chunks` consecutive batches of equal size. Raises DataError when B is not divisible."""
        if len(self) % num_chunks:
            raise DataError(f"chunk: {len(self)} rows cannot be split into {num_chunks} equal parts; pad first")
        return list(self.split(len(self) // num_chunks)) if len(self) else [self] * num_chunks

    def repeat(self, num_times: int) -> DataProto:
        """Each row `num_times` times, repetitions side by side (0 0 1 1 ...)."""
        return self.rows(torch.arange(len(self)).repeat_interleave(num_times))

    def padded_to_multiple(self, size: int) -> tuple[DataProto, int]:
        """Rows repeated from the start until B is a multiple of `size`; also how many rows were added."""
        num_added = -len(self) % size
        if not num_added:
            return self, 0
        return self.rows([index % len(self) for index in range(len(self) + num_added)]), num_added

    @staticmethod
    def concat(batches: Sequence[DataProto]) -> DataProto:
        """All rows one after the other. Batches must have the same columns; `meta` must be equal where shared."""
        if not batches:
            return DataProto()
        first = batches[0]
        meta: dict[str, MetaValue] = {}
        for batch in batches:
            if batch.tensors.keys() != first.tensors.keys() or batch.objects.keys() != first.objects.keys():
                raise DataError("concat: batches have different columns")
            for name, value in batch.meta.items():
                if meta.setdefault(name, value) != value:
                    raise DataError(f"concat: meta '{name}' differs ({meta[name]!r} and {value!r})")
        return DataProto(
            {name: torch.cat([batch.tensors[name] for batch in batches]) for name in first.tensors},
            {name: tuple(value for batch in batches for value in batch.objects[name]) for name in first.objects},
            meta,
        )


def pad_columns(columns: Sequence[torch.Tensor], length: int, value: float) -> torch.Tensor:
    """[B, length] from B one-dimensional tensors, padded on the right with `value`."""
    padded = torch.full((len(columns), length), value, dtype=columns[0].dtype)
    for row, column in enumerate(columns):
        padded[row, : column.shape[0]] = column
    return padded
