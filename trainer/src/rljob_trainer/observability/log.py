"""Log lines: one format for the whole trainer. Control characters in texts of users or models are escaped, so that they
cannot affect a terminal."""

from __future__ import annotations

import logging
import sys
import time
import unicodedata
from typing import TextIO

from rljob_api.standard_streams import discard_output

MAX_MESSAGE_CHARS = 4000
"""The end of a longer message is removed, so that a model's output cannot fill the log."""

_LOGGER_NAME = "rljob_trainer"


def printable(text: str, max_chars: int, *, keep_newlines: bool = False) -> str:
    """Returns `text` with control characters, direction marks and lone surrogates as escapes, truncated at `max_chars`.

    A newline becomes `\\n` unless `keep_newlines`. A truncated text ends with the number of removed characters.
    """
    shown = text[:max_chars]
    escaped = "".join(_escape(character, keep_newlines) for character in shown)
    num_cut = len(text) - len(shown)
    return f"{escaped}... ({num_cut} more characters)" if num_cut else escaped


class PrintableFormatter(logging.Formatter):
    """`12:00:00 INFO controller: message`, in UTC, with the whole line (traceback included) made printable."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: ARG002 - logging's own
        """Time of day in UTC."""
        return time.strftime("%H:%M:%S", time.gmtime(record.created))

    def format(self, record: logging.LogRecord) -> str:
        """The line for one record."""
        return printable(super().format(record), MAX_MESSAGE_CHARS, keep_newlines=True)


def set_up_logging(level: int = logging.INFO, stream: TextIO | None = None) -> logging.Logger:
    """Sends the trainer's log lines to `stream` (standard error by default). A second call replaces the handler."""
    logger = logging.getLogger(_LOGGER_NAME)
    handler = logging.StreamHandler(stream if stream is not None else _CurrentStandardError())
    handler.setFormatter(PrintableFormatter())
    logger.handlers[:] = [handler]
    logger.setLevel(level)
    logger.propagate = False
    return logger


class _CurrentStandardError:
    """Looks up sys.stderr for each line: while a progress bar is shown, rich replaces it with a proxy that prints above
    the bar. Lines are lost if they cannot be written (terminal closed, disk full)."""

    def write(self, text: str) -> int:
        try:
            return sys.stderr.write(text)
        except OSError:
            discard_output(sys.__stderr__ or sys.stderr)
            return len(text)

    def flush(self) -> None:
        try:
            sys.stderr.flush()
        except OSError:
            discard_output(sys.__stderr__ or sys.stderr)


def _escape(character: str, keep_newlines: bool) -> str:
    if character == "\n" and keep_newlines:
        return character
    # Cc control, Cf format (direction marks, zero width), Cs surrogates, Co private use, Zl and Zp line separators
    if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp"):
        return character.encode("unicode_escape").decode("ascii")
    return character
