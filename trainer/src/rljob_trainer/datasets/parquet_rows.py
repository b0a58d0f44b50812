"""Rows of a Parquet file, by pyarrow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pyarrow.parquet

from rljob_trainer.datasets.plain_values import plain_row
from rljob_trainer.errors import DatasetError

ROWS_PER_READ = 1024


def parquet_rows(path: Path) -> Iterator[dict[str, object]]:
    """All rows, as `plain_row` leaves them. Raises DatasetError naming the file."""
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=ROWS_PER_READ):
                for row in batch.to_pylist():
                    yield plain_row(row)
    except (pyarrow.ArrowException, OSError) as error:
        raise DatasetError(f"{path}: not a readable Parquet file ({error}); make it anew") from error
