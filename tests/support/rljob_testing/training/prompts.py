"""Loads the prompts of a dataset as training does, without filters."""

from __future__ import annotations

from pathlib import Path

from rljob_api.v1alpha1.dataset import Dataset
from rljob_trainer.datasets.loading import load_rows
from rljob_trainer.datasets.prompts import PromptMaker, PromptRow
from rljob_trainer.models.tokenizer import Tokenizer


def load_prompts(dataset: Dataset, tokenizer: Tokenizer, base_folder: Path, where: str) -> list[PromptRow]:
    """Returns all rows of the dataset that are not too long."""
    return load_rows(PromptMaker(dataset, tokenizer, where), base_folder)[0]
