"""Loads the prompts of a dataset block into memory, and removes held-out rows."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from rljob_api.v1alpha1.dataset import Dataset
from rljob_trainer.datasets.prompts import DATASET, PromptMaker, PromptRow
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
    return load_rows(PromptMaker(dataset, tokenizer, where), base_folder)


def load_rows(maker: PromptMaker, base_folder: Path) -> list[PromptRow]:
    """Loads all rows of the maker's dataset in order, and logs how many were dropped. Raises DatasetError as
    `load_prompts` does, and if no row is left."""
    dataset, where = maker.dataset, maker.where
    prompts: list[PromptRow] = []
    num_rows = 0
    for chunk in _chunks(read_rows(dataset, base_folder, where)):
        prompts += [row for row in maker.made(chunk, range(num_rows, num_rows + len(chunk))) if row is not None]
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
    return prompts


def _chunks(rows: Iterator[RawRow]) -> Iterator[list[RawRow]]:
    while chunk := list(islice(rows, ROWS_PER_ENCODING)):
        yield chunk


def without_held_out(
    training_rows: Sequence[PromptRow], held_out_rows: Iterable[PromptRow]
) -> tuple[list[PromptRow], int]:
    """Returns the training rows whose prompt is not held out, and the number of removed rows.

    The original prompts are compared, before templates are applied; with an environment all columns, except of
    reasoning-gym. Each run of white space counts as one space. Raises DatasetError if all rows are removed.
    """
    held_out = {_comparable(row.source_prompt) for row in held_out_rows}
    others = [row for row in training_rows if _comparable(row.source_prompt) not in held_out]
    if not others:
        raise DatasetError(
            f"{DATASET}: all {len(training_rows)} rows are held out for evaluations, so none is left to train on; "
            "decrease numPrompts in spec.training.evaluations, or name other rows in their datasets"
        )
    return others, len(training_rows) - len(others)


def _comparable(prompt: str) -> str:
    return " ".join(prompt.split())
