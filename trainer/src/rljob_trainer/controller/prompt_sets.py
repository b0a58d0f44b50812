"""The prompts of a run: training prompts and held-out prompts."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path

from rljob_api.v1alpha1.dataset import Dataset
from rljob_api.v1alpha1.environment_rules import rewards_of
from rljob_api.v1alpha1.reward import Reward, RewardType
from rljob_api.v1alpha1.training import Training
from rljob_trainer.controller.checks.answers import refuse_unusable, refuse_unusable_tests
from rljob_trainer.datasets.loading import load_rows, without_held_out
from rljob_trainer.datasets.prompts import DATASET, PromptMaker, PromptRow, evaluation_dataset
from rljob_trainer.errors import DatasetError
from rljob_trainer.models.tokenizer import Tokenizer


@dataclass(frozen=True)
class Prompts:
    """Training prompts and held-out prompts; the two have no prompt in common."""

    training: tuple[PromptRow, ...]
    held_out: Mapping[str, tuple[PromptRow, ...]]
    """The prompts of each evaluation, by the field path of its dataset (`evaluation_dataset`)."""
    num_removed: int
    """Training rows that were removed because they are also held out."""

    @property
    def rows(self) -> tuple[PromptRow, ...]:
        """All prompts: training, then held-out."""
        return (*self.training, *chain.from_iterable(self.held_out.values()))

    def __str__(self) -> str:
        parts = [f"{len(self.training)} training prompts"]
        if self.held_out:
            parts.append(f"{' + '.join(str(len(rows)) for rows in self.held_out.values())} held-out prompts")
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
        rows = {DATASET: self.training, **self.held_out}
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
        maker = PromptMaker(dataset, tokenizer, where, for_environment=training.environment is not None)
        return load_rows(maker, job_folder)

    rows = rows_of(training.dataset, DATASET, 1)
    if training.dataset is not None:
        _refuse_missing_answers(rows, DATASET, training.dataset, training.rewards)
    held_out: dict[str, tuple[PromptRow, ...]] = {}
    for index, each in enumerate(training.evaluations):
        where = evaluation_dataset(index)
        held_out[where] = tuple(rows_of(each.dataset, where, each.num_prompts)[: each.num_prompts])
        if each.dataset is not None:
            _refuse_missing_answers(held_out[where], where, each.dataset, rewards_of(each, training))
    if training.dataset is None:
        # The environments of training and of evaluations have different seeds.
        return Prompts(tuple(rows), held_out, 0)
    training_rows, num_removed = without_held_out(rows, chain.from_iterable(held_out.values()))
    return Prompts(tuple(training_rows), held_out, num_removed)


def rows_with_answers(prompts: Prompts, training: Training) -> dict[str, tuple[PromptRow, ...]]:
    """Returns the held-out prompts whose answers MathAnswer parses, by the field path of their dataset."""
    return {
        where: prompts.held_out[where]
        for index, each in enumerate(training.evaluations)
        if (where := evaluation_dataset(index))
        and RewardType.MATH_ANSWER in _types_that_need_answers(rewards_of(each, training))
    }


def _types_that_need_answers(rewards: Iterable[Reward]) -> list[RewardType]:
    """Returns the types of the rewards that cannot score rows without an answer."""
    return [each.type for each in rewards if each.type in (RewardType.MATH_ANSWER, RewardType.CODE)]


def _refuse_missing_answers(rows: Sequence[PromptRow], where: str, dataset: Dataset, rewards: Sequence[Reward]) -> None:
    """Raises DatasetError if some rows have no answer or one that the rewards cannot score."""
    unanswered = [row.location for row in rows if row.answer is None]
    needing = _types_that_need_answers(rewards)
    if unanswered and (len(unanswered) < len(rows) or needing):
        why = f"the reward {needing[0]} needs one" if needing else "the other rows have one"
        raise DatasetError(
            f"{where}.answerField: {len(unanswered)} of {len(rows)} rows have no answer, but {why} (first: "
            f"{unanswered[0]}); name the column with the answer, or remove these rows"
        )
    if RewardType.MATH_ANSWER in needing:
        refuse_unusable(rows, where, dataset.answer_field)
    if RewardType.CODE in needing:
        refuse_unusable_tests(rows, where)
