"""Divides rows into micro-batches that fit a token budget. All workers have the same number of micro-batches.

The controller plans the micro-batches of all workers together (`controller/balanced_order.py`). Without a plan, or if
it does not fit this model, each worker packs its own rows.

Legend: B rows, N response tokens of all rows.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from rljob_trainer.batch.joint_packing import NONE
from rljob_trainer.engines.train.attention import AttentionPlan
from rljob_trainer.engines.train.layout import ParallelLayout
from rljob_trainer.engines.train.output_head import Head
from rljob_trainer.engines.train.settings import TrainEngineSettings
from rljob_trainer.engines.train.token_batch import TokenBatch
from rljob_trainer.errors import ConfigurationError

log = logging.getLogger(__name__)


def micro_batches_of(
    batch: TokenBatch,
    settings: TrainEngineSettings,
    layout: ParallelLayout,
    attention: AttentionPlan,
    max_over_ranks: Callable[[float], float],
) -> list[list[int]]:
    """Collective. The row indices of each micro-batch of an engine with these settings. `max_over_ranks`: the maximum
    over all ranks. Raises ConfigurationError if a row is too long for the model or for a micro-batch."""
    limit = attention.max_row_tokens
    longest = 0 if limit is None else int(max_over_ranks(max(batch.read_lengths, default=0)))
    if limit is not None and longest > limit:
        raise ConfigurationError(
            f"spec.training.rollout.maxNewTokens: a sequence has {longest} tokens (limit {limit}); above the limit "
            "this model's rotary frequencies depend on the longest sequence of a pass; reduce maxNewTokens or "
            "maxPromptTokens"
        )
    max_tokens = settings.max_tokens_per_micro_batch * layout.num_sequence_ranks
    if settings.head is Head.SCORE:
        # The job was checked with the policy's tokens; this model's tokenizer may split a text into more tokens.
        max_tokens = max(max_tokens, *batch.read_lengths, 0)
    if attention.is_flat and batch.micro_batches_B is not None:
        planned = _planned(batch.micro_batches_B, batch.read_lengths, max_tokens, max_over_ranks)
        if planned is not None:
            return planned
        # A single data rank has no plan.
        if bool((batch.micro_batches_B != NONE).any()):
            _warn_of_other_plan()
    return plan_micro_batches(
        batch.read_lengths,
        max_tokens,
        lambda count: int(max_over_ranks(count)),
        is_padded=not attention.is_flat,
    )


@cache
def _warn_of_other_plan() -> None:
    """Warns once in this process."""
    log.warning(
        "the micro-batches that the controller planned do not fit this model's layout, so each worker packs its own "
        "rows, which takes longer; please report this"
    )


def _planned(
    numbers_B: Tensor, lengths: Sequence[int], max_tokens: int, max_over_ranks: Callable[[float], float]
) -> list[list[int]] | None:
    """Collective. The row indices of each planned micro-batch, without rows of length 0. None if, on any rank, a row is
    not in the plan or a micro-batch has more than `max_tokens` tokens: then the plan was made for another layout."""
    numbers: list[int] = numbers_B.tolist()
    planned: list[list[int]] = [[] for _ in range(max(numbers, default=-1) + 1)]
    has_all = True
    for row, (number, length) in enumerate(zip(numbers, lengths, strict=True)):
        if length and number >= 0:
            planned[number].append(row)
        has_all &= not length or number >= 0
    fits = has_all and all(sum(lengths[row] for row in rows) <= max_tokens for rows in planned)
    count = max_over_ranks(len(planned) if fits else math.inf)
    return None if math.isinf(count) else planned + [[] for _ in range(int(count) - len(planned))]


def plan_micro_batches(
    lengths: Sequence[int], max_tokens: int, largest_count: Callable[[int], int], *, is_padded: bool
) -> list[list[int]]:
    """Collective. The row indices of each micro-batch. Rows of similar length are combined; rows of length 0 are
    omitted.

    A micro-batch has at most `max_tokens` tokens, including padding if rows are padded. `largest_count` gets this
    worker's number of micro-batches and returns the largest number of any worker. Empty micro-batches are added up to
    this number, because every forward and backward pass is a collective that all workers must join. Raises
    ConfigurationError if a row is longer than `max_tokens`."""
    micro_batches: list[list[int]] = []
    num_tokens = 0
    for row in sorted((row for row, length in enumerate(lengths) if length), key=lambda index: -lengths[index]):
        length = lengths[row]
        if length > max_tokens:
            raise ConfigurationError(
                f"spec.training.maxTokensPerMicroBatch: a sequence is longer than one micro-batch ({length} tokens, "
                f"limit {max_tokens}); increase maxTokensPerMicroBatch, or reduce maxPromptTokens or maxNewTokens"
            )
        # The first row of a micro-batch is its longest.
        num_tokens += lengths[micro_batches[-1][0]] if is_padded and micro_batches else length
        if micro_batches and num_tokens <= max_tokens:
            micro_batches[-1].append(row)
        else:
            micro_batches.append([row])
            num_tokens = length
    num_micro_batches = largest_count(len(micro_batches))
    return micro_batches + [[] for _ in range(num_micro_batches - len(micro_batches))]


def in_batch_order(values: Sequence[Tensor], micro_batches: Sequence[Sequence[int]], lengths: Sequence[int]) -> Tensor:
    """[N]: the values of all micro-batches in the order of the batch's rows. `values`: one tensor per micro-batch.
    `lengths`: by row of the batch, its number of values."""
    parts: dict[int, Tensor] = {}
    for rows, values_N in zip(micro_batches, values, strict=True):
        sizes = [lengths[row] for row in rows]
        parts.update(zip(rows, torch.split_with_sizes(values_N, sizes), strict=True) if rows else ())
    found = [parts[row] for row in sorted(parts)]
    return torch.cat(found) if found else torch.zeros(0)
