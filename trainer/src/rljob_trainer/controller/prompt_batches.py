"""Prompts as batches for the workers, and the seeds of their responses."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from rljob_trainer.batch.proto import DataProto
from rljob_trainer.batch.ragged import RaggedColumn
from rljob_trainer.datasets.prompts import PromptRow
from rljob_trainer.workers.columns import (
    ANSWERS,
    DATASET_ROWS,
    PLAIN_TURN_BEGINNINGS,
    PROMPT_MESSAGES,
    PROMPT_TEXTS,
    PROMPT_TOKEN_IDS,
    TURN_BEGINNINGS,
)

MAX_SEED = 2**31
"""Upper bound of seeds (exclusive)."""


def environment_prompt_batch(prompts: Sequence[PromptRow]) -> DataProto:
    """Returns the prompts of a job with an environment as a batch for the workers, which make the prompts' tokens."""
    return DataProto(
        objects={
            ANSWERS: tuple(row.answer for row in prompts),
            DATASET_ROWS: tuple(row.row for row in prompts),
            PROMPT_MESSAGES: tuple(row.messages for row in prompts),
        },
    )


def prompt_batch(prompts: Sequence[PromptRow]) -> DataProto:
    """Returns the prompts as a batch for the workers."""
    return DataProto(
        ragged={PROMPT_TOKEN_IDS: RaggedColumn.from_rows([row.token_ids for row in prompts], torch.int64)},
        objects={
            PROMPT_TEXTS: tuple(row.text_for_rewards for row in prompts),
            TURN_BEGINNINGS: tuple(row.turn_beginning for row in prompts),
            PLAIN_TURN_BEGINNINGS: tuple(row.plain_turn_beginning for row in prompts),
            ANSWERS: tuple(row.answer for row in prompts),
            DATASET_ROWS: tuple(row.row for row in prompts),
            PROMPT_MESSAGES: tuple(row.messages for row in prompts),
        },
    )


def sample_seeds(job_seed: int, stream: int, step: int, count: int) -> torch.Tensor:
    """Returns [count] int64 seeds that depend only on the arguments, so that a resumed run draws the same ones.

    `stream` is a different number for each use, such as training and evaluation."""
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence([job_seed, stream, step])))
    return torch.from_numpy(generator.integers(0, MAX_SEED, size=count, dtype=np.int64))
