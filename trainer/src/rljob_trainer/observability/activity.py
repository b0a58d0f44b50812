"""How far a worker is in what takes long: one line in a file beside its log.

The controller waits for a call and learns nothing before its end, which may be an hour away. It looks at these files
meanwhile, and says in RunState that the run gets further. A worker that hangs writes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

WRITE_SECONDS = 30.0
"""At most so often a worker writes; there may be a thousand of them on one storage."""
LOOK_SECONDS = 10.0
SUFFIX = ".activity"

Clock = Callable[[], float]
"""Seconds since any fixed moment."""


class Activity:
    """Of this process. `tell` costs next to nothing where nothing is written."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._file: Path | None = None
        self._written_at = clock()

    def write_beside(self, log_file: Path) -> None:
        """Where to write from now on; nowhere before."""
        self._file = log_file.with_suffix(SUFFIX)

    def tell(self, what: str, number: int, of: int | None = None) -> None:
        """So much has been done of it, such as 3 of 8 micro-batches."""
        now = self._clock()
        if self._file is None or now - self._written_at < WRITE_SECONDS:
            return
        self._written_at = now
        # It is for people, and for the stall deadline; no training ends because of it.
        with suppress(OSError):
            self._file.write_text(f"{number} {what}" if of is None else f"{number} of {of} {what}", encoding="utf-8")


ACTIVITY = Activity()
"""Of this process."""


class ActivityWatch:
    """The controller's look at the files of all workers below a folder of logs."""

    def __init__(self, log_folder: Path, got_further: Callable[[str], None], clock: Clock = time.monotonic) -> None:
        """`got_further` is told who has written last, and what."""
        self._log_folder = log_folder
        self._got_further = got_further
        self._clock = clock
        self._looked_at = clock()
        self._newest = self._newest_file()[0]

    def look(self) -> None:
        """Tells where one has got further; looks every `LOOK_SECONDS` at most."""
        now = self._clock()
        if now - self._looked_at < LOOK_SECONDS:
            return
        self._looked_at = now
        written_at, file = self._newest_file()
        if file is None or written_at == self._newest:
            return
        self._newest = written_at
        with suppress(OSError):
            self._got_further(f"{file.stem}: {file.read_text(encoding='utf-8', errors='replace')[:100]}")

    def _newest_file(self) -> tuple[int, Path | None]:
        newest: tuple[int, Path | None] = (0, None)
        with suppress(OSError):
            for pattern in (f"*{SUFFIX}", f"*/*{SUFFIX}"):
                for file in self._log_folder.glob(pattern):
                    written_at = file.stat().st_mtime_ns
                    if written_at > newest[0]:
                        newest = (written_at, file)
        return newest
