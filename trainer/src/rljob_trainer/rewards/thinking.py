"""What a model writes before its answer: `<think>...</think>`, of which rewards of this package score nothing."""

from __future__ import annotations

BEGIN, END = "<think>", "</think>"


def without_thinking(response: str) -> str:
    """What stands behind the last `</think>`; nothing where a `<think>` behind it does not end."""
    said = response.rpartition(END)[2]
    return "" if BEGIN in said else said
