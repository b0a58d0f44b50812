"""Loads the prompts of a dataset block into memory, and removes held-out rows."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from rljob_api.v1alpha1.dataset import Dataset
from rljob_trainer.datasets.row_index import report_of
from rljob_trainer.datasets.filters import DropCounts, FilterName, FilterReport, HeldOut, comparable
from rljob_trainer.datasets.prompts import PromptMaker, PromptRow
from rljob_trainer.datasets.rows import RawRow, read_rows
from rljob_trainer.errors import DatasetError

if TYPE_CHECKING:
    # Importing this module loads transformers.
    from rljob_trainer.models.tokenizer import Tokenizer

log = logging.getLogger(__name__)

ROWS_PER_ENCODING = 1024


def load_prompts(dataset: Dataset, tokenizer: Tokenizer, base_folder: Path, where: str) -> list[PromptRow]:
    """Loads all rows of the dataset in order, as `PromptMaker` makes them. Prompts that are too long are dropped if the
    job sets `overlongPrompt: Drop`.

    Relative paths start at `base_folder`; `where` is the field path for messages. Raises DatasetError with file and
    line of the first unusable row.
    """
    return load_rows(PromptMaker(dataset, tokenizer, where), base_folder)[0]


def load_rows(maker: PromptMaker, base_folder: Path) -> tuple[list[PromptRow], DropCounts]:
    """Loads all rows of the maker's dataset in order. Returns the rows, and those that were dropped because they are
    too long. Raises DatasetError as `load_prompts` does, and if no row is left."""
    dataset, where = maker.dataset, maker.where
    prompts: list[PromptRow] = []
    counts, num_rows = DropCounts(), 0
    for chunk in _chunks(read_rows(dataset, base_folder, where)):
        made = maker.made(chunk, range(num_rows, num_rows + len(chunk)))
        prompts += [row for row in made if row is not None]
        counts.add(FilterName.OVERLONG, [raw.location for raw, row in zip(chunk, made, strict=True) if row is None])
        num_rows += len(chunk)
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
    return prompts, counts


def _chunks(rows: Iterator[RawRow]) -> Iterator[list[RawRow]]:
    while chunk := list(islice(rows, ROWS_PER_ENCODING)):
        yield chunk


def without_dropped(
    rows: Sequence[PromptRow], held_out: HeldOut, where: str, counts: DropCounts, *, drops_duplicates: bool = False
) -> tuple[list[PromptRow], FilterReport]:
    """Returns the training rows that the filters keep, and the report. `counts` has the rows that were dropped before.
    Raises DatasetError if no row is left.

    The original prompts are compared, before templates are applied; with an environment all columns, except of
    reasoning-gym."""
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
