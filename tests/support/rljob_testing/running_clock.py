"""A clock for timeouts that does not count the time in which the machine stands still or is short of cores."""

from __future__ import annotations

import functools
import mmap
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

NUMBER = struct.Struct("d")


class RunningClock:
    """Counts the seconds in which this process runs. If `file` is given, other processes can read the clock from it."""

    def __init__(self, file: Path | None = None) -> None:
        self.seconds = 0.0
        self._lock = threading.Lock()
        self._page: mmap.mmap | None = None
        if file is not None:
            file.write_bytes(NUMBER.pack(0.0))
            self._page = _mapped(file)
        threading.Thread(target=self._tick, daemon=True).start()

    def advance(self, seconds: float) -> None:
        """Advances the clock without waiting."""
        with self._lock:
            self.seconds += seconds
            if self._page is not None:
                NUMBER.pack_into(self._page, 0, self.seconds)

    def _tick(self) -> None:
        while True:
            began = time.monotonic()
            time.sleep(0.1)
            self.advance(min(0.5, time.monotonic() - began))


def clock_in(file: Path) -> Callable[[], float]:
    """Reads the clock of another process."""
    page = _mapped(file)
    return lambda: float(NUMBER.unpack_from(page)[0])


@functools.cache
def clock_of_this_process() -> RunningClock:
    """The clock of this process. Use differences for timeouts."""
    return RunningClock()


def _mapped(file: Path) -> mmap.mmap:
    with file.open("r+b") as opened:
        return mmap.mmap(opened.fileno(), NUMBER.size)
