"""The prompts of a run: training prompts and held-out prompts."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from rljob_api.v1alpha1.reward import RewardType
from rljob_api.v1alpha1.training import Training
from rljob_trainer.controller.answer_checks import refuse_unusable
from rljob_trainer.datasets.prompts import DATASET, EVALUATION_DATASET, PromptRow, load_prompts, without_held_out
from rljob_trainer.errors import DatasetError
from rljob_trainer.models.tokenizer import Tokenizer


@dataclass(frozen=True)
class Prompts:
    """Training prompts and held-out prompts; the two have no prompt in common."""

    training: tuple[PromptRow, ...]
    held_out: tuple[PromptRow, ...]
    num_removed: int
    """Training rows that were removed because they are also held out."""

    @property
    def rows(self) -> tuple[PromptRow, ...]:
        """All prompts: training, then held-out."""
        return (*self.training, *self.held_out)

    def __str__(self) -> str:
        parts = [f"{len(self.training)} training prompts"]
        if self.held_out:
            parts.append(f"{len(self.held_out)} held-out prompts")
        if self.num_removed:
            parts.append(f"{self.num_removed} training rows removed because they are held out")
        return ", ".join(parts)

    @property
    def longest(self) -> int:
        """Length of the longest prompt, in tokens."""
        return max(self.longest_of.values())

    @property
    def longest_of(self) -> Mapping[str, int]:
        """Length of the longest prompt of each dataset, in tokens, by the dataset's field path."""
        rows = {DATASET: self.training, EVALUATION_DATASET: self.held_out}
        return {field: max((len(row.token_ids) for row in found), default=0) for field, found in rows.items()}

    @property
    def largest_token(self) -> int:
        """The highest token id of any prompt."""
        return max(max(row.token_ids) for row in self.rows)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the training prompts' tokens, in order."""
        digest = hashlib.sha256()
        for row in self.training:
            digest.update(array("q", (len(row.token_ids), *row.token_ids)).tobytes())
        return digest.hexdigest()


def load_all_prompts(training: Training, model_folder: Path, job_folder: Path) -> Prompts:
    """Loads the training prompts and the held-out prompts. Raises DatasetError."""
    tokenizer = Tokenizer(model_folder)
    assert training.dataset is not None
    rows = load_prompts(training.dataset, tokenizer, job_folder, DATASET)
    held_out = list[PromptRow]()
    if training.evaluation is not None:
        assert training.evaluation.dataset is not None
        evaluation_rows = load_prompts(training.evaluation.dataset, tokenizer, job_folder, EVALUATION_DATASET)
        held_out = evaluation_rows[: training.evaluation.num_prompts]
    needs_answers = any(reward.type is RewardType.MATH_ANSWER for reward in training.rewards)
    datasets = [(DATASET, training.dataset, rows)]
    if training.evaluation is not None and training.evaluation.dataset is not None:
        datasets.append((EVALUATION_DATASET, training.evaluation.dataset, held_out))
    for where, dataset, prompts in datasets:
        unanswered = [row.location for row in prompts if row.answer is None]
        if unanswered and (len(unanswered) < len(prompts) or needs_answers):
            why = "the reward MathAnswer needs one" if needs_answers else "the other rows have one"
            raise DatasetError(
                f"{where}.answerField: {len(unanswered)} of {len(prompts)} rows have no answer, but {why} (first: "
                f"{unanswered[0]}); name the column with the answer, or remove these rows"
            )
        if needs_answers:
            refuse_unusable(prompts, where, dataset.answer_field)
    training_rows, num_removed = without_held_out(rows, held_out)
    return Prompts(tuple(training_rows), tuple(held_out), num_removed)
