"""Texts from elsewhere (logs, errors, an API server), made fit to be shown: they must not steer a terminal."""

from __future__ import annotations

import re

_TERMINAL_SEQUENCE = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")


def printable(text: str) -> str:
    """The text without colours and control characters; lines stay lines."""
    plain = _TERMINAL_SEQUENCE.sub("", text.replace("\r\n", "\n"))
    return "".join(letter if letter.isprintable() or letter == "\n" else " " for letter in plain)
