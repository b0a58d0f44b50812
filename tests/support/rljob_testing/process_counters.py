"""Counters of the kernel for this process: bytes read, memory faulted in, and memory that the kernel may reclaim
(MADV_FREE)."""

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
    """The bytes read within a `bytes_read` block; set at its end."""

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
"""Sizes of the tensors of one round."""
NUM_FIRST_ROUNDS, NUM_ROUNDS = 6, 10
_PR_SET_THP_DISABLE = 41


def mebibytes_faulted_in() -> int:
    """MiB of host memory that was faulted in during `NUM_ROUNDS` rounds, each of which writes `sum(MEBIBYTES)` MiB.

    `NUM_FIRST_ROUNDS` rounds run before, because the heap grows in the first rounds: the allocator requests a block
    with extra room for alignment, which does not fit into the place of an earlier block until there are several such
    places. Which rounds these are depends on the rest of the heap. A forked process also copies the pages that it
    shared.
    """
    # No transparent huge pages, whatever the machine's setting: they would make few faults of much memory.
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
    """Bytes of this process that the kernel may reclaim."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("LazyFree:"))
