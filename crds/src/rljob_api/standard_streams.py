"""Texts on the standard output of our programs, which may take few characters (ASCII, Latin-1) or be closed; and texts
from elsewhere (logs, errors, an API server), which must not steer a terminal."""

from __future__ import annotations

import io
import os
import re
import sys
from typing import IO, TextIO

_TERMINAL_SEQUENCE = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")


def accept_all_characters() -> None:
    """Called at a program's start. Characters that standard output and standard error cannot encode
    (`PYTHONIOENCODING=ascii`, unpaired surrogates) are written as `\\u4e2d` and raise no error. Output to a closed
    stream is discarded."""
    _fill_standard_descriptors()
    sys.stdout = _accepting(sys.stdout)
    sys.stderr = _accepting(sys.stderr)


def write_utf8(stream: IO[str], text: str) -> None:
    """Writes what a program will read (YAML, JSON), which is UTF-8 whatever the terminal is."""
    if isinstance(stream, io.TextIOWrapper):
        stream.flush()
        stream.buffer.write(text.encode("utf-8", errors="backslashreplace"))
    else:
        stream.write(text)


def printable(text: str) -> str:
    """The text without colours and control characters; lines stay lines."""
    plain = _TERMINAL_SEQUENCE.sub("", text.replace("\r\n", "\n"))
    return "".join(letter if letter.isprintable() or letter == "\n" else " " for letter in plain)


def _fill_standard_descriptors() -> None:
    """Opens the null device as each of the descriptors 0, 1 and 2 that is closed. A file that is opened gets the lowest
    free number, so without this it would be the standard input or output of child processes."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def _accepting(stream: TextIO | None) -> TextIO:
    if stream is None:
        return open(os.devnull, "w", encoding="utf-8", errors="backslashreplace")
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")
    return stream
