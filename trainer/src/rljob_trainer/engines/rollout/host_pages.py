"""Memory of the host that stays where it is and loses its pages.

vLLM's CPU back end (0.32.0) ignores `sleep`: its KV cache would keep what it was given from the start. The addresses
must not change, because the engine keeps them.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable, Iterator

from torch import UntypedStorage


def release_pages(storages: Iterable[UntypedStorage]) -> None:
    """Gives whole pages back to the system; the next touch of one finds zeros. Raises OSError."""
    for begin, length in _whole_pages(storages):
        if error := _advise(begin, length, mmap.MADV_DONTNEED):
            raise _cannot_go(length, error)


def lend_pages(storages: Iterable[UntypedStorage]) -> None:
    """Whole pages are the system's whenever it needs memory. A page that is written to before that stays where it is,
    and costs nothing; what others hold is undefined: zeros, or what was there. Raises OSError.

    They count as resident, and with the machine and in a control group as inactive pages of files, which are the first
    to go: also after they were written to, until the kernel looks at them."""
    for begin, length in _whole_pages(storages):
        # Not every kernel knows it, and not every sandbox lets it through.
        if _advise(begin, length, mmap.MADV_FREE) and (error := _advise(begin, length, mmap.MADV_DONTNEED)):
            raise _cannot_go(length, error)


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
