"""Plans which worker trains on which rows, and in which micro-batch, so that workers do not wait for each other.

Workers meet in every micro-batch, so the most expensive one determines the time (see `batch/joint_packing.py`). The
cost of a row is its number of tokens, plus attention, which grows with the square of the row's length. Which rows an
update trains on does not depend on the number of workers.

Legend: B rows of a batch, W workers, K micro-batches of each worker in all updates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from rljob_trainer.batch.balancing import balanced_partitions
from rljob_trainer.batch.joint_packing import NONE, Integers, packed_jointly
from rljob_trainer.errors import DataError


@dataclass(frozen=True)
class RowCosts:
    """The cost of rows, and the token limit of a micro-batch."""

    max_tokens: int
    """Tokens of a micro-batch."""
    per_square: float
    """The cost of attention for each squared token of a row's length; the cost of a token is 1."""

    def of(self, lengths_B: Integers) -> Integers:
        """[B]: the cost of rows of these lengths."""
        return np.rint(lengths_B + self.per_square * np.square(lengths_B.astype(np.float64))).astype(np.int64)


@dataclass(frozen=True)
class RowPlan:
    """The rows and micro-batches of all workers. `order_B` is a permutation of the rows. If it is split into W equal
    consecutive parts, part w has the rows of worker w: first those of the first update, then those of the second, and
    so on. The other tensors [B] are in this order."""

    order_B: torch.Tensor
    """int64."""
    update_micro_batch_B: torch.Tensor
    """int32: the number of the row's micro-batch in its update. NONE for rows without tokens, and for all rows of a
    single worker, which packs them itself."""
    pass_micro_batch_B: torch.Tensor
    """int32: the number of the row's micro-batch in a pass over the whole batch. A pass makes no updates in between, so
    it joins micro-batches of several updates that fit into one."""
    imbalance: float
    """The cost of the most expensive micro-batch of a round, summed over all rounds of all updates, divided by the mean
    cost of a worker; 1.0 is perfect balance."""


def planned_rows(lengths_B: torch.Tensor, num_workers: int, update_sizes: Sequence[int], costs: RowCosts) -> RowPlan:
    """Plans the rows of a batch. `lengths_B`: int64, tokens of each row, 0 for rows that need no computation.
    `update_sizes`: the number of rows of each update over all workers.

    With several workers, raises DataError if the rows of an update are not divisible by the number of workers, or if
    the updates have another number of rows than the batch."""
    if num_workers == 1:
        numbers_B = torch.full((len(lengths_B),), NONE, dtype=torch.int32)
        return RowPlan(torch.arange(len(lengths_B)), numbers_B, numbers_B, 1.0)
    if any(size % num_workers for size in update_sizes) or sum(update_sizes) != len(lengths_B):
        raise DataError(
            f"batch: {len(lengths_B)} rows in updates of {sorted(set(update_sizes))} cannot be divided equally among "
            f"{num_workers} workers"
        )
    given_B = lengths_B.numpy()
    cost_B = costs.of(given_B)
    orders, numbers, tokens, loads = [], [], [], []
    for start, size in zip(accumulate(update_sizes, initial=0), update_sizes, strict=False):
        rows = slice(start, start + size)
        packing = packed_jointly(given_B[rows], cost_B[rows], num_workers, costs.max_tokens)
        order = np.argsort(packing.worker_B, kind="stable")
        orders.append(start + order.reshape(num_workers, -1))
        numbers.append(packing.round_B[order].reshape(num_workers, -1))
        tokens.append(packing.sums(given_B[rows], num_workers))
        loads.append(packing.sums(cost_B[rows], num_workers))
    merged = _merged([each.shape[1] for each in tokens], np.concatenate(tokens, axis=1), costs.max_tokens)
    of_passes = [
        np.where(of_update == NONE, NONE, new[of_update]) if len(new) else of_update
        for of_update, new in zip(numbers, merged, strict=True)
    ]
    loads_WK = np.concatenate(loads, axis=1)
    mean = float(loads_WK.mean(axis=0).sum())
    return RowPlan(
        torch.from_numpy(np.concatenate(orders, axis=1).ravel()),
        torch.from_numpy(np.concatenate(numbers, axis=1).ravel().astype(np.int32)),
        torch.from_numpy(np.concatenate(of_passes, axis=1).ravel().astype(np.int32)),
        float(loads_WK.max(axis=0).sum()) / mean if mean else 1.0,
    )


def balanced_order(lengths_B: torch.Tensor, num_workers: int) -> torch.Tensor:
    """Returns [B] int64, a permutation of the rows. If it is split into `num_workers` equal consecutive parts, all have
    about the same number of tokens. Used for reward models, whose micro-batches are not planned. Raises DataError if
    the number of rows is not divisible by the number of workers."""
    parts = balanced_partitions(lengths_B.numpy(), num_workers)
    return torch.tensor([row for rows in parts for row in rows], dtype=torch.int64)


def imbalance(lengths_B: torch.Tensor, num_workers: int) -> float:
    """Splits the rows into equal consecutive parts, one per worker. Returns the largest number of tokens of a worker
    divided by the mean over workers; 1 if there are no tokens."""
    tokens_W = lengths_B.view(num_workers, -1).sum(dim=1).double()
    return float(tokens_W.max() / tokens_W.mean()) if lengths_B.any() else 1.0


def _merged(counts: list[int], tokens_WK: Integers, max_tokens: int) -> list[Integers]:
    """Returns for each update: which micro-batch of the pass each of its own joins, namely the first one that has room
    on all workers. `counts`: the number of micro-batches of each update."""
    sums: list[Integers] = []
    new = np.empty(tokens_WK.shape[1], dtype=np.int64)
    for number, tokens_W in enumerate(tokens_WK.T):
        fitting = (index for index, sum_W in enumerate(sums) if (sum_W + tokens_W).max() <= max_tokens)
        index = next(fitting, len(sums))
        if index == len(sums):
            sums.append(tokens_W.copy())
        else:
            sums[index] += tokens_W
        new[number] = index
    return np.split(new, np.cumsum(counts)[:-1])
