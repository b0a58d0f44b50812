"""Progress of long calls: each worker writes one line into a file next to its log.

A call of the controller may take an hour and returns nothing before its end. In the meantime the controller polls these
files and reports in RunState that the run makes progress. A worker that hangs writes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

WRITE_SECONDS = 30.0
"""Minimum time between two writes of a worker; a thousand workers may share one storage."""
POLL_SECONDS = 10.0
"""Minimum time between two polls of the controller."""
SUFFIX = ".activity"

Clock = Callable[[], float]
"""Seconds since any fixed moment."""


class Activity:
    """The progress of this process. `report_activity` is cheap if nothing needs to be written."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._file: Path | None = None
        self._written_at = clock()

    def write_beside(self, log_file: Path) -> None:
        """Sets the file to write to: next to `log_file`. Before this call nothing is written."""
        self._file = log_file.with_suffix(SUFFIX)

    def report_activity(self, what: str, number: int, of: int | None = None) -> None:
        """Reports progress. Example: `report_activity("micro-batches", 3, of=8)` for 3 of 8 micro-batches. Writes at
        most every WRITE_SECONDS."""
        now = self._clock()
        if self._file is None or now - self._written_at < WRITE_SECONDS:
            return
        self._written_at = now
        # An error here must not end the training: the file only informs people and the stall deadline.
        with suppress(OSError):
            self._file.write_text(f"{number} {what}" if of is None else f"{number} of {of} {what}", encoding="utf-8")


ACTIVITY = Activity()
"""The one instance for this process."""


class ActivityWatch:
    """Polls the activity files of all workers below a log folder, for the controller."""

    def __init__(self, log_folder: Path, report_progress: Callable[[str], None], clock: Clock = time.monotonic) -> None:
        """`report_progress` is called with the name of a worker and its newest line, as `<worker>: <line>`."""
        self._log_folder = log_folder
        self._report_progress = report_progress
        self._clock = clock
        self._polled_at = clock()
        self._newest_written_at = self._newest_file()[0]

    def poll_files(self) -> None:
        """Polls the files, at most every `POLL_SECONDS`, and calls `report_progress` with the newest file if it has
        changed."""
        now = self._clock()
        if now - self._polled_at < POLL_SECONDS:
            return
        self._polled_at = now
        written_at, file = self._newest_file()
        if file is None or written_at == self._newest_written_at:
            return
        self._newest_written_at = written_at
        with suppress(OSError):
            self._report_progress(f"{file.stem}: {file.read_text(encoding='utf-8', errors='replace')[:100]}")

    def _newest_file(self) -> tuple[int, Path | None]:
        """Returns when the newest file was written (nanoseconds), and the file; 0 and None without files."""
        newest: tuple[int, Path | None] = (0, None)
        with suppress(OSError):
            for pattern in (f"*{SUFFIX}", f"*/*{SUFFIX}"):
                for file in self._log_folder.glob(pattern):
                    written_at = file.stat().st_mtime_ns
                    if written_at > newest[0]:
                        newest = (written_at, file)
        return newest
