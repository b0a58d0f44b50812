"""Detects progress of a library that writes files, such as a download, by their growing size."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rljob_trainer.observability.activity import ACTIVITY, POLL_SECONDS

OnGrowth = Callable[[int], None]
"""Called with the number of bytes that a folder has now."""

BLOCK_BYTES = 512
"""The unit of `st_blocks` on every file system."""


@contextmanager
def watched_growth(folder: Path, on_growth: OnGrowth, poll_seconds: float = POLL_SECONDS) -> Iterator[None]:
    """During the block, a thread calls `on_growth` whenever it finds more bytes below `folder` than it ever has since
    the block began. There is no call if nothing is written, or if only existing data is written again."""
    done = threading.Event()

    # Counted before the block writes anything.
    at_first = _bytes_below(folder)

    def poll() -> None:
        most_size, most_space = at_first
        while not done.wait(poll_seconds):
            size, space = _bytes_below(folder)
            # Both count: the used space, because some programs first create a file with its full size; and the size,
            # because some file systems do not report the used space.
            if size > most_size or space > most_space:
                on_growth(space or size)
            most_size, most_space = max(most_size, size), max(most_space, space)

    thread = threading.Thread(target=poll, name="watched-growth", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def report_downloaded(num_bytes: int) -> None:
    """Reports a download as the activity of this worker."""
    ACTIVITY.report_activity("MB downloaded", num_bytes // 10**6)


def _bytes_below(folder: Path) -> tuple[int, int]:
    """Returns the total size of all files, and the space that they use on the disk."""
    size = space = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            # A file may no longer exist: a download renames its files when they are complete.
            with suppress(OSError):
                found = os.lstat(os.path.join(parent, name))
                size += found.st_size
                space += found.st_blocks * BLOCK_BYTES
    return size, space
