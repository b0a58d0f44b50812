"""Checks whether a value of a dataset can be a mathematical answer, without parsing it.

The check of the data before a run and `MathAnswer` share this rule: strings and finite numbers may be answers, but not
strings that are empty or stand for a missing value. sympy would parse some strings for missing values as symbols (`N/A`
as N divided by A).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from rljob_trainer.rewards.base import excerpt

GSM8K_MARK = "####"
"""Solutions in GSM8K's form end with this mark and the answer."""
MISSING_VALUES = frozenset({"n/a", "#n/a", "n.a", "n.a.", "<na>", "nan", "none", "null", "nil"})
"""How files spell a missing value, in lower case. `NA` is not among them: it may be the product of n and a."""
PLACEHOLDER = re.compile(r"[-\u2013\u2014\u2212?_.\u2026*\s]+")
"""Dashes, question marks and dots alone, such as `-`, `??` and `...`."""
IGNORED_AROUND = " \t\r\n$\"'`"
"""Characters around a value that are ignored when it is compared with MISSING_VALUES and PLACEHOLDER."""
MAX_VALUE_CHARACTERS = 80


def why_unusable(answer: object) -> str | None:
    """The reason why a value cannot be a mathematical answer, with the value seen; None if it may be one.

    The reason continues the sentence "the answer is ...". In a solution in GSM8K's form, only the part after the last
    `####` counts. Example: `why_unusable("N/A")` is "the string 'N/A', which stands for a missing value".
    """
    match answer:
        case None:
            return "null"
        case bool():
            return f"the truth value {str(answer).lower()}"
        case int():
            return None
        case float():
            return None if math.isfinite(answer) else f"the number {answer}, which is not finite"
        case str():
            return _why_unusable_string(answer)
        case Mapping():
            keys = excerpt(", ".join(map(str, answer)), MAX_VALUE_CHARACTERS)
            return f"a dictionary with the keys {keys} ({_seen(answer)})"
        case list() | tuple():
            return f"a list ({_seen(answer)})"
    return f"of type {type(answer).__name__} ({_seen(answer)})"


def _why_unusable_string(answer: str) -> str | None:
    value = answer.rpartition(GSM8K_MARK)[2].strip(IGNORED_AROUND)
    if not value:
        where = f" after the last {GSM8K_MARK}" if GSM8K_MARK in answer else ""
        return f"the string {_seen(answer)}, which is empty{where}"
    if value.lower() in MISSING_VALUES or PLACEHOLDER.fullmatch(value):
        return f"the string {_seen(answer)}, which stands for a missing value"
    return None


def _seen(value: object) -> str:
    return excerpt(repr(value), MAX_VALUE_CHARACTERS)
