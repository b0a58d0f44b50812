"""The prompts of a dataset that is too large for memory, read from Parquet files when they are drawn."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import overload

from rljob_trainer.datasets.cursor import StoredRows
from rljob_trainer.datasets.prompts import PromptMaker, PromptRow
from rljob_trainer.datasets.row_index import RowIndex
from rljob_trainer.datasets.rows import plain_raw_row
from rljob_trainer.errors import DatasetError

MAX_ROWS_AHEAD = 8192
"""Rows that are read in advance. To read a row, its whole row group is decoded. If many rows are read together, several
of them are in the same row group, which is decoded once."""
MAX_BYTES_AHEAD = 128 * 2**20
"""The largest size of the rows that are read in advance."""


class IndexedRows(StoredRows[PromptRow]):
    """The rows of an index. Rows that will be needed soon are read in a thread (`expect`)."""

    def __init__(self, row_index: RowIndex, maker: PromptMaker, columns: Sequence[str] | None = None) -> None:
        """`columns`: the columns that are read; None: all."""
        self.row_index = row_index
        self._maker = maker
        self._columns = columns
        self.num_ahead = min(MAX_ROWS_AHEAD, 1 + MAX_BYTES_AHEAD // row_index.files.bytes_per_row(columns))
        self._kept: dict[int, PromptRow] = {}
        """The rows that were read last, by their position in the index."""
        self._thread = ThreadPoolExecutor(1, "prompts")
        self._expected: Future[dict[int, PromptRow]] | None = None

    def __len__(self) -> int:
        return len(self.row_index.numbers)

    @overload
    def __getitem__(self, position: int) -> PromptRow: ...

    @overload
    def __getitem__(self, position: slice) -> list[PromptRow]: ...

    def __getitem__(self, position: int | slice) -> PromptRow | list[PromptRow]:
        if isinstance(position, slice):
            return self.read(range(*position.indices(len(self))))
        return self.read([position])[0]

    def read(self, positions: Sequence[int]) -> list[PromptRow]:
        """Returns the rows at these positions of the index. Raises DatasetError if a file was changed after it was
        filtered, ResourceError if the disk fails."""
        if self._expected is not None and (self._expected.done() or any(each not in self._kept for each in positions)):
            expected, self._expected = self._expected, None
            self._kept |= expected.result()
        self._kept |= self._made([each for each in positions if each not in self._kept])
        found = [self._kept[each] for each in positions]
        while len(self._kept) > 2 * max(self.num_ahead, len(positions)):
            del self._kept[next(iter(self._kept))]
        return found

    def expect(self, positions: Sequence[int], num_soon: int) -> None:
        """Begins to read rows in a thread, if some of the first `num_soon` are missing."""
        if self._expected is None and any(each not in self._kept for each in positions[:num_soon]):
            missing = [each for each in positions if each not in self._kept]
            self._expected = self._thread.submit(self._made, missing)

    def _made(self, positions: Sequence[int]) -> dict[int, PromptRow]:
        if not positions:
            return {}
        files = self.row_index.files
        numbers = [int(self.row_index.numbers[each]) for each in positions]
        raw = [
            plain_raw_row(columns, files.location(number), self._maker.dataset)
            for number, columns in zip(numbers, files.read(numbers, self._columns), strict=True)
        ]
        rows: dict[int, PromptRow] = {}
        for position, each, row in zip(positions, raw, self._maker.make_prompts(raw, numbers), strict=True):
            if row is None:
                raise DatasetError(
                    f"{each.location}: the prompt is too long, but it was not when the rows were filtered, so the file "
                    "was changed; do not change files while a job uses them"
                )
            rows[position] = row
        return rows
