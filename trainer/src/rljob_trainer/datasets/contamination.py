"""Keeps held-out prompts out of training."""

from __future__ import annotations

from collections.abc import Sequence

from rljob_trainer.datasets.prompts import PromptRow


def without_held_out(
    training_rows: Sequence[PromptRow], held_out_rows: Sequence[PromptRow]
) -> tuple[list[PromptRow], int]:
    """The training rows whose prompt does not occur among the held-out ones, and the number of rows left out.

    Prompts are compared as they stand in the data, before templates, with runs of white space taken as one blank.
    """
    held_out = {_comparable(row.source_prompt) for row in held_out_rows}
    kept = [row for row in training_rows if _comparable(row.source_prompt) not in held_out]
    return kept, len(training_rows) - len(kept)


def _comparable(prompt: str) -> str:
    return " ".join(prompt.split())
