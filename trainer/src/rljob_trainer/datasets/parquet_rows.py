"""Rows of a Parquet file, by pyarrow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pyarrow.parquet

from rljob_trainer.errors import DatasetError, described

ROWS_PER_READ = 1024


def parquet_rows(path: Path) -> Iterator[dict[str, object]]:
    """All rows, with values of any type. Raises DatasetError naming the file, and row and column of a value that Python
    cannot hold."""
    num_rows = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=ROWS_PER_READ):
                yield from _python_rows(batch, num_rows, path)
                num_rows += batch.num_rows
    except (pyarrow.ArrowException, OSError) as error:
        raise DatasetError(f"{path}: not a readable Parquet file ({described(error)}); make it anew") from error


def _python_rows(batch: pyarrow.RecordBatch, num_before: int, path: Path) -> list[dict[str, object]]:
    try:
        rows: list[dict[str, object]] = batch.to_pylist()
        return rows
    except (pyarrow.ArrowException, MemoryError):
        raise
    except Exception as error:
        # Strings that are not UTF-8 (nothing checks them when they are written), dates beyond the year 9999, unknown
        # time zones: pyarrow raises UnicodeDecodeError, OverflowError, ValueError and types of other libraries.
        place = _place_of_error(batch, type(error), num_before + 1)
        raise DatasetError(
            f"{path}, {place} cannot be read ({described(error)}); correct the value, or write the file without this "
            "column"
        ) from error


def _place_of_error(batch: pyarrow.RecordBatch, kind: type[Exception], first_row: int) -> str:
    """Row and column of the first value that raises `kind`."""
    for row in range(batch.num_rows):
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            try:
                column[row].as_py()
            except kind:
                return f"row {first_row + row}: column {name!r}"
    return f"rows {first_row} to {first_row + batch.num_rows - 1}"
