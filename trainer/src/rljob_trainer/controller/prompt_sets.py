"""The prompts of a run: training prompts and held-out prompts."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from rljob_api.v1alpha1.dataset import Dataset
from rljob_api.v1alpha1.reward import RewardType
from rljob_api.v1alpha1.training import Training
from rljob_trainer.controller.checks.answers import refuse_unusable, refuse_unusable_tests
from rljob_trainer.datasets.prompts import (
    DATASET,
    EVALUATION_DATASET,
    PromptRow,
    load_environment_rows,
    load_prompts,
    without_held_out,
)
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
        """Length of the longest prompt, in tokens. 0 in a job with an environment, which makes the prompts."""
        return max(self.longest_of.values())

    @property
    def longest_of(self) -> Mapping[str, int]:
        """Length of the longest prompt of each dataset, in tokens, by the dataset's field path."""
        rows = {DATASET: self.training, EVALUATION_DATASET: self.held_out}
        return {field: max((len(row.token_ids) for row in found), default=0) for field, found in rows.items()}

    @property
    def largest_token(self) -> int:
        """The highest token id of any prompt."""
        return max((token for row in self.rows for token in row.token_ids), default=0)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the training prompts' tokens, in order; with an environment of the rows."""
        digest = hashlib.sha256()
        for row in self.training:
            digest.update(array("q", (len(row.token_ids), *row.token_ids)).tobytes())
            if not row.token_ids:
                digest.update(row.source_prompt.encode(errors="surrogatepass"))
        return digest.hexdigest()


def load_all_prompts(training: Training, model_folder: Path, job_folder: Path) -> Prompts:
    """Loads the training prompts and the held-out prompts. Without a dataset, rollouts begin with the environment, and
    training has a single row without columns. Raises DatasetError."""
    tokenizer = Tokenizer(model_folder)

    def rows_of(dataset: Dataset | None, where: str, num_rows: int) -> list[PromptRow]:
        if dataset is None:
            return [PromptRow(index, "", str(index), (), None, {}) for index in range(num_rows)]
        load = load_prompts if training.environment is None else load_environment_rows
        return load(dataset, tokenizer, job_folder, where)

    rows = rows_of(training.dataset, DATASET, 1)
    held_out = list[PromptRow]()
    if (evaluation := training.evaluation) is not None:
        held_out = rows_of(evaluation.dataset, EVALUATION_DATASET, evaluation.num_prompts)[: evaluation.num_prompts]
    needing = [each.type for each in training.rewards if each.type in (RewardType.MATH_ANSWER, RewardType.CODE)]
    datasets = [(DATASET, training.dataset, rows)]
    if evaluation is not None:
        datasets.append((EVALUATION_DATASET, evaluation.dataset, held_out))
    for where, dataset, prompts in datasets:
        if dataset is None:
            continue
        unanswered = [row.location for row in prompts if row.answer is None]
        if unanswered and (len(unanswered) < len(prompts) or needing):
            why = f"the reward {needing[0]} needs one" if needing else "the other rows have one"
            raise DatasetError(
                f"{where}.answerField: {len(unanswered)} of {len(prompts)} rows have no answer, but {why} (first: "
                f"{unanswered[0]}); name the column with the answer, or remove these rows"
            )
        if RewardType.MATH_ANSWER in needing:
            refuse_unusable(prompts, where, dataset.answer_field)
        if RewardType.CODE in needing:
            refuse_unusable_tests(prompts, where)
    if training.dataset is None:
        # The environments of training and of evaluations have different seeds.
        return Prompts(tuple(rows), tuple(held_out), 0)
    training_rows, num_removed = without_held_out(rows, held_out)
    return Prompts(tuple(training_rows), tuple(held_out), num_removed)
