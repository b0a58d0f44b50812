"""Splits a worker's rows into micro-batches that fit a token budget, the same number of them on every worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rljob_trainer.errors import ConfigurationError


def plan_micro_batches(
    lengths: Sequence[int], max_tokens: int, largest_count: Callable[[int], int], *, is_padded: bool
) -> list[list[int]]:
    """Row indices per micro-batch; rows of length 0 are in none. Rows of similar length go together.

    A micro-batch costs the tokens of its rows, where rows are padded as many times its longest row as it has rows; at
    most `max_tokens`. `largest_count` gives the largest number of micro-batches among all workers; missing ones are
    added empty, because every forward and backward pass is a collective that all workers must join.
    Raises ConfigurationError when a single row is longer than `max_tokens`."""
    plans: list[list[int]] = []
    cost = 0
    for row in sorted((row for row, length in enumerate(lengths) if length), key=lambda index: -lengths[index]):
        length = lengths[row]
        if length > max_tokens:
            raise ConfigurationError(
                f"spec.training.maxTokensPerMicroBatch: a sequence is longer than one micro-batch "
                f"({length} tokens, limit {max_tokens}); raise the limit or shorten prompts and responses"
            )
        cost += lengths[plans[-1][0]] if is_padded and plans else length
        if plans and cost <= max_tokens:
            plans[-1].append(row)
        else:
            plans.append([row])
            cost = length
    num_micro_batches = largest_count(len(plans))
    return plans + [[] for _ in range(num_micro_batches - len(plans))]
