"""What this process has of memory: held by tensors, taken anew, lent to the system."""

from __future__ import annotations

import ctypes
import gc
import resource
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

MEBIBYTES = (3, 20, 30, 30, 30, 30, 30, 30)
"""Of the tensors of a round."""
NUM_ROUNDS = 20
_PR_SET_THP_DISABLE = 41


def num_live_bytes() -> int:
    """Of all storages on the host that some tensor still refers to, each once."""
    gc.collect()
    return sum({storage.data_ptr(): storage.nbytes() for storage in _storages()}.values())


def num_new_mebibytes() -> int:
    """How much memory comes anew where tensors are made, let go and made again: pages that came in `NUM_ROUNDS`
    rounds, after two others, of `sum(MEBIBYTES)` that each writes to.

    The heap grows in some of the first rounds: a block is asked for with room to align it, and does not fit where one
    like it was until there are several such places. Which rounds these are follows from what else lies there."""
    # No large pages, whatever the machine does: they would make few faults of much memory.
    ctypes.CDLL(None).prctl(_PR_SET_THP_DISABLE, 1, 0, 0, 0)
    _rounds(2)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    _rounds(NUM_ROUNDS)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) * resource.getpagesize() >> 20


def lent_bytes() -> int:
    """What the system may take of it (MADV_FREE)."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("LazyFree:"))


def _storages() -> Iterator[torch.UntypedStorage]:
    for each in gc.get_objects():
        # The type, not the object: a proxy would be asked for its class.
        if issubclass(type(each), torch.Tensor):
            local = each._local_tensor if isinstance(each, DTensor) else each
            if local.layout is torch.strided and local.device.type == "cpu" and local.untyped_storage().nbytes():
                yield local.untyped_storage()


def _rounds(number: int) -> None:
    for _ in range(number):
        tensors = [torch.ones(size << 18) for size in MEBIBYTES]
        del tensors
