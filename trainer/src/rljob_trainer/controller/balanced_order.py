"""The order of a batch's rows in which every worker gets about the same number of tokens in every update.

Workers wait for each other in each update, so the one with the most tokens sets the pace. Which rows an update learns
from does not depend on the number of workers; who computes them does.

Legend: B rows of a batch, M rows of an update, over all workers.
"""

from __future__ import annotations

import torch

from rljob_trainer.batch.balancing import balanced_partitions


def balanced_order(lengths_B: torch.Tensor, num_workers: int, rows_per_update: int) -> torch.Tensor:
    """[B] int64: positions of the rows such that, cut into `num_workers` equal parts one after the other, part w is
    what worker w computes: its share of the first M rows first, then of the next M. `lengths_B` is [B] int64, tokens,
    0 for rows that cost nothing.

    Raises DataError where M rows do not spread evenly over the workers."""
    shares: list[list[int]] = [[] for _ in range(num_workers)]
    for start in range(0, len(lengths_B), rows_per_update):
        lengths = lengths_B[start : start + rows_per_update].numpy()
        for share, positions in zip(shares, balanced_partitions(lengths, num_workers), strict=True):
            share.extend(start + position for position in positions)
    return torch.tensor([position for share in shares for position in share], dtype=torch.int64)


def imbalance(lengths_B: torch.Tensor, num_workers: int) -> float:
    """How many times the tokens of the mean worker the fullest one has, when the rows are cut into equal parts;
    1 where there are none."""
    tokens_W = lengths_B.view(num_workers, -1).sum(dim=1).double()
    return float(tokens_W.max() / tokens_W.mean()) if lengths_B.any() else 1.0
