"""An actor alone in a process, without a controller, and rollouts that were drawn for it.

Legend: B responses.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from rljob_api.v1alpha1.algorithm import Algorithm
from rljob_api.v1alpha1.optimizer import Optimizer
from rljob_api.v1alpha1.recipes import resolve_algorithm
from rljob_testing.engine_updates import FIRST_TOKEN, LENGTHS, PROMPT_LENGTH, engine_settings
from rljob_trainer.batch.proto import DataProto
from rljob_trainer.batch.ragged import RaggedColumn
from rljob_trainer.dispatch.worker import WorkerContext
from rljob_trainer.workers.actor import ActorSettings, ActorWorker
from rljob_trainer.workers.columns import (
    ADVANTAGES,
    IS_LEARNED,
    POLICY_VERSIONS,
    RESPONSE_MASK,
    ROLLOUT_LOGPROBS,
    TOKENS,
)

NUM_STEPS = 10


def made_actor(
    model: Path, context: WorkerContext, dtype: torch.dtype = torch.float32, optimizer: Optimizer | None = None
) -> ActorWorker:
    """Collective."""
    chosen = Optimizer(learning_rate=1e-3) if optimizer is None else optimizer
    return ActorWorker(
        context,
        ActorSettings(
            engine=engine_settings(model, context.device, dtype, optimizer=chosen),
            algorithm=resolve_algorithm(Algorithm()),
            optimizer=chosen,
            temperature=1.0,
            max_new_tokens=max(LENGTHS),
            group_size=2,
            samples_all_tokens=True,
            num_steps=NUM_STEPS,
            num_epochs_per_batch=1,
            mini_batch_rows=len(LENGTHS) // 2,
        ),
    )


def drawn_rollout(num_tokens: int, seed: int, lengths: Sequence[int] = LENGTHS) -> DataProto:
    """What an update needs, of a vocabulary of `num_tokens`."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(FIRST_TOKEN, num_tokens, (length,), generator=generator) for length in lengths]
    masks = [torch.arange(length) >= PROMPT_LENGTH for length in lengths]
    logprobs = [
        -5 * torch.rand(length, generator=generator) * mask for length, mask in zip(lengths, masks, strict=True)
    ]
    return DataProto(
        {
            ADVANTAGES: torch.randn(len(lengths), generator=generator),
            IS_LEARNED: torch.ones(len(lengths), dtype=torch.bool),
        },
        ragged={
            TOKENS: RaggedColumn.from_rows(rows),
            RESPONSE_MASK: RaggedColumn.from_rows(masks),
            ROLLOUT_LOGPROBS: RaggedColumn.from_rows(logprobs),
            POLICY_VERSIONS: RaggedColumn.from_rows([mask.int() - 1 for mask in masks]),
        },
    )
