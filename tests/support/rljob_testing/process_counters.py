"""What the kernel counts of this process: bytes that it reads, and memory of the host that comes anew or is lent to
the system (MADV_FREE)."""

from __future__ import annotations

import ctypes
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass
class BytesRead:
    """Of a block; known after it."""

    count: int = 0


@contextmanager
def bytes_read() -> Iterator[BytesRead]:
    """Counts what all threads of this process read within the block."""
    result = BytesRead()
    before = _count()
    yield result
    result.count = _count() - before


def _count() -> int:
    [line] = [line for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("rchar:")]
    return int(line.removeprefix("rchar:"))


MEBIBYTES = (3, 20, 30, 30, 30, 30, 30, 30)
"""Of the tensors of a round."""
NUM_FIRST_ROUNDS, NUM_ROUNDS = 6, 20
_PR_SET_THP_DISABLE = 41


def mebibytes_faulted_in() -> int:
    """Pages that came in `NUM_ROUNDS` rounds, after `NUM_FIRST_ROUNDS` others, of `sum(MEBIBYTES)` that each writes to.

    The heap grows in some of the first rounds: a block is asked for with room to align it, and does not fit where one
    like it was until there are several such places. Which rounds these are follows from what else lies there. A process
    that was forked also copies what it shared until then."""
    # No large pages, whatever the machine does: they would make few faults of much memory.
    ctypes.CDLL(None).prctl(_PR_SET_THP_DISABLE, 1, 0, 0, 0)
    _rounds(NUM_FIRST_ROUNDS)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    _rounds(NUM_ROUNDS)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) * resource.getpagesize() >> 20


def _rounds(number: int) -> None:
    for _ in range(number):
        tensors = [torch.ones(size << 18) for size in MEBIBYTES]
        del tensors


def lazily_freed_bytes() -> int:
    """Of this process, what the system may take."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("LazyFree:"))
