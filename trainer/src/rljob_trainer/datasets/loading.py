"""Loads the prompts of a dataset block into memory, and removes held-out rows."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from rljob_trainer.datasets.filters import DropCounts, FilterName, FilterReport, HeldOut, comparable
from rljob_trainer.datasets.prompts import PromptMaker, PromptRow
from rljob_trainer.datasets.row_index import report_of
from rljob_trainer.datasets.rows import RawRow, read_rows
from rljob_trainer.errors import DatasetError

log = logging.getLogger(__name__)

ROWS_PER_ENCODING = 1024


def load_rows(maker: PromptMaker, base_folder: Path, max_rows: int | None = None) -> tuple[list[PromptRow], DropCounts]:
    """Loads the rows of the maker's dataset in order: the first `max_rows` that are not too long, or all. Returns the
    rows, and the counts of the rows that were dropped because they are too long. Relative paths start at `base_folder`.
    Raises DatasetError with the location of the first unusable row, and if no row is left."""
    dataset, where = maker.dataset, maker.where
    prompts: list[PromptRow] = []
    counts, num_rows = DropCounts(), 0
    # The first chunk is enough, unless some of its rows are dropped.
    chunk_size = ROWS_PER_ENCODING if max_rows is None else min(max_rows, ROWS_PER_ENCODING)
    for chunk in _chunks(read_rows(dataset, base_folder, where), chunk_size):
        made = maker.make_prompts(chunk, range(num_rows, num_rows + len(chunk)))
        prompts += [row for row in made if row is not None]
        counts.add(FilterName.OVERLONG, [raw.location for raw, row in zip(chunk, made, strict=True) if row is None])
        num_rows += len(chunk)
        if max_rows is not None and len(prompts) >= max_rows:
            break
    if not prompts:
        raise DatasetError(
            f"{where}: all {num_rows} prompts have more than {dataset.max_prompt_tokens} tokens; increase "
            "maxPromptTokens"
            if num_rows
            else f"{where}: the dataset has no rows; name another file, split or dataset"
        )
    if len(prompts) < num_rows:
        log.warning(
            "%s: %d of %d prompts have more than %d tokens and are dropped",
            where,
            num_rows - len(prompts),
            num_rows,
            dataset.max_prompt_tokens,
        )
    return prompts[:max_rows], counts


def _chunks(rows: Iterator[RawRow], size: int) -> Iterator[list[RawRow]]:
    while chunk := list(islice(rows, size)):
        yield chunk


def without_dropped(
    rows: Sequence[PromptRow], held_out: HeldOut, where: str, counts: DropCounts, *, drops_duplicates: bool = False
) -> tuple[list[PromptRow], FilterReport]:
    """Returns the training rows that the filters keep, and the report. `counts`: the rows that were dropped before.
    Raises DatasetError if no row is left.

    The filters compare `PromptRow.source_prompt`: the original prompts, before templates are applied. With an
    environment this is the text of all columns for a row without a prompt, and for a prompt that does not identify a
    task."""
    kept, seen = list[PromptRow](), set[str]()
    num_rows = len(rows) + sum(counts.num_rows.values())
    for row in rows:
        reason = held_out.reason(row.source_prompt)
        if reason is None and drops_duplicates:
            text = comparable(row.source_prompt)
            reason = FilterName.DUPLICATE if text in seen else None
            seen.add(text)
        if reason is None:
            kept.append(row)
        else:
            counts.add(reason, [row.location])
    return kept, report_of(where, num_rows, len(kept), counts)
