"""Safe output to the terminal: standard streams may be closed or have a limited encoding (ASCII, Latin-1), and text
from logs or servers may have control characters, which must not reach the terminal."""

from __future__ import annotations

import io
import os
import re
import sys
from typing import IO, TextIO

_TERMINAL_SEQUENCE = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")


def accept_all_characters() -> None:
    """Makes standard output and standard error accept all characters; call it when a program starts.

    Characters that a stream cannot encode (`PYTHONIOENCODING=ascii`, unpaired surrogates) are written as `\\u4e2d`
    instead of raising an error. Output to a closed stream is discarded."""
    _fill_standard_descriptors()
    sys.stdout = _accepting(sys.stdout)
    sys.stderr = _accepting(sys.stderr)


def write_utf8(stream: IO[str], text: str) -> None:
    """Writes text for other programs (YAML, JSON) in UTF-8, whatever encoding the terminal has."""
    if isinstance(stream, io.TextIOWrapper):
        stream.flush()
        stream.buffer.write(text.encode("utf-8", errors="backslashreplace"))
    else:
        stream.write(text)


def discard_output(stream: TextIO) -> None:
    """Sends the rest of the output of a standard stream to the null device, after a write to it has failed (terminal or
    pipe closed, disk full). Otherwise the interpreter tries to write that output again when it exits, and changes the
    exit code."""
    with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), stream.fileno())


def printable(text: str) -> str:
    """The text without terminal sequences such as colours, and with a space for each other character that cannot be
    printed; line breaks stay."""
    plain = _TERMINAL_SEQUENCE.sub("", text.replace("\r\n", "\n"))
    return "".join(letter if letter.isprintable() or letter == "\n" else " " for letter in plain)


def _fill_standard_descriptors() -> None:
    """Opens the null device for each closed descriptor of 0, 1 and 2. Otherwise the next opened file would get the
    lowest free number and become the standard input or output of child processes."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def _accepting(stream: TextIO | None) -> TextIO:
    if stream is None:
        return open(os.devnull, "w", encoding="utf-8", errors="backslashreplace")
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")
    return stream
