"""Rows of response tokens for tests of algorithms.

Legend: B rows, T columns of a padded table, N response tokens, row after row.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from rljob_trainer.algorithms.interfaces import Reduce
from rljob_trainer.algorithms.segments import Segments

Part = TypeVar("Part")
Result = TypeVar("Result")

CPU = torch.device("cpu")


def rows_of(*lengths: int) -> Segments:
    """Rows of these lengths."""
    return Segments.of(lengths, CPU)


def rows_of_mask(mask_BT: Tensor) -> Segments:
    """As many values in each row as the mask has ones there."""
    return rows_of(*(int(length) for length in mask_BT.sum(dim=1)))


def flat(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """[N]: the values where the mask is 1, row after row."""
    return values_BT[mask_BT.bool()]


def on_workers(parts: Sequence[Part], compute: Callable[[Part, Reduce], Result]) -> list[Result]:
    """`compute(part, reduce)` for every part, each in a thread of its own, as on so many data-parallel workers."""
    gathered: list[Tensor] = [torch.zeros(())] * len(parts)
    barrier = threading.Barrier(len(parts), timeout=10)

    def work(rank: int) -> Result:
        try:
            return compute(parts[rank], _Shared(gathered, rank, barrier))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(len(parts)) as pool:
        return list(pool.map(work, range(len(parts))))


class _Shared:
    def __init__(self, gathered: list[Tensor], rank: int, barrier: threading.Barrier) -> None:
        self._gathered = gathered
        self._rank = rank
        self._barrier = barrier

    def sum(self, values: Tensor) -> Tensor:
        return self._of_all(values).sum(dim=0)

    def max(self, values: Tensor) -> Tensor:
        return self._of_all(values).amax(dim=0)

    def _of_all(self, values: Tensor) -> Tensor:
        self._gathered[self._rank] = values
        self._barrier.wait()
        together = torch.stack(self._gathered)
        self._barrier.wait()
        return together
