"""Runs the filters over the row groups of Parquet files in parallel processes, with bounded memory.

Each process reads the columns that the dataset names (prompt, answer, source, tools), or all columns with an
environment, and returns the numbers of the kept rows. It makes the prompts as for training, except those that are
certainly short enough (`ShortPrompts`). The processes end when the process that started them ends or is killed.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing import connection
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow

from rljob_api.v1alpha1.dataset import Dataset
from rljob_trainer.control_groups import num_usable_cores
from rljob_trainer.datasets.filters import NUM_EXAMPLES, DropCounts, FilterName, HeldOut, comparable, hash_of
from rljob_trainer.datasets.parquet_files import ParquetFiles, RowGroup
from rljob_trainer.datasets.prompts import PromptMaker
from rljob_trainer.datasets.rows import named_fields, plain_raw_row
from rljob_trainer.datasets.short_prompts import ShortPrompts, TextRows
from rljob_trainer.errors import ResourceError

MAX_PROCESSES = 8
"""Each process needs up to 0.9 GiB, of which 0.3 GiB are shared by all processes (docs/datasets.md)."""
ROWS_PER_PROCESS = 100_000
"""Fewer rows are filtered in less time than a process needs to load its libraries."""
ROWS_PER_TASK = 16_384
"""A task has at least this many rows, if row groups are smaller."""
TASKS_PER_PROCESS = 3
"""Tasks per process that are submitted in advance. It bounds the results in memory."""
PARENT_ENDED = 3
"""Exit code of a process whose parent has ended."""


@dataclass(frozen=True)
class FilterPass:
    """What a process needs to filter rows."""

    paths: tuple[Path, ...]
    dataset: Dataset
    where: str
    """Field path of the dataset."""
    model_folder: Path
    """Folder with the tokenizer."""
    held_out: HeldOut
    for_environment: bool = False
    repeated: frozenset[str] = frozenset()
    """See `PromptMaker`."""
    finds_duplicates: bool = False
    answers_needed_by: str = ""
    """The type of a reward that cannot score rows without an answer; empty: none needs answers."""
    why_unusable: Callable[[object], str | None] | None = None
    """Returns why a reward cannot score an answer. It must be a function of a module, because it is sent to processes.
    None: answers are not checked."""


@dataclass
class FilteredRows:
    """The result for some consecutive rows."""

    numbers: npt.NDArray[np.uint32]
    """Numbers of the kept rows, over all files."""
    hashes: npt.NDArray[np.uint64]
    """The hashes of their prompts, if duplicates are dropped; otherwise empty."""
    num_rows: int = 0
    """Rows before the filters."""
    longest: int = 0
    """An upper bound of the number of tokens of the longest prompt that is not too long."""
    largest_token: int = 0
    """An upper bound of the token ids of these prompts."""
    counts: DropCounts = field(default_factory=DropCounts)
    num_unanswered: int = 0
    """Kept rows without an answer."""
    unanswered: list[str] = field(default_factory=list)
    """Locations of the first rows without an answer."""
    num_unusable: int = 0
    """Kept rows with an answer that MathAnswer cannot score."""
    unusable: list[tuple[str, str]] = field(default_factory=list)
    """Location and reason of the first unusable answers."""
    sources: dict[str, tuple[object, str]] = field(default_factory=dict)
    """See `Sources.found`."""


def filter_rows(files: ParquetFiles, settings: FilterPass) -> Iterator[FilteredRows]:
    """Filters all rows of the files. Yields the results in the order of the rows.

    Raises DatasetError for the first row that cannot be used, and ResourceError if a process is killed."""
    tasks = tasks_of(files.groups)
    num_processes = min(num_usable_cores(), MAX_PROCESSES, len(tasks), files.num_rows // ROWS_PER_PROCESS)
    if num_processes <= 1:
        row_filter = RowFilter(settings)
        yield from map(row_filter.filter, tasks)
        return
    context = multiprocessing.get_context("spawn")
    executor = ProcessPoolExecutor(num_processes, context, initializer=_begin_process, initargs=(settings,))
    try:
        remaining = iter(tasks)
        pending: deque[Future[FilteredRows]] = deque()
        for task in islice(remaining, TASKS_PER_PROCESS * num_processes):
            pending.append(executor.submit(_filter_groups, task))
        while pending:
            try:
                found = pending.popleft().result()
            except BrokenProcessPool as error:
                raise ResourceError(
                    f"{settings.where}: a filter process was killed, probably because the machine is out of memory "
                    "(each needs up to 0.9 GiB); give the trainer's controller more memory, or write files with "
                    "smaller row groups"
                ) from error
            pending.extend(executor.submit(_filter_groups, task) for task in islice(remaining, 1))
            yield found
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def tasks_of(groups: Sequence[RowGroup]) -> list[tuple[RowGroup, ...]]:
    """Returns the row groups of each task: consecutive ones of the same file."""
    tasks: list[list[RowGroup]] = []
    for group in groups:
        last = tasks[-1] if tasks else []
        if last and last[0].file == group.file and sum(each.num_rows for each in last) < ROWS_PER_TASK:
            last.append(group)
        else:
            tasks.append([group])
    return [tuple(task) for task in tasks]


class RowFilter:
    """Filters rows within one process."""

    def __init__(self, settings: FilterPass) -> None:
        from rljob_trainer.models.tokenizer import Tokenizer

        self._settings = settings
        self._files = ParquetFiles(settings.paths)
        tokenizer = Tokenizer(settings.model_folder)
        self._maker = PromptMaker(
            settings.dataset,
            tokenizer,
            settings.where,
            for_environment=settings.for_environment,
            repeated=settings.repeated,
        )
        self._short_prompts = ShortPrompts(self._maker, tokenizer, settings.model_folder)
        fields = named_fields(settings.dataset)
        self._columns = None if settings.for_environment else self._files.columns_of(fields) or None

    def filter(self, groups: Sequence[RowGroup]) -> FilteredRows:
        """Filters the rows of these groups. Raises DatasetError, ResourceError."""
        result = FilteredRows(np.empty(0, np.uint32), np.empty(0, np.uint64))
        numbers: list[int] = []
        hashes: list[bytes] = []
        for group in groups:
            for first, batch in self._files.batches_of(group, self._columns):
                rows, fits = self._fitting(first, batch, result)
                texts = list(map(comparable, rows.prompts)) if self._compares else rows.prompts
                kept = self._without_held_out(first, rows, texts, fits, result)
                self._check_answers([(first + each, rows.answers[each]) for each in kept], result)
                numbers += [first + each for each in kept]
                if self._settings.finds_duplicates:
                    hashes += [hash_of(texts[each]) for each in kept]
                result.num_rows += batch.num_rows
        result.numbers = np.array(numbers, dtype=np.uint32)
        result.hashes = np.frombuffer(b"".join(hashes), dtype="<u8").astype(np.uint64)
        result.sources = dict(self._maker.sources.found)
        return result

    @property
    def _compares(self) -> bool:
        return self._settings.finds_duplicates or bool(self._settings.held_out.prompts)

    def _fitting(
        self, first: int, batch: pyarrow.RecordBatch, result: FilteredRows
    ) -> tuple[TextRows, npt.NDArray[np.bool_]]:
        """Returns the rows, and which of them are not too long. Updates `result`: the rows that are too long, and the
        bounds of the tokens."""
        rows = self._short_prompts.of(batch) or TextRows.unknown(batch.num_rows)
        fits = rows.are_short.copy()
        others = np.flatnonzero(~rows.are_short)
        raw = [
            plain_raw_row(columns, self._files.location(first + position), self._settings.dataset)
            for position, columns in zip(others.tolist(), self._files.python_rows(batch, first, others), strict=True)
        ]
        made = self._maker.make_prompts(raw, [first + position for position in others.tolist()])
        for position, row in zip(others.tolist(), made, strict=True):
            if row is not None:
                fits[position] = True
                rows.prompts[position], rows.answers[position] = row.source_prompt, row.answer
                result.longest = max(result.longest, len(row.token_ids))
                result.largest_token = max(result.largest_token, max(row.token_ids, default=0))
        result.counts.add(FilterName.OVERLONG, [each.location for each, row in zip(raw, made, strict=True) if not row])
        result.longest = max(result.longest, rows.longest)
        result.largest_token = max(result.largest_token, rows.largest_token)
        return rows, fits

    def _without_held_out(
        self, first: int, rows: TextRows, texts: Sequence[str], fits: npt.NDArray[np.bool_], result: FilteredRows
    ) -> list[int]:
        """Returns the positions of the rows that are kept, and counts the others. `texts`: the prompts in the form of
        `comparable`."""
        held_out = self._settings.held_out
        positions: list[int] = np.flatnonzero(fits).tolist()
        if not held_out.prompts:
            return positions
        kept: list[int] = []
        for position in positions:
            reason = held_out.reason(rows.prompts[position], texts[position])
            if reason is None:
                kept.append(position)
            else:
                result.counts.add(reason, [self._files.location(first + position)])
        return kept

    def _check_answers(self, answers: Sequence[tuple[int, object]], result: FilteredRows) -> None:
        """Counts answers that are missing, or that cannot be scored. `answers`: number of the row, and its answer."""
        why_unusable = self._settings.why_unusable
        for number, answer in answers:
            if answer is None:
                result.num_unanswered += 1
                if len(result.unanswered) < NUM_EXAMPLES:
                    result.unanswered.append(self._files.location(number))
            elif why_unusable is not None and (reason := why_unusable(answer)) is not None:
                result.num_unusable += 1
                if len(result.unusable) < NUM_EXAMPLES:
                    result.unusable.append((self._files.location(number), reason))


_FILTERS: list[RowFilter] = []
"""The filter of this process, once `_begin_process` has run in it."""


def _begin_process(settings: FilterPass) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()
    _FILTERS.append(RowFilter(settings))


def _end_with(sentinel: int) -> None:
    """Ends this process when its parent has ended, for example by SIGKILL."""
    connection.wait([sentinel])
    os._exit(PARENT_ENDED)


def _filter_groups(groups: Sequence[RowGroup]) -> FilteredRows:
    return _FILTERS[0].filter(groups)
