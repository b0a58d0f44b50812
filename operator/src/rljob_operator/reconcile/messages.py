"""Texts from outside (logs, errors, the API server) made fit for a condition: printable and bounded."""

from __future__ import annotations

from rljob_api.standard_streams import printable

MAX_LENGTH = 1024
"""Characters of a condition's message, as its schema says."""
_CUT = "... "


def beginning_of(text: str, limit: int = MAX_LENGTH) -> str:
    """At most `limit` characters from the start, printable."""
    text = printable(text).strip()
    return text if len(text) <= limit else text[: limit - len(_CUT)].rstrip() + _CUT.rstrip()


def both_ends_of(text: str, limit: int) -> str:
    """At most `limit` characters, printable: the start, which names what it is about, and the end, which tells why."""
    text = printable(text).strip()
    if len(text) <= limit:
        return text
    start = limit // 3
    return text[:start].rstrip() + " ... " + text[-(limit - start - 5) :].lstrip()


def end_of(text: str, limit: int = MAX_LENGTH) -> str:
    """At most `limit` characters from the end, printable, whole lines where there are any: the end of a log is what
    tells."""
    text = printable(text).strip()
    if len(text) <= limit:
        return text
    kept = text[-(limit - len(_CUT)) :]
    _, newline, whole_lines = kept.partition("\n")
    return _CUT + (whole_lines if newline and whole_lines else kept).lstrip()
