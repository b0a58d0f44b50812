"""Reads rows of a Parquet file, with pyarrow."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow
import pyarrow.parquet

from rljob_trainer.errors import DatasetError, described, storage_checked

ROWS_PER_READ = 1024


def parquet_rows(path: Path) -> Iterator[dict[str, object]]:
    """Yields all rows, with values of any type. Raises DatasetError with the file, and with row and column of a value
    that cannot be converted to Python, ResourceError if the disk fails."""
    num_rows = 0
    with parquet_errors(path), pyarrow.parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=ROWS_PER_READ):
            yield from python_rows(batch, num_rows, path)
            num_rows += batch.num_rows


@contextmanager
def parquet_errors(path: Path) -> Iterator[None]:
    """Turns errors of pyarrow into DatasetError with the file, and those of the disk into ResourceError."""
    try:
        with storage_checked(str(path)):
            yield
    except (pyarrow.ArrowException, OSError) as error:
        raise DatasetError(f"{path}: not a readable Parquet file ({described(error)}); write the file again") from error


def python_rows(batch: pyarrow.RecordBatch, num_before: int, path: Path) -> list[dict[str, object]]:
    """Returns the rows of a batch. `num_before`: the number of rows before them in the file. Raises DatasetError with
    row and column of a value that cannot be converted."""
    try:
        rows: list[dict[str, object]] = batch.to_pylist()
        return rows
    except (pyarrow.ArrowException, MemoryError):
        raise
    except Exception as error:
        # pyarrow raises UnicodeDecodeError, OverflowError, ValueError and errors of other libraries for strings that
        # are not UTF-8 (which are not checked when they are written), dates after the year 9999, and unknown time
        # zones.
        location, found = _first_unreadable(batch, num_before + 1) or (
            f"rows {num_before + 1} to {num_before + batch.num_rows}",
            error,
        )
        raise DatasetError(
            f"{path}, {location} cannot be read ({described(found)}); fix the value, or write the file without this "
            "column"
        ) from found


def _first_unreadable(batch: pyarrow.RecordBatch, first_row: int) -> tuple[str, Exception] | None:
    """Returns row and column of the first value that cannot be converted to Python, and the error. This error may
    differ from that of `to_pylist`, which reads column by column."""
    for row in range(batch.num_rows):
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            try:
                column[row].as_py()
            except MemoryError:
                raise
            except Exception as error:
                return f"row {first_row + row}: column {name!r}", error
    return None
