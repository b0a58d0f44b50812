"""The host's memory: what is left of it, and what this process keeps, gives back and lends."""

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

MAPPED_BYTES = 128 << 20
"""What is larger still goes back to the system when it is freed. The embedding of SmolLM2 (108 MiB) is not."""
LEAST_MAPPED_BYTES = 32 << 20
"""The same where the C library refuses that (mallopt(3) knows no more)."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of `mallopt` (mallopt(3))."""
_NEVER = -1
_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_")
_TUNABLES = "GLIBC_TUNABLES"
_OWN_TUNABLES = re.compile(r"glibc\.malloc\.(trim_threshold|mmap_threshold|mmap_max|top_pad)=")
_LIMITS = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
"""Files with limit and use, of both versions of control groups."""
_CACHED = ("inactive_file", "active_file")
"""Of what a group uses: copies of files, and lent pages (also those that were written to since), which the kernel drops
when memory is wanted."""


class HostMemory:
    """Of the machine, or of a container, which sees all of its machine's but may be held to less."""

    def __init__(self, file_system: Path = Path("/")) -> None:
        self._file_system = file_system

    def available_bytes(self) -> int | None:
        """What this process and its peers on the machine, or in the container, can still have; None where nothing
        says."""
        return min([*self._of_machine(), *self._of_groups()], default=None)

    def keep_freed(self) -> bool:
        """Makes this process keep the memory that tensors leave, for the next ones: those of its main thread, in which
        workers compute. False where no setting of glibc's allocator was changed: the user has set them, or there is
        none.

        By default glibc gives the end of its heap back whenever it is free, and takes it again. The system writes zeros
        over each page that comes: a seventh of an update of 135 million parameters. The heap does not shrink any more,
        and has gaps: it may become larger than the tensors that lived at the same time."""
        set_by_user = variables_named((*_VARIABLES, _TUNABLES))
        if _OWN_TUNABLES.search(set_by_user.pop(_TUNABLES, "")) or set_by_user:
            return False
        set_parameter = getattr(ctypes.CDLL(None), "mallopt", None)
        if set_parameter is None:
            return False
        # The one without the other would have every tensor mapped.
        is_set = set_parameter(_MMAP_THRESHOLD, MAPPED_BYTES) or set_parameter(_MMAP_THRESHOLD, LEAST_MAPPED_BYTES)
        return bool(is_set and set_parameter(_TRIM_THRESHOLD, _NEVER))

    def give_back(self) -> None:
        """What is kept and free now goes back to the system, where the C library can. What is needed again comes
        anew."""
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(ctypes.c_size_t(0))

    def make_room(self, wanted: int) -> None:
        """`give_back` where less is left than the bytes that are `wanted` by something else than the allocator. Nothing
        where nobody says what is left."""
        available = self.available_bytes()
        if available is not None and available < wanted:
            self.give_back()

    def release_pages(self, storages: Iterable[UntypedStorage]) -> None:
        """Memory that stays where it is and loses its pages: whole pages go back to the system, and the next touch of
        one finds zeros. Raises OSError.

        vLLM's CPU back end (0.32.0) ignores `sleep`: its KV cache would keep what it was given from the start. The
        addresses must not change, because the engine keeps them."""
        for begin, length in _whole_pages(storages):
            if error := _advise(begin, length, mmap.MADV_DONTNEED):
                raise _cannot_go(length, error)

    def lend_pages(self, storages: Iterable[UntypedStorage]) -> None:
        """Whole pages are the system's whenever it needs memory. A page that is written to before that stays where it
        is, and costs nothing; what others hold is undefined: zeros, or what was there. Raises OSError.

        They count as resident, and with the machine and in a control group as inactive pages of files, which are the
        first to go: also after they were written to, until the kernel looks at them."""
        for begin, length in _whole_pages(storages):
            # Not every kernel knows it, and not every sandbox lets it through.
            if _advise(begin, length, mmap.MADV_FREE) and (error := _advise(begin, length, mmap.MADV_DONTNEED)):
                raise _cannot_go(length, error)

    def _of_machine(self) -> Iterator[int]:
        text = read_or_empty(self._file_system / "proc/meminfo")
        if found := re.search(r"^MemAvailable:\s*(\d+) kB", text, re.MULTILINE):
            yield int(found[1]) * 1024

    def _of_groups(self) -> Iterator[int]:
        for folder in control_group_folders("memory", self._file_system):
            for limit_file, use_file in _LIMITS:
                limit, used = (read_or_empty(folder / name).strip() for name in (limit_file, use_file))
                if limit.isdecimal() and used.isdecimal():
                    lines = (line.split() for line in read_or_empty(folder / "memory.stat").splitlines())
                    counts = {name: int(count) for name, count in lines}
                    # Version 1 counts the groups below under names of their own.
                    dropped = sum(counts.get(f"total_{name}", counts.get(name, 0)) for name in _CACHED)
                    yield max(0, int(limit) - int(used) + dropped)


HOST_MEMORY = HostMemory()
"""Of this process."""


def _whole_pages(storages: Iterable[UntypedStorage]) -> Iterator[tuple[int, int]]:
    """Addresses and lengths."""
    for storage in storages:
        begin = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (storage.data_ptr() + storage.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > begin:
            yield begin, end - begin


def _advise(begin: int, length: int, advice: int) -> int:
    """madvise(2): 0, or the number of the error."""
    library = ctypes.CDLL(None, use_errno=True)
    failed = library.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), ctypes.c_int(advice))
    return ctypes.get_errno() if failed else 0


def _cannot_go(length: int, number: int) -> OSError:
    return OSError(number, f"{length} bytes of the KV cache cannot be given back: {os.strerror(number)}")
