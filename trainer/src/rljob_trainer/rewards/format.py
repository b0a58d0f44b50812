"""A reward for the form of a response: a regular expression that must match the whole response."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from re import _constants, _parser  # type: ignore[attr-defined]
from typing import Any

from rljob_trainer.errors import ConfigurationError
from rljob_trainer.rewards.base import RewardRequest, Scorer

REPEATS = (_constants.MAX_REPEAT, _constants.MIN_REPEAT, _constants.POSSESSIVE_REPEAT)

Node = tuple[object, Any]
"""An operation and its operands in a pattern parsed by `re`: (LITERAL, 60), (MAX_REPEAT, (0, 1, nodes)). This form
is private to `re` (here of Python 3.11); `test_response_checks.py` fails if another version changes it."""


@dataclass(frozen=True)
class FormatScorer:
    """1 if the pattern matches the whole response without surrounding white space, otherwise 0. `.` also matches line
    breaks. With catastrophic backtracking, the response exceeds its time limit."""

    pattern: str
    where: str
    name: str = "Format"

    def load(self) -> Scorer:
        """Raises ConfigurationError if this Python cannot compile the pattern; the job may have been checked by another
        version of Python."""
        try:
            compiled = re.compile(self.pattern, re.DOTALL)
        except re.error as error:
            raise ConfigurationError(
                f"{self.where}: {self.pattern!r} is not a valid regular expression (Python's `re`): {error}; correct it"
            ) from error

        def score(request: RewardRequest) -> object:
            return compiled.fullmatch(request.response.strip()) is not None

        return score


def first_impossible_part(pattern: str, impossible_part_of: Callable[[str], str | None]) -> str | None:
    """Returns a part of the pattern that no response can contain, so that the pattern never matches; None if none was
    found. For example, a response contains no special token that decoding removes, and no stop string.

    `impossible_part_of` gets a literal string of the pattern, such as `</think><answer>`, and returns the part of it
    that no response can contain, or None. A pattern with alternatives (`a|b`) has such a part only if each alternative
    has one. Literals that ignore the letter case are skipped."""
    parsed = _parser.parse(pattern, re.DOTALL)
    return None if parsed.state.flags & re.IGNORECASE else _first_impossible_part(parsed, impossible_part_of)


def literal_beginning(pattern: str) -> str:
    """The literal string that every match begins with; empty if the pattern does not begin literally."""
    parsed = _parser.parse(pattern, re.DOTALL)
    found = ""
    for operation, operands in () if parsed.state.flags & re.IGNORECASE else _without_groups(parsed):
        if operation is _constants.LITERAL:
            found += chr(operands)
        elif operation is not _constants.AT:
            break
    return found


def _first_impossible_part(nodes: Iterable[Node], impossible_part_of: Callable[[str], str | None]) -> str | None:
    text = ""
    for operation, operands in (*_without_groups(nodes), (None, None)):
        if operation is _constants.LITERAL:
            text += chr(operands)
            continue
        if text and (part := impossible_part_of(text)):
            return part
        text = ""
        found = [_first_impossible_part(each, impossible_part_of) for each in _alternatives(operation, operands)]
        if found and None not in found:
            return found[0]
    return None


def _alternatives(operation: object, operands: Any) -> list[Iterable[Node]]:
    """The parts within a node of which at least one matches whenever the node matches: two for `a|b`, one for `a+`.
    Empty if there are none, as for a literal or for `a*`, which also matches the empty string."""
    if operation in REPEATS:
        minimum, _, nodes = operands
        return [nodes] if minimum else []
    if operation is _constants.BRANCH:
        return list(operands[1])
    if operation is _constants.ASSERT:
        return [operands[1]]
    return [operands] if operation is _constants.ATOMIC_GROUP else []


def _without_groups(nodes: Iterable[Node]) -> Iterator[Node]:
    """The nodes with each group replaced by its content; (None, None) for a group that ignores the letter case."""
    for operation, operands in nodes:
        if operation is not _constants.SUBPATTERN:
            yield operation, operands
        elif operands[1] & re.IGNORECASE:
            yield None, None
        else:
            yield from _without_groups(operands[3])
