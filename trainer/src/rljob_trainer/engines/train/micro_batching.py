"""Divides rows into micro-batches that fit a token budget. All workers have the same number of micro-batches.

Legend: B rows, N response tokens of all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rljob_trainer.errors import ConfigurationError


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
