"""The prompts of a run: what is trained on, and what is held out."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from rljob_trainer.datasets.prompts import PromptRow

DATASET, EVALUATION_DATASET = "spec.training.dataset", "spec.training.evaluation.dataset"
"""Fields of the job."""


@dataclass(frozen=True)
class Prompts:
    """What is trained on, and what is held out; the two have no prompt in common."""

    training: tuple[PromptRow, ...]
    held_out: tuple[PromptRow, ...]
    num_removed: int
    """Training rows that were left out because they are held out."""

    @property
    def rows(self) -> tuple[PromptRow, ...]:
        """All prompts."""
        return (*self.training, *self.held_out)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(self.longest_of.values())

    @property
    def longest_of(self) -> Mapping[str, int]:
        """Tokens of the longest prompt of each dataset, by its field."""
        rows = {DATASET: self.training, EVALUATION_DATASET: self.held_out}
        return {field: max((len(row.token_ids) for row in found), default=0) for field, found in rows.items()}

    @property
    def largest_token(self) -> int:
        """The highest token id of any prompt."""
        return max(max(row.token_ids) for row in self.rows)

    @cached_property
    def digest(self) -> str:
        """Of the training prompts' tokens, in their order."""
        digest = hashlib.sha256()
        for row in self.training:
            digest.update(array("q", (len(row.token_ids), *row.token_ids)).tobytes())
        return digest.hexdigest()
