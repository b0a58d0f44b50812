"""Distributes sequences across workers so that all have about the same number of tokens.

Greedy number partitioning: the longest item first, each item goes to the emptiest partition that has room. Then the
fullest partition exchanges items with emptier ones for as long as this reduces the largest sum. Full and empty refer to
the sum of a partition's lengths. A partition has room while it has fewer than lengths / partitions items.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rljob_trainer.errors import DataError

MAX_SUM = 2.0**63
CLOSE_ENOUGH = 1e-4
"""The search stops when the largest sum exceeds the mean by less than this fraction of the mean."""
NUM_TRIES = 32
"""The search stops if no exchange with any of this number of emptiest partitions helps."""


def balanced_partitions(lengths: Sequence[int] | npt.NDArray[np.integer], num_partitions: int) -> list[list[int]]:
    """Divides the indices of `lengths` into `num_partitions` lists of equal size with about equal sums of lengths.

    Each list is ascending. The result is deterministic, but not always optimal (the problem is NP-hard). Raises
    DataError for negative lengths, and if the number of lengths is not a multiple of `num_partitions`.
    """
    given = np.asarray(lengths)
    if given.ndim != 1 or (given.size and not np.issubdtype(given.dtype, np.integer)):
        raise DataError(
            f"balanced_partitions: lengths must be a list of integers (seen: {given.dtype}, shape {list(given.shape)})"
        )
    if num_partitions < 1 or len(given) < num_partitions or len(given) % num_partitions:
        raise DataError(
            f"balanced_partitions: {len(given)} lengths cannot be divided equally among {num_partitions} partitions; "
            "pad first"
        )
    if given.min() < 0:
        raise DataError(f"balanced_partitions: lengths must not be negative (seen: {given.min()})")
    if given.sum(dtype=np.float64) >= MAX_SUM:
        raise DataError(f"balanced_partitions: the sum of lengths must be below 2^63 (seen: up to {given.max()} each)")
    items = _greedy_assignment(given.astype(np.int64), num_partitions)
    _exchange(items, given.astype(np.int64))
    return [sorted(row) for row in items.tolist()]


def _greedy_assignment(lengths: npt.NDArray[np.int64], num_partitions: int) -> npt.NDArray[np.int64]:
    """[num_partitions, items]: assigns each item to the partition with the smallest sum that has room (Graham's
    rule)."""
    capacity = len(lengths) // num_partitions
    partitions: list[list[int]] = [[] for _ in range(num_partitions)]
    heap = [(0, 0, number) for number in range(num_partitions)]
    values = lengths.tolist()
    for item in np.argsort(-lengths, kind="stable").tolist():
        load, count, number = heap[0]
        partitions[number].append(item)
        if count + 1 < capacity:
            heapq.heapreplace(heap, (load + values[item], count + 1, number))
        else:
            heapq.heappop(heap)
    return np.array(partitions, dtype=np.int64)


def _exchange(items: npt.NDArray[np.int64], length_of: npt.NDArray[np.int64]) -> None:
    """Exchanges items between partitions (rows of `items`), in place, until all sums are close enough, or until no
    exchange is found that reduces the largest sum.

    The loop ends, because each exchange reduces the larger of two sums, and the other sum stays below the old value of
    the larger one."""
    lengths = length_of[items]
    loads = lengths.sum(axis=1)
    enough = loads.mean() * (1 + CLOSE_ENOUGH)
    while loads.max() > enough:
        full = int(loads.argmax())
        for other in np.argsort(loads, kind="stable")[: min(NUM_TRIES, len(loads) - 1)]:
            indices = _best_exchange(lengths[full], lengths[other])
            if indices is not None:
                break
        else:
            return
        here, there = (full, indices[0]), (other, indices[1])
        moved = lengths[here] - lengths[there]
        loads[full] -= moved
        loads[other] += moved
        for array in (items, lengths):
            array[here], array[there] = array[there], array[here]


def _best_exchange(full: npt.NDArray[np.int64], other: npt.NDArray[np.int64]) -> tuple[int, int] | None:
    """The indices, in both partitions, of the two items whose exchange reduces the larger sum the most; None if no
    exchange reduces this sum."""
    gap = full.sum() - other.sum()
    order = np.argsort(other, kind="stable")
    ascending = other[order]
    # An exchange moves (item of full - item of other) tokens; moving half of the gap is optimal. `change` is the new
    # larger sum minus the old one.
    after = np.searchsorted(ascending, full - gap / 2)
    candidates = np.clip(np.stack((after - 1, after)), 0, len(other) - 1)
    moved = full - ascending[candidates]
    change = np.maximum(-moved, moved - gap)
    side, here = divmod(int(change.argmin()), len(full))
    if change[side, here] >= 0:
        return None
    return here, int(order[candidates[side, here]])
