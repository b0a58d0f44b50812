"""Compares a message by the facts in it, so that rewording the message breaks no test."""

from __future__ import annotations

import re
from collections.abc import Sequence


class Mentions:
    """Equal to every string that contains all parts as whole words, and none of `without`.

    Example: `Mentions("spec.pools", "seen: 3")`. "10 steps" is not found in "110 steps". Parts are facts (a path, a
    name, a value) or the one word of advice that matters, not sentences.
    """

    def __init__(self, *parts: str, without: Sequence[str] = ()) -> None:
        self._parts, self._without = parts, without

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, str):
            return False
        return all(_mentions(other, part) for part in self._parts) and not any(
            _mentions(other, part) for part in self._without
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        without = [f"without={list(self._without)}"] if self._without else []
        return f"Mentions({', '.join([*map(repr, self._parts), *without])})"


def _mentions(text: str, part: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(part)}(?!\w)", text) is not None
