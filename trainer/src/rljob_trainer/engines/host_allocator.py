"""The C library's allocator in a process that computes on CPUs."""

from __future__ import annotations

import ctypes
import re

from rljob_trainer.host_memory import available_host_bytes
from rljob_trainer.settings import variables_named

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of `mallopt` (mallopt(3))."""
_NEVER = -1
_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_")
_TUNABLES = "GLIBC_TUNABLES"
_OWN_TUNABLES = re.compile(r"glibc\.malloc\.(trim_threshold|mmap_threshold|mmap_max|top_pad)=")
MAPPED_BYTES = 128 << 20
"""What is larger still goes back to the system when it is freed. The embedding of SmolLM2 (108 MiB) is not."""
LEAST_MAPPED_BYTES = 32 << 20
"""The same where the C library refuses that (mallopt(3) knows no more)."""


def keep_freed_memory() -> bool:
    """Makes this process keep the memory that tensors leave, for the next ones: those of its main thread, in which
    workers compute. False where no setting of glibc's allocator was changed: the user has set them, or there is none.

    By default glibc gives the end of its heap back whenever it is free, and takes it again. The system writes zeros
    over each page that comes: a seventh of an update of 135 million parameters. The heap does not shrink any more, and
    has gaps: it may become larger than the tensors that lived at the same time."""
    set_by_user = variables_named((*_VARIABLES, _TUNABLES))
    if _OWN_TUNABLES.search(set_by_user.pop(_TUNABLES, "")) or set_by_user:
        return False
    set_parameter = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_parameter is None:
        return False
    # The one without the other would have every tensor mapped.
    is_set = set_parameter(_MMAP_THRESHOLD, MAPPED_BYTES) or set_parameter(_MMAP_THRESHOLD, LEAST_MAPPED_BYTES)
    return bool(is_set and set_parameter(_TRIM_THRESHOLD, _NEVER))


def give_back_where_short(wanted: int) -> None:
    """`give_freed_memory_back` where the machine or the container has less left than the bytes that are `wanted` by
    something else than the allocator. Nothing where nobody says what is left."""
    available = available_host_bytes()
    if available is not None and available < wanted:
        give_freed_memory_back()


def give_freed_memory_back() -> None:
    """What is free now goes back to the system, where the C library can. What is needed again comes anew."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))
