"""Files that somebody else's code makes larger, such as a download: whether it gets further is seen in them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rljob_trainer.observability.activity import ACTIVITY, LOOK_SECONDS

GrowthTold = Callable[[int], None]
"""Is told how many bytes there are."""

BLOCK_BYTES = 512
"""The unit of `st_blocks`, whatever the file system."""


@contextmanager
def watched_growth(folder: Path, told: GrowthTold, look_seconds: float = LOOK_SECONDS) -> Iterator[None]:
    """While it lasts, `told` is called, by a thread, whenever there are more bytes below `folder` than ever before: not
    where nothing comes any more, nor where what was there is written again."""
    done = threading.Event()

    # Before anybody writes there.
    at_first = _bytes_below(folder)

    def look() -> None:
        most_size, most_space = at_first
        while not done.wait(look_seconds):
            size, space = _bytes_below(folder)
            # Some writers reserve a file's size before they fill it; some file systems do not say what is filled.
            if size > most_size or space > most_space:
                told(space or size)
            most_size, most_space = max(most_size, size), max(most_space, space)

    thread = threading.Thread(target=look, name="watched-growth", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def tell_downloaded(num_bytes: int) -> None:
    """To whoever looks at this worker's activity."""
    ACTIVITY.tell("MB are downloaded", num_bytes // 10**6)


def _bytes_below(folder: Path) -> tuple[int, int]:
    """Sizes of all files, and what they take on the disk."""
    size = space = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            # Files of a download are renamed when they are complete.
            with suppress(OSError):
                found = os.lstat(os.path.join(parent, name))
                size += found.st_size
                space += found.st_blocks * BLOCK_BYTES
    return size, space
