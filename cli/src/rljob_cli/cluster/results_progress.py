"""Shows the progress of a copy: a bar on a terminal, otherwise a line now and then."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.text import Text

from rljob.plain_text import bytes_text
from rljob.polling import Clock

LINE_SECONDS = 10.0
"""Without a terminal: a line at most this often."""


class ShownProgress:
    """Prints the progress of copies (a context manager). Notes are printed on their own lines."""

    def __init__(self, console: Console, clock: Clock, *, is_quiet: bool = False) -> None:
        self._console = console
        self._clock = clock
        self._is_quiet = is_quiet
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True))
        self._bar = Progress(*columns, TransferSpeedColumn(), TimeRemainingColumn(), console=console, transient=True)
        self._task = self._bar.add_task("", total=None, visible=False)
        self._done = self._total = 0
        self._printed_at = clock.now()

    def __enter__(self) -> ShownProgress:
        if self._console.is_terminal and not self._is_quiet:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        # Without a terminal, `stop` would print an empty line.
        if self._bar.live.is_started:
            self._bar.stop()

    def plan(self, num_files: int, num_bytes: int) -> None:
        """The copy has this many files and bytes."""
        self._total = num_bytes
        files = "1 file" if num_files == 1 else f"{num_files} files"
        self._bar.update(self._task, description=files, total=num_bytes, visible=num_bytes > 0)

    def advance(self, num_bytes: int) -> None:
        """More bytes are there."""
        self._done += num_bytes
        self._bar.advance(self._task, num_bytes)
        if self._console.is_terminal or self._is_quiet:
            return
        now = self._clock.now()
        if (now - self._printed_at).total_seconds() >= LINE_SECONDS:
            self._printed_at = now
            self.note(f"{bytes_text(self._done)} of {bytes_text(self._total)}")

    def note(self, text: str) -> None:
        """Prints a line."""
        self._console.print(Text(text, "dim"), soft_wrap=True)
