"""Random access to the rows of Parquet files, which together are one sequence of rows."""

from __future__ import annotations

import hashlib
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow
import pyarrow.parquet

from rljob_trainer.datasets.parquet_rows import parquet_errors, python_rows
from rljob_trainer.errors import DatasetError

ROWS_PER_READ = 8192
MAX_OPEN_FILES = 64
FOOTER_END_BYTES = 8
"""A file ends with the length of its footer (4 bytes) and `PAR1`."""


@dataclass(frozen=True)
class RowGroup:
    """A row group of one of the files. Parquet files can only be read by whole row groups."""

    file: int
    """Number of the file, from 0."""
    group: int
    """Number of the group in its file, from 0."""
    first_row: int
    """Number of its first row, over all files."""
    num_rows: int


class ParquetFiles:
    """The rows of some Parquet files, in the order of the files. `read` may be called by several threads."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """Reads the footers of all files. Raises DatasetError for a file that is not readable as Parquet or whose
        columns differ from those of the first file, ResourceError if the disk fails."""
        self.paths = tuple(paths)
        self._open: OrderedDict[int, pyarrow.parquet.ParquetFile] = OrderedDict()
        self._lock = threading.Lock()
        self.groups: list[RowGroup] = []
        self.column_names: tuple[str, ...] = ()
        self._first_rows_of_files: list[int] = []
        self._num_bytes: dict[str, int] = {}
        """Uncompressed bytes of each column, over all files."""
        num_rows = 0
        for number, path in enumerate(self.paths):
            self._first_rows_of_files.append(num_rows)
            with parquet_errors(path):
                footer = pyarrow.parquet.read_metadata(path)
                names = tuple(footer.schema.to_arrow_schema().names)
                sizes = [self._counted(footer.row_group(group)) for group in range(footer.num_row_groups)]
            self.column_names = self.column_names or names
            if set(names) != set(self.column_names):
                raise DatasetError(
                    f"{path}: has the columns {', '.join(names)}, but {self.paths[0]} has "
                    f"{', '.join(self.column_names)}; all files of a folder must have the same columns"
                )
            for group, size in enumerate(sizes):
                if size:
                    self.groups.append(RowGroup(number, group, num_rows, size))
                num_rows += size
        self.num_rows = num_rows
        self._first_rows = np.array([group.first_row for group in self.groups], dtype=np.int64)

    def digest(self, *, with_times: bool = True) -> str:
        """Returns a digest of name, size, time of the last change (`with_times`) and footer of all files. A footer has
        the schema, and the position, size and statistics of each column of each row group. So the digest changes if a
        file is replaced, without reading all of it."""
        digest = hashlib.sha256()
        for path in self.paths:
            with parquet_errors(path), path.open("rb") as file:
                status = path.stat()
                file.seek(-FOOTER_END_BYTES, 2)
                num_bytes = int.from_bytes(file.read(4), "little") + FOOTER_END_BYTES
                file.seek(-min(num_bytes, status.st_size), 2)
                time_ns = status.st_mtime_ns if with_times else 0
                digest.update(f"{path.name} {status.st_size} {time_ns} ".encode() + file.read())
        return digest.hexdigest()

    def location(self, number: int) -> str:
        """Returns file and row number (from 1) of a row, for messages."""
        file = bisect_right(self._first_rows_of_files, number) - 1
        return f"{self.paths[file]}, row {number - self._first_rows_of_files[file] + 1}"

    def columns_of(self, fields: Sequence[str]) -> list[str]:
        """Returns the columns that have these fields: `reward_model.ground_truth` is a part of the column
        `reward_model`, unless a column has that name. Fields that do not exist are left out."""
        names = (field if field in self.column_names else field.partition(".")[0] for field in fields)
        return [name for name in dict.fromkeys(names) if name in self.column_names]

    def bytes_per_row(self, columns: Sequence[str] | None) -> int:
        """Returns the mean size of a row with these columns (None: all) in the files, uncompressed. At least 1."""
        names = self._num_bytes if columns is None else columns
        return 1 + sum(self._num_bytes.get(name, 0) for name in names) // max(1, self.num_rows)

    def _counted(self, group: pyarrow.parquet.RowGroupMetaData) -> int:
        """Adds the sizes of a group's columns. Returns its number of rows."""
        for index in range(group.num_columns):
            column = group.column(index)
            name = column.path_in_schema.partition(".")[0]
            self._num_bytes[name] = self._num_bytes.get(name, 0) + column.total_uncompressed_size
        return int(group.num_rows)

    def batches_of(self, group: RowGroup, columns: Sequence[str] | None) -> Iterator[tuple[int, pyarrow.RecordBatch]]:
        """Yields the rows of a group in parts, each with the number of its first row. `columns`: the columns to read;
        None: all. Raises DatasetError, ResourceError."""
        number, path = group.first_row, self.paths[group.file]
        with parquet_errors(path):
            for batch in self._file(group.file).iter_batches(
                batch_size=ROWS_PER_READ, row_groups=[group.group], columns=columns, use_threads=False
            ):
                yield number, batch
                number += batch.num_rows

    def python_rows(
        self, batch: pyarrow.RecordBatch, first: int, positions: npt.NDArray[np.int64]
    ) -> list[dict[str, object]]:
        """Returns rows of a batch of `batches_of`. `first`: number of the batch's first row. `positions`: ascending
        positions of the rows in the batch. Raises DatasetError for a value that Python cannot represent."""
        file = bisect_right(self._first_rows_of_files, first) - 1
        before = first - self._first_rows_of_files[file]
        if len(positions) == batch.num_rows:
            return python_rows(batch, before, self.paths[file])
        found: list[dict[str, object]] = []
        for position in positions.tolist():
            found += python_rows(batch.slice(position, 1), before + position, self.paths[file])
        return found

    def read(self, numbers: Sequence[int], columns: Sequence[str] | None) -> list[dict[str, object]]:
        """Returns the rows with these numbers, in this order. Each row group that has some of them is decoded once, up
        to the last of them. Raises DatasetError, ResourceError."""
        found: dict[int, dict[str, object]] = {}
        wanted = np.unique(np.asarray(numbers, dtype=np.int64))
        groups = np.searchsorted(self._first_rows, wanted, side="right") - 1
        with self._lock:
            for index in np.unique(groups).tolist():
                self._read_of_group(self.groups[index], wanted[groups == index], columns, found)
        return [found[number] for number in numbers]

    def _read_of_group(
        self,
        group: RowGroup,
        wanted: npt.NDArray[np.int64],
        columns: Sequence[str] | None,
        found: dict[int, dict[str, object]],
    ) -> None:
        for first, batch in self.batches_of(group, columns):
            here = wanted[(wanted >= first) & (wanted < first + batch.num_rows)]
            rows = self.python_rows(batch, first, here - first)
            found |= zip(here.tolist(), rows, strict=True)
            if wanted[-1] < first + batch.num_rows:
                return

    def _file(self, number: int) -> pyarrow.parquet.ParquetFile:
        """Returns the open file; the files that were used least recently are closed."""
        if number not in self._open:
            if len(self._open) >= MAX_OPEN_FILES:
                self._open.popitem(last=False)[1].close()
            self._open[number] = pyarrow.parquet.ParquetFile(self.paths[number])
        self._open.move_to_end(number)
        return self._open[number]


def largest_group(files: ParquetFiles) -> tuple[Path, int]:
    """Returns the file with the largest row group, and the rows of this group."""
    group = max(files.groups, key=lambda each: each.num_rows)
    return files.paths[group.file], group.num_rows
