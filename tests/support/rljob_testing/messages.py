"""Compares a message by what it mentions, so that rewording the message breaks no test."""

from __future__ import annotations


class Mentions:
    """Equal to each string that contains all of these parts, such as `Mentions("spec.pools", "seen: 3")`.

    Parts are facts (a path, a name, a value) or the one word of advice that matters, not sentences.
    """

    def __init__(self, *parts: str) -> None:
        self._parts = parts

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and all(part in other for part in self._parts)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Mentions({', '.join(map(repr, self._parts))})"
