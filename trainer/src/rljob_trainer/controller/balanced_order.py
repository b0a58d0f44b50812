"""Orders the rows of a batch so that every worker gets about the same number of tokens in every update.

Workers wait for each other in each update, so the worker with the most tokens determines the time. Which rows an update
trains on does not depend on the number of workers; only the assignment of rows to workers does.

Legend: B rows of a batch, W workers.
"""

from __future__ import annotations

import torch

from rljob_trainer.batch.balancing import balanced_partitions


def balanced_order(lengths_B: torch.Tensor, num_workers: int, rows_per_update: int) -> torch.Tensor:
    """Returns [B] int64, a permutation of the rows. If it is split into `num_workers` equal consecutive parts, part w
    has the rows of worker w: first the worker's rows of the first update, then those of the second update, and so on.
    `lengths_B`: int64, tokens of each row, 0 for rows that need no computation. `rows_per_update`: rows of an update
    over all workers.

    Raises DataError if the number of rows of an update is not divisible by the number of workers."""
    rows_of_workers: list[list[int]] = [[] for _ in range(num_workers)]
    for start in range(0, len(lengths_B), rows_per_update):
        lengths = lengths_B[start : start + rows_per_update].numpy()
        for rows, positions in zip(rows_of_workers, balanced_partitions(lengths, num_workers), strict=True):
            rows.extend(start + position for position in positions)
    return torch.tensor([row for rows in rows_of_workers for row in rows], dtype=torch.int64)


def imbalance(lengths_B: torch.Tensor, num_workers: int) -> float:
    """Splits the rows into equal consecutive parts, one per worker. Returns the largest number of tokens of a worker
    divided by the mean over workers; 1 if there are no tokens."""
    tokens_W = lengths_B.view(num_workers, -1).sum(dim=1).double()
    return float(tokens_W.max() / tokens_W.mean()) if lengths_B.any() else 1.0
