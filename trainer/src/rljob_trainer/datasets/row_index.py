"""The index of a large dataset: the numbers of the rows that the filters have kept. The filters run once; a resumed run
reads the index.

An index is a folder with two files, `rows.bin` (uint32, in the order of the rows, mapped into memory) and `index.json`.
It is written under another name and renamed when it is complete, so a killed run leaves no index that looks valid. It
is used again if its key is the same: the digest of the files (`ParquetFiles.digest`), of the filter settings, of the
held-out prompts, and of the tokenizer's files.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from rljob_api.base import WireModel
from rljob_api.scalars import Count
from rljob_trainer.datasets.filter_processes import FilteredRows, FilterPass, filter_rows
from rljob_trainer.datasets.filters import DropCounts, FilterName, FilterReport, are_first
from rljob_trainer.datasets.parquet_files import ParquetFiles, largest_group
from rljob_trainer.datasets.row_values import Sources
from rljob_trainer.errors import DatasetError, storage_checked

log = logging.getLogger(__name__)

VERSION = 2
"""Increase it when a change of the code keeps other rows with the same settings."""
ROWS_FILE, INDEX_FILE = "rows.bin", "index.json"
MAX_ROWS = 2**32 - 1
LARGE_GROUP_ROWS = 20_000
"""Rows of a row group above which drawing prompts is slow, because a whole group is decoded for each prompt."""
OTHER_FIELDS = frozenset({"shuffle", "name", "weight", "rewards"})
"""Fields of a dataset that do not change which rows are kept."""
TOKENIZER_SUFFIXES = (".json", ".jinja", ".model", ".txt")


class IndexState(WireModel):
    """The content of `index.json`."""

    key: str
    report: FilterReport
    longest: Count
    """An upper bound of the tokens of the longest prompt, at most `maxPromptTokens`."""
    largest_token: Count
    """An upper bound of the token ids of all prompts."""


@dataclass(frozen=True)
class RowIndex:
    """The rows of a dataset that are used."""

    files: ParquetFiles
    numbers: npt.NDArray[np.uint32]
    """Their numbers over all files, ascending."""
    state: IndexState


def opened_or_built(
    files: ParquetFiles, settings: FilterPass, folder: Path, doing: Callable[[str], None] = lambda _: None
) -> RowIndex:
    """Reads the index in `folder`, or runs the filters and writes it, if there is none with the same key. `doing` is
    called with the progress. Raises DatasetError, ResourceError."""
    if files.num_rows > MAX_ROWS:
        raise DatasetError(
            f"{settings.where}: the dataset has {files.num_rows} rows, but at most {MAX_ROWS} are supported; use fewer "
            "files"
        )
    path, rows = largest_group(files)
    if rows > LARGE_GROUP_ROWS:
        log.warning(
            "%s: %s has row groups of %d rows. To read a prompt, its whole row group is decoded, so reading a batch "
            "may take longer than a step; write the file again with row groups of about 1000 rows, for example "
            "pyarrow.parquet.write_table(..., row_group_size=1000)",
            *(settings.where, path, rows),
        )
    key = key_of(files, settings)
    found = _read(files, folder, key)
    if found is not None:
        log.info("%s: the filter results of an earlier start are used again (%s)", settings.where, folder)
        return found
    return _build(files, settings, folder, key, doing)


def key_of(files: ParquetFiles, settings: FilterPass, *, with_times: bool = True) -> str:
    """Returns the key of an index; see the module's docstring. `with_times`: whether the key includes the times of the
    last change of the files, so that it also changes if a file was only copied. The key for reading an index includes
    them, because a value in a file can change without a change of the footer."""
    held_out = settings.held_out
    document = {
        "version": VERSION,
        "files": files.digest(with_times=with_times),
        "dataset": settings.dataset.model_dump(mode="json", exclude=set(OTHER_FIELDS)),
        "fields": sorted(settings.dataset.model_fields_set - OTHER_FIELDS),
        "tokenizer": _tokenizer_digest(settings.model_folder),
        "heldOut": [sorted(held_out.prompts), held_out.ngram_words],
        "flags": [
            *(settings.for_environment, settings.finds_duplicates, settings.answers_needed_by),
            settings.why_unusable is not None,
        ],
    }
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode(errors="surrogatepass")).hexdigest()


def _tokenizer_digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.suffix in TOKENIZER_SUFFIXES:
            with storage_checked(str(path)):
                digest.update(f"{path.name} {path.stat().st_size} ".encode() + path.read_bytes())
    return digest.hexdigest()


def _read(files: ParquetFiles, folder: Path, key: str) -> RowIndex | None:
    """Returns the index with this key; None if there is none."""
    with storage_checked(str(folder)):
        if not (folder / INDEX_FILE).exists():
            return None
        try:
            state = IndexState.from_wire(json.loads((folder / INDEX_FILE).read_text(encoding="utf-8")))
            numbers = np.memmap(folder / ROWS_FILE, np.uint32, "r")
        except (ValueError, ValidationError, EOFError, FileNotFoundError):
            # An older version wrote it, or it is damaged; it is built again.
            return None
    if state.key != key or len(numbers) != state.report.num_kept:
        return None
    return RowIndex(files, numbers, state)


def _build(files: ParquetFiles, settings: FilterPass, folder: Path, key: str, doing: Callable[[str], None]) -> RowIndex:
    new = folder.with_name(f"{folder.name}.{os.getpid()}.new")
    with storage_checked(str(new)):
        for old in folder.parent.glob(f"{folder.name}.*.new") if folder.parent.exists() else ():
            shutil.rmtree(old)
        new.mkdir(parents=True)
    total = FilteredRows(np.empty(0, np.uint32), np.empty(0, np.uint64))
    numbers, hashes = list[npt.NDArray[np.uint32]](), list[npt.NDArray[np.uint64]]()
    sources = Sources(settings.dataset, settings.where)
    for part in filter_rows(files, settings):
        sources.add(part.sources)
        _add(total, part, settings)
        numbers.append(part.numbers)
        hashes.append(part.hashes)
        doing(f"filters the rows of {settings.where}; {total.num_rows} of {files.num_rows} done")
    kept = np.concatenate(numbers) if numbers else total.numbers
    if settings.finds_duplicates:
        joined = np.concatenate(hashes)
        hashes.clear()
        is_first = are_first(joined)
        repeated = kept[~is_first]
        total.counts.add(FilterName.DUPLICATE, [files.location(int(each)) for each in repeated[:5]], len(repeated))
        kept = kept[is_first]
    state = _checked_state(total, len(kept), key, settings)
    with storage_checked(str(new)):
        kept.tofile(new / ROWS_FILE)
        (new / INDEX_FILE).write_text(state.model_dump_json(by_alias=True), encoding="utf-8")
        for name in (ROWS_FILE, INDEX_FILE):
            with (new / name).open("rb") as file:
                os.fsync(file.fileno())
        shutil.rmtree(folder, ignore_errors=True)
        new.rename(folder)
        return RowIndex(files, np.memmap(folder / ROWS_FILE, np.uint32, "r"), state)


def _add(total: FilteredRows, part: FilteredRows, settings: FilterPass) -> None:
    """Adds the counts of the next rows. Raises DatasetError if answers among them cannot be scored; later rows were not
    checked then."""
    total.num_rows += part.num_rows
    if part.num_unusable:
        examples = "".join(f"\n  {location}: the answer is {reason}" for location, reason in part.unusable)
        raise DatasetError(
            f"{settings.where}.answerField: {part.num_unusable} of the first {total.num_rows} rows have an answer that "
            f"the reward MathAnswer cannot score; fix or remove these rows, or name another column{examples}"
        )
    total.longest = max(total.longest, part.longest)
    total.largest_token = max(total.largest_token, part.largest_token)
    total.counts.add_all(part.counts)
    total.num_unanswered += part.num_unanswered
    total.unanswered = total.unanswered or part.unanswered


def _checked_state(total: FilteredRows, num_kept: int, key: str, settings: FilterPass) -> IndexState:
    """Returns the state of the index. Raises DatasetError if no row is left, or if only some rows have answers."""
    report = report_of(settings.where, total.num_rows, num_kept, total.counts)
    if total.num_unanswered and (settings.answers_needed_by or total.num_unanswered < num_before_duplicates(report)):
        why = (
            f"the reward {settings.answers_needed_by} needs one"
            if settings.answers_needed_by
            else "the other rows have one"
        )
        raise DatasetError(
            f"{settings.where}.answerField: {total.num_unanswered} of {total.num_rows} rows have no answer, but {why} "
            f"(first: {total.unanswered[0]}); name the column with the answer, or remove these rows"
        )
    return IndexState(key=key, report=report, longest=total.longest, largest_token=total.largest_token)


def num_before_duplicates(report: FilterReport) -> int:
    """Returns the number of rows before the duplicates were dropped."""
    return report.num_kept + sum(each.num_rows for each in report.dropped if each.filter is FilterName.DUPLICATE)


def report_of(where: str, num_rows: int, num_kept: int, counts: DropCounts) -> FilterReport:
    """Returns the report of a dataset. Raises DatasetError if no row is left."""
    report = FilterReport(dataset=where, num_rows=num_rows, num_kept=num_kept, dropped=counts.dropped())
    if not num_kept:
        lines = "; ".join(line.removeprefix(f"{where}: ") for line in report.lines())
        raise DatasetError(
            f"{where}: no row is left to train on ({lines}); change spec.training.filters, decrease numPrompts of the "
            "evaluations, or use other rows"
        )
    return report
