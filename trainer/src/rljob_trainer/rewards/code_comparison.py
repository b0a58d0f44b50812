"""Compares the output or the returned value of a response's code with the expected one, outside of the sandbox."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence

RELATIVE_TOLERANCE = 1e-6
ABSOLUTE_TOLERANCE = 1e-9
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")
_INTEGER = re.compile(r"[+-]?\d+")
MAX_NUMBER_CHARACTERS = 400
"""Longer numbers are compared as text."""


def is_expected_output(output: str, expected: str) -> bool:
    """Whether the lines are equal, apart from white space at their ends and empty lines at the end. Lines that differ
    are compared word by word: two numbers, unless both are integers, may differ by 1e-6 of their value."""
    given, wanted = _lines(output), _lines(expected)
    return given == wanted or (len(given) == len(wanted) and all(map(_same_words, given, wanted)))


def is_expected_value(result: bytes, expected: object) -> bool:
    """Whether the JSON in `result` is the expected value. Some datasets put the value into a list of one."""
    try:
        value = json.loads(result)
        return _same_value(value, expected) or (
            isinstance(expected, list) and len(expected) == 1 and _same_value(value, expected[0])
        )
    except (ValueError, RecursionError):
        return False


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _same_words(given: str, wanted: str) -> bool:
    if given == wanted:
        return True
    first, second = given.split(), wanted.split()
    return len(first) == len(second) and all(map(_same_word, first, second))


def _same_word(given: str, wanted: str) -> bool:
    if given == wanted:
        return True
    if max(len(given), len(wanted)) > MAX_NUMBER_CHARACTERS:
        return False
    if not (_NUMBER.fullmatch(given) and _NUMBER.fullmatch(wanted)):
        return False
    if _INTEGER.fullmatch(given) and _INTEGER.fullmatch(wanted):
        return int(given) == int(wanted)
    return _are_close(float(given), float(wanted))


def _same_value(given: object, wanted: object) -> bool:
    if isinstance(given, bool) or isinstance(wanted, bool):
        return given is wanted
    if isinstance(given, float) or isinstance(wanted, float):
        return isinstance(given, int | float) and isinstance(wanted, int | float) and _are_close(given, wanted)
    if isinstance(given, list) and isinstance(wanted, Sequence) and not isinstance(wanted, str):
        return len(given) == len(wanted) and all(map(_same_value, given, wanted))
    if isinstance(given, dict) and isinstance(wanted, dict):
        # The keys of JSON objects are strings.
        keyed = {str(key): value for key, value in wanted.items()}
        return given.keys() == keyed.keys() and all(_same_value(given[key], keyed[key]) for key in given)
    return given == wanted


def _are_close(first: float, second: float) -> bool:
    try:
        return math.isclose(first, second, rel_tol=RELATIVE_TOLERANCE, abs_tol=ABSOLUTE_TOLERANCE)
    except OverflowError:
        # An integer beyond the range of a float.
        return first == second
