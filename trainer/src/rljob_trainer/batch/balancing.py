"""Which sequences go to which worker, so that all have about the same number of tokens to work on.

Each item goes to the emptiest partition that has room, longest item first; then the fullest partition exchanges items
with emptier ones for as long as that helps.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rljob_trainer.errors import DataError

MAX_SUM = 2.0**63
CLOSE_ENOUGH = 1e-4
"""How much fuller than the mean the fullest partition may stay, as a share of the mean."""
NUM_TRIES = 32
"""With so many of the emptiest partitions an exchange is tried before the fullest one is left as it is."""


def balanced_partitions(lengths: Sequence[int] | npt.NDArray[np.integer], num_partitions: int) -> list[list[int]]:
    """Positions of all lengths, in `num_partitions` equally long lists (ascending each) with about the same sum of
    lengths.

    The result depends on the arguments only; it is not always the best one possible, which would take too long to find.
    Raises DataError for negative lengths, and for numbers of lengths that cannot be spread so.
    """
    given = np.asarray(lengths)
    if given.ndim != 1 or (given.size and not np.issubdtype(given.dtype, np.integer)):
        raise DataError(f"balanced_partitions: lengths must be whole numbers (seen: {given.dtype} {given.shape})")
    if num_partitions < 1 or len(given) < num_partitions or len(given) % num_partitions:
        raise DataError(
            f"balanced_partitions: {len(given)} lengths cannot be spread evenly over {num_partitions} partitions; pad "
            "first"
        )
    if given.min() < 0:
        raise DataError(f"balanced_partitions: a length of {given.min()} is below 0")
    if given.sum(dtype=np.float64) >= MAX_SUM:
        raise DataError(f"balanced_partitions: lengths are less than 2^63 together (seen: up to {given.max()})")
    items = _each_to_the_emptiest(given.astype(np.int64), num_partitions)
    _exchange(items, given.astype(np.int64))
    return [sorted(row) for row in items.tolist()]


def _each_to_the_emptiest(lengths: npt.NDArray[np.int64], num_partitions: int) -> npt.NDArray[np.int64]:
    """[num_partitions, items]: each item to the partition with the smallest sum (Graham's rule) that has room."""
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
    """Exchanges items between rows, in place, until no exchange is found that makes the fullest row less full.

    There is an end: in each exchange the fuller of two rows becomes less full, and the other not as full as it was."""
    lengths = length_of[items]
    loads = lengths.sum(axis=1)
    enough = loads.mean() * (1 + CLOSE_ENOUGH)
    while loads.max() > enough:
        full = int(loads.argmax())
        for other in np.argsort(loads, kind="stable")[: min(NUM_TRIES, len(loads) - 1)]:
            places = _best_exchange(lengths[full], lengths[other])
            if places is not None:
                break
        else:
            return
        here, there = (full, places[0]), (other, places[1])
        moved = lengths[here] - lengths[there]
        loads[full] -= moved
        loads[other] += moved
        for array in (items, lengths):
            array[here], array[there] = array[there], array[here]


def _best_exchange(full: npt.NDArray[np.int64], other: npt.NDArray[np.int64]) -> tuple[int, int] | None:
    """Places of the two items that bring the sums of two rows closest together; None where none does."""
    gap = full.sum() - other.sum()
    order = np.argsort(other, kind="stable")
    ascending = other[order]
    # An exchange moves (item of full - item of other) tokens; half of the gap is best.
    after = np.searchsorted(ascending, full - gap / 2)
    candidates = np.clip(np.stack((after - 1, after)), 0, len(other) - 1)
    moved = full - ascending[candidates]
    fuller = np.maximum(-moved, moved - gap)
    side, here = divmod(int(fuller.argmin()), len(full))
    if fuller[side, here] >= 0:
        return None
    return here, int(order[candidates[side, here]])
