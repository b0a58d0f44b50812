"""Memory of the host that stays where it is and loses its pages.

vLLM's CPU back end (0.32.0) ignores `sleep`: its KV cache would keep what it was given from the start. The addresses
must not change, because the engine keeps them.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable

from torch import UntypedStorage


def release_pages(storages: Iterable[UntypedStorage]) -> None:
    """Gives whole pages back to the system; the next touch of one finds zeros. Raises OSError."""
    library = ctypes.CDLL(None, use_errno=True)
    for storage in storages:
        begin = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (storage.data_ptr() + storage.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE
        if end <= begin:
            continue
        if library.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), ctypes.c_int(mmap.MADV_DONTNEED)):
            number = ctypes.get_errno()
            raise OSError(number, f"{end - begin} bytes of the KV cache cannot be given back: {os.strerror(number)}")
