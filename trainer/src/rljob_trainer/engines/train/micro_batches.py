"""Splits a worker's rows into micro-batches that fit a token budget, the same number of them on every worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rljob_trainer.errors import ConfigurationError


def plan_micro_batches(lengths: Sequence[int], max_tokens: int, largest_count: Callable[[int], int]) -> list[list[int]]:
    """Row indices per micro-batch. Rows of similar length go together, so little is padded.

    A micro-batch of n rows costs n x (its longest row) tokens, at most `max_tokens`. `largest_count` gives the largest
    number of micro-batches among all workers; missing ones are added empty, because every forward and backward pass is
    a collective that all workers must join.
    Raises ConfigurationError when a single row is longer than `max_tokens`."""
    plans: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if lengths[row] > max_tokens:
            raise ConfigurationError(
                f"spec.training.maxTokensPerMicroBatch: a sequence is longer than one micro-batch "
                f"({lengths[row]} tokens, limit {max_tokens}); raise the limit or shorten prompts and responses"
            )
        if plans and (len(plans[-1]) + 1) * lengths[plans[-1][0]] <= max_tokens:
            plans[-1].append(row)
        else:
            plans.append([row])
    num_micro_batches = largest_count(len(plans))
    return plans + [[] for _ in range(num_micro_batches - len(plans))]
