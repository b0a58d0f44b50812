"""The interface of tool parsers, which find the tool calls in the text of an assistant's turn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class FoundCall:
    """A tool call as the parser has found it. It can still be unusable."""

    name: str
    arguments: str
    """JSON text."""


@dataclass(frozen=True)
class FoundCalls:
    """The tool calls of a turn, and its other text."""

    content: str
    calls: tuple[FoundCall, ...]


class ToolParser(Protocol):
    """Finds the tool calls in texts."""

    def find_calls(self, text: str) -> FoundCalls:
        """Returns the calls in an assistant's turn; none if it has none, or if a call is broken. `text` contains
        special tokens. Any type of exception is possible, because a parser can fail at any text."""
        ...
