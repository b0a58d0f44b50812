"""The host's memory: how much is available, and whether this process keeps its freed memory, returns it to the system,
or lets the system reclaim it."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rljob_trainer.control_groups import control_group_folders, read_or_empty
from rljob_trainer.settings import variables_named

if TYPE_CHECKING:
    from torch import UntypedStorage

MAX_KEPT_BYTES = 128 << 20
"""The process keeps freed allocations up to this size; larger ones go back to the system. The embedding of SmolLM2 (108
MiB) is kept."""
FALLBACK_MAX_KEPT_BYTES = 32 << 20
"""Used if the C library rejects MAX_KEPT_BYTES (32 MiB is the documented maximum, mallopt(3))."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of `mallopt` (mallopt(3))."""
_NEVER_TRIM = -1
_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_")
_TUNABLES = "GLIBC_TUNABLES"
_HEAP_TUNABLES = re.compile(r"glibc\.malloc\.(trim_threshold|mmap_threshold|mmap_max|top_pad)=")
_LIMITS = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
"""Files with the limit and the usage, for cgroup version 2 and version 1."""
_CACHED = ("inactive_file", "active_file")
"""Counters of the page cache and of reclaimable pages (see `make_reclaimable`). A group's usage includes these pages,
but the kernel drops them when memory is needed."""


class HostMemory:
    """Memory of the machine or the container. A process in a container sees the machine's memory, but the container may
    have a lower limit."""

    def __init__(self, file_system: Path = Path("/")) -> None:
        self._file_system = file_system

    def available_bytes(self) -> int | None:
        """Returns the bytes that the processes of this machine or container can still allocate; None if unknown."""
        return min([*self._available_on_machine(), *self._available_in_groups()], default=None)

    def keep_freed(self) -> bool:
        """Makes this process keep freed memory for new tensors of its main thread, in which workers compute. Returns
        False if this is not possible: the user has set the allocator's variables, or the C library is not glibc.

        By default glibc returns the free end of its heap to the system and requests it again later. The system fills
        each new page with zeros. Without this setting, filling pages takes a seventh of the time of an update of 135
        million parameters. With it the heap never shrinks, and it gets fragmented: it may be larger than all tensors
        that exist at the same time."""
        set_by_user = variables_named((*_VARIABLES, _TUNABLES))
        if _HEAP_TUNABLES.search(set_by_user.pop(_TUNABLES, "")) or set_by_user:
            return False
        set_parameter = getattr(ctypes.CDLL(None), "mallopt", None)
        if set_parameter is None:
            return False
        # Setting only the trim threshold would make glibc map every tensor separately.
        is_set = any(set_parameter(_MMAP_THRESHOLD, size) for size in (MAX_KEPT_BYTES, FALLBACK_MAX_KEPT_BYTES))
        return bool(is_set and set_parameter(_TRIM_THRESHOLD, _NEVER_TRIM))

    def return_free_memory(self) -> None:
        """Returns the process's free memory to the system, if the C library supports this. Later allocations request
        memory from the system again."""
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(ctypes.c_size_t(0))

    def return_free_memory_if_below(self, wanted: int) -> None:
        """Calls `return_free_memory` if fewer than `wanted` bytes are available for memory outside the allocator. Does
        nothing if the available memory is unknown."""
        available = self.available_bytes()
        if available is not None and available < wanted:
            self.return_free_memory()

    def release_pages(self, storages: Iterable[UntypedStorage]) -> None:
        """Returns the whole pages of these storages to the system and keeps their addresses. The next access to a page
        reads zeros. Raises OSError.

        vLLM's CPU back end (0.32.0) ignores `sleep`, so its KV cache would keep its memory all the time. The addresses
        must not change, because the engine keeps pointers to them."""
        for begin, length in _whole_pages(storages):
            if error := _advise(begin, length, mmap.MADV_DONTNEED):
                raise _not_released(length, error)

    def make_reclaimable(self, storages: Iterable[UntypedStorage]) -> None:
        """Lets the system reclaim the whole pages of these storages when it needs memory. A page that is written to
        before it is reclaimed stays, at no cost. The content of the other pages is undefined: zeros or the old data.
        Raises OSError.

        Until they are reclaimed, the pages count as resident memory of the process. In the statistics of the machine
        and of the control group they are inactive file pages, which are reclaimed first. Pages that were written to
        again are still counted as inactive file pages until the kernel scans them."""
        for begin, length in _whole_pages(storages):
            # Some kernels do not support MADV_FREE, and some sandboxes block it.
            if _advise(begin, length, mmap.MADV_FREE) and (error := _advise(begin, length, mmap.MADV_DONTNEED)):
                raise _not_released(length, error)

    def _available_on_machine(self) -> Iterator[int]:
        text = read_or_empty(self._file_system / "proc/meminfo")
        if found := re.search(r"^MemAvailable:\s*(\d+) kB", text, re.MULTILINE):
            yield int(found[1]) * 1024

    def _available_in_groups(self) -> Iterator[int]:
        for folder in control_group_folders("memory", self._file_system):
            for limit_file, use_file in _LIMITS:
                limit, used = (read_or_empty(folder / name).strip() for name in (limit_file, use_file))
                if limit.isdecimal() and used.isdecimal():
                    lines = (line.split() for line in read_or_empty(folder / "memory.stat").splitlines())
                    counts = {name: int(count) for name, count in lines}
                    # Version 1 counts child groups in separate entries that begin with `total_`.
                    dropped = sum(counts.get(f"total_{name}", counts.get(name, 0)) for name in _CACHED)
                    yield max(0, int(limit) - int(used) + dropped)


HOST_MEMORY = HostMemory()
"""The one instance for this process."""


def size_text(num_bytes: float) -> str:
    """A size as people read it: `1.5 GiB`, `0.5 MiB`."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"


def _whole_pages(storages: Iterable[UntypedStorage]) -> Iterator[tuple[int, int]]:
    """Yields address and length, in bytes, of the whole pages in each storage."""
    for storage in storages:
        begin = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (storage.data_ptr() + storage.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > begin:
            yield begin, end - begin


def _advise(begin: int, length: int, advice: int) -> int:
    """Calls madvise(2). Returns 0 or the error number."""
    library = ctypes.CDLL(None, use_errno=True)
    failed = library.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), ctypes.c_int(advice))
    return ctypes.get_errno() if failed else 0


def _not_released(length: int, number: int) -> OSError:
    return OSError(number, f"cannot return {length} bytes of the KV cache to the system: {os.strerror(number)}")
