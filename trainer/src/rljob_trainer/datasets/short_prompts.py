"""Finds prompts that certainly have at most `maxPromptTokens` tokens by their number of bytes, without tokenizing them.

This is possible for strings without a chat template, in columns of strings. `PromptMaker` handles all other rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow
import pyarrow.compute
from pyarrow import types

from rljob_trainer.datasets.prompts import PLACEHOLDER, PromptMaker
from rljob_trainer.models.model_files import read_json_object

if TYPE_CHECKING:
    # Importing this module loads transformers.
    from rljob_trainer.models.token_bounds import TokenBound
    from rljob_trainer.models.tokenizer import Tokenizer

MODEL_CONFIGURATION = "config.json"
TEXT = r"[^\x00-\x20\x7f]"
"""A character that has a token: neither a space nor a control character of ASCII."""


@dataclass(frozen=True)
class TextRows:
    """Prompts and answers of a batch of rows."""

    prompts: list[str]
    """Empty strings for null."""
    answers: list[object]
    are_short: npt.NDArray[np.bool_]
    """Whether the prompt certainly has at least one and at most `maxPromptTokens` tokens. The other rows were not
    checked: `PromptMaker` must read them."""
    longest: int
    """An upper bound of the number of tokens of a short prompt."""
    largest_token: int
    """An upper bound of the token ids of the short prompts."""

    @staticmethod
    def unknown(num_rows: int) -> TextRows:
        """Rows that `PromptMaker` must read: none of them is known to be short."""
        return TextRows([""] * num_rows, [None] * num_rows, np.zeros(num_rows, np.bool_), 0, 0)


class ShortPrompts:
    """Finds the short prompts of one dataset."""

    def __init__(self, maker: PromptMaker, tokenizer: Tokenizer, model_folder: Path) -> None:
        self._maker = maker
        dataset = maker.dataset
        # `PromptMaker` reads the other columns.
        others = (dataset.system_prompt, dataset.source_field, dataset.tools_field)
        is_plain = not (
            maker.for_environment or dataset.apply_chat_template or any(each is not None for each in others)
        )
        self._bound = _usable_bound(tokenizer, model_folder) if is_plain else None
        self._template = dataset.prompt_template.replace(PLACEHOLDER, "")

    def of(self, batch: pyarrow.RecordBatch) -> TextRows | None:
        """Returns the rows of a batch; None if `PromptMaker` must make all of them."""
        dataset = self._maker.dataset
        prompts = _column(batch, self._maker.prompt_field)
        answers = _column(batch, self._maker.answer_field)
        is_without_answers = answers is None and "answer_field" not in dataset.model_fields_set
        if self._bound is None or prompts is None or not _is_text(prompts):
            return None
        if not is_without_answers and (answers is None or not (_is_text(answers) or _is_scalar(answers.type))):
            return None
        lengths = self._lengths(prompts, self._bound)
        has_text = pyarrow.compute.fill_null(pyarrow.compute.match_substring_regex(prompts, TEXT), False)
        are_short = np.asarray(has_text) & (lengths <= dataset.max_prompt_tokens)
        return TextRows(
            pyarrow.compute.fill_null(prompts, "").to_pylist(),
            [None] * len(batch) if answers is None else answers.to_pylist(),
            are_short,
            int(lengths[are_short].max(initial=0)),
            self._bound.largest_token if are_short.any() else 0,
        )

    def _lengths(self, prompts: pyarrow.Array, bound: TokenBound) -> npt.NDArray[np.int64]:
        """Returns an upper bound of the number of tokens of each prompt."""
        num_bytes = _num_bytes(prompts)
        if bound.non_ascii_growth > 1:
            num_characters = pyarrow.compute.fill_null(pyarrow.compute.utf8_length(prompts), 0).to_numpy()
            num_bytes = np.where(num_characters == num_bytes, num_bytes, bound.non_ascii_growth * num_bytes)
        growth = 1 if self._template.isascii() else bound.non_ascii_growth
        return num_bytes + growth * len(self._template.encode()) + bound.num_special


def _usable_bound(tokenizer: Tokenizer, model_folder: Path) -> TokenBound | None:
    """Returns the bound of a tokenizer. Returns None if it has no bound, or if it has tokens that are not in the
    model's vocabulary: a prompt with such a token is an error, so all prompts must be tokenized."""
    bound = tokenizer.token_bound()
    path = model_folder / MODEL_CONFIGURATION
    if bound is None or not path.exists():
        return None
    settings = read_json_object(path)
    text = settings.get("text_config")
    size = settings.get("vocab_size") or (text.get("vocab_size") if isinstance(text, dict) else None)
    return bound if isinstance(size, int) and bound.largest_token < size else None


def _column(batch: pyarrow.RecordBatch, name: str) -> pyarrow.Array | None:
    index = batch.schema.get_field_index(name)
    return batch.column(index) if index >= 0 else None


def _is_text(column: pyarrow.Array) -> bool:
    """Whether the column has strings, all of them valid UTF-8."""
    if not (types.is_string(column.type) or types.is_large_string(column.type)):
        return False
    try:
        column.validate(full=True)
    except pyarrow.ArrowInvalid:
        return False
    return True


def _is_scalar(kind: pyarrow.DataType) -> bool:
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind))


def _num_bytes(column: pyarrow.Array) -> npt.NDArray[np.int64]:
    lengths = pyarrow.compute.fill_null(pyarrow.compute.binary_length(column), 0)
    return np.asarray(lengths.to_numpy(), dtype=np.int64)
