"""Parses one answer: a number with its unit, a date, a choice, a list of answers, words, or an expression."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import date
from fractions import Fraction
from functools import lru_cache

from rljob_trainer.rewards.math_numbers import read_fraction, read_number
from rljob_trainer.rewards.math_text import (
    TEXT_COMMANDS,
    plain_characters,
    plain_latex,
    split_outside_brackets,
    undecorated,
)
from rljob_trainer.rewards.math_units import BASE, CURRENCIES, MAGNITUDES, is_conversion, is_known_unit, read_unit

MAX_WORDS = 6
MAX_DEPTH = 20
"""The maximum depth of nested brackets."""
MAX_VALUE_CHARACTERS = 1000
"""A longer text is not parsed: it is not a single value."""


@dataclass(frozen=True)
class Quantity:
    """A number with an optional unit after it or currency before it."""

    number: Fraction
    is_exact: bool
    """True for integers and fractions, False for a number with a decimal point or an exponent."""
    unit: str = ""


@dataclass(frozen=True)
class Moment:
    """A date (year, month, day) or a time of the day (hour, minute, second)."""

    kind: str
    """`date` or `time`."""
    parts: tuple[int, ...]


@dataclass(frozen=True)
class Choice:
    """A letter of a multiple-choice question, with the text after it: `(B) 12`."""

    letter: str
    rest: str = ""


@dataclass(frozen=True)
class Listing:
    """Several answers. `opening` and `closing` are their brackets; both are empty for `1, 2` and `1 or 2`."""

    items: tuple[Value, ...]
    opening: str
    closing: str
    text: str
    """The listing as LaTeX, because `(1, 2)` may also be an interval."""


@dataclass(frozen=True)
class Assignment:
    """`x = 5`. `text` is the whole assignment as LaTeX, because it may also be an equation."""

    variable: str
    value: Value
    text: str


@dataclass(frozen=True)
class Words:
    """An answer without mathematics, such as `Tuesday`, in lower case."""

    text: str


@dataclass(frozen=True)
class Expression:
    """LaTeX that sympy must parse."""

    text: str


Value = Quantity | Moment | Choice | Listing | Assignment | Words | Expression

_SIGN = re.compile(r"\s*(?:([-+])|(?:\\text\s*\{\s*)?\b(negative|minus)\b\s*\}?)\s*", re.ASCII | re.IGNORECASE)
_MAGNITUDE = re.compile(
    rf"\s*(?:\\text\s*\{{\s*)?({'|'.join(MAGNITUDES)})s?(?![A-Za-z])\s*\}}?", re.ASCII | re.IGNORECASE
)
_CURRENCY = re.compile("|".join(re.escape(currency) for currency in CURRENCIES))

_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_MONTH = r"(jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*\.?"
_ISO_DATE = re.compile(r"(\d{4})[-/.](\d{1,2})[-/.](\d{1,2})")
_CJK_DATE = re.compile(r"(\d{4})\s*年\s*(\d{1,2})\s*月\s*(\d{1,2})\s*日")
_DAY_MONTH = re.compile(rf"(\d{{1,2}})(?:st|nd|rd|th)?\s+(?:of\s+)?{_MONTH},?\s+(\d{{4}})", re.ASCII | re.IGNORECASE)
_MONTH_DAY = re.compile(rf"{_MONTH}\s+(\d{{1,2}})(?:st|nd|rd|th)?,?\s+(\d{{4}})", re.ASCII | re.IGNORECASE)
_TIME = re.compile(r"(\d{1,2}):(\d{2})(?::(\d{2}))?\s*([ap])?\.?(?(4)m)\.?", re.ASCII | re.IGNORECASE)
_RATIO_OF_TWO = re.compile(r"(\d+(?:\.\d+)?)\s*:\s*(\d+(?:\.\d+)?)")

# `C`, `(c)`, `[C]`, `C)`, `option C`, `\\text{C}`.
_CHOICE = re.compile(
    r"(?:(?:option|choice|answer|letter)\s*)?(?:([A-J])|\(\s*([A-Ja-j])\s*\)|\[\s*([A-J])\s*\]|([A-J])\s*\))",
    re.ASCII | re.IGNORECASE,
)
_CHOICE_IN_FONT = re.compile(rf"^\\(?:{TEXT_COMMANDS})\s*\{{\s*(\(?[A-J][).:]?)\s*\}}")
_ANOTHER_CHOICE = re.compile(r"\s*(?:and\b|or\b|,|&|/)?\s*\(?[A-J]\)?(?:\W|$)")
_AFTER_CHOICE = re.compile(r"\s*[).:,]\s*|\s*$|\s+(?=[\d$\\(])")
_SEPARATOR = re.compile(
    r",(?!\d{3}(?!\d))\s*(?:and\b|or\b)?|;|\s(?:and|or)\s|,(?=\d{3},\d{1,2}(?!\d))", re.ASCII | re.IGNORECASE
)
_SEPARATOR_IN_BRACKETS = re.compile(r",\s*(?:and\b|or\b)?|;|\s(?:and|or)\s", re.ASCII | re.IGNORECASE)
_UNIT_AT_THE_END = re.compile(
    rf"(?<=\S)(?:\s*\\(?:{TEXT_COMMANDS})\s*\{{[^{{}}]*\}}(?:\^\{{?[23]\}}?)?|\s[A-Za-z/]{{2,}}(?:\^\{{?[23]\}}?)?)$"
)
_IMPLIES = re.compile(r"\\(?:implies|Rightarrow|Longrightarrow|therefore)(?![A-Za-z])")
_LINES = re.compile(r"\\(?:begin|end)\s*\{(?:align|aligned|gather|gathered|split|eqnarray)\*?\}")
_EQUALS = re.compile(r"(?<![<>!:=\\])=(?!=)")
# Names of an answer on the left of `=`: `x`, `AB`, `total`, `x_1`, `f(2)`, `|z|`, `\\angle B`, `\\cos A`.
_VARIABLE = re.compile(
    r"(?:\\[A-Za-z]+|[A-Za-z]|[A-Z]{2,}|[A-Za-z]{3,})(?:_(?:\w|\{\w+\}))?(?:\s*\([^()]*\))?'?"
    r"|[a-z](?:\s*\+\s*[a-z])+|\\overline\s*\{[A-Z]+\}|\|[^|=]*\||m?\s*\\angle\s*[A-Z]{1,3}|\\(?:sin|cos|tan)\s*\(?(?:[A-Z]|\\[a-z]+)\)?"
)
_NO_SIDE = re.compile(r"\\(?:ne|not|neg|lnot|pm|mp|le|ge|lt|gt|approx|times|cdot|div)|not", re.ASCII | re.IGNORECASE)
_SET_BUILDER = re.compile(r"\\\{\s*[a-zA-Z]\s*(?:\\mid\b|\\vert\b|\||:)\s*(.+?)\s*\\\}", re.DOTALL)
_BASE = re.compile(r"\s*(?:_\s*\{?\s*(\d+)\s*\}?|\\pmod\s*\{?\s*(\d+)\s*\}?|\(\s*\\?mod\s*(\d+)\s*\)|\\?mod\s*(\d+))")
_WORDS_ONLY = re.compile(r"[^\W\d_]+(?:[ '\-/.]+[^\W\d_]+)*")
_COMMAND = re.compile(r"\\(?:text|mathrm|operatorname|mathbf|mathbb|mathcal|begin|end)\s*\*?\s*\{[^{}]*\}|\\[A-Za-z]+")
_FUNCTION = re.compile(
    r"\b(?:sqrt|sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|log|ln|exp|pi|min|max|gcd|lcm|mod|infinity|inf)\b"
)
_OTHER_SCRIPT = re.compile(r"[\u0400-\u1fff\u3040-\ud7ff]")
_SENTENCE_WORD = re.compile(
    r"\b(?:so|is|if|as|we|it|by|to|in|of|get|the|thus|then|are|was|be|an|at|on|no|not|he|she|has|had|for|and|or)\b",
    re.ASCII | re.IGNORECASE,
)
_LONG_WORD = re.compile(r"[^\W\d_]{4,}|\b[^\W\d_]{2,}\s+[^\W\d_]{2,}\b")


@lru_cache(maxsize=4096)
def read_value(text: str, *, is_choice: bool = False) -> Value | None:
    """Parses the whole text as one value; None if it is not a value, for example a sentence with numbers in it.

    With `is_choice`, a letter from A to J, alone or followed by text, is a choice: `(B)`, `E: 12`.
    """
    if len(text) > 2 * MAX_VALUE_CHARACTERS:
        return None
    text = re.sub(r"(?<=\d)\s+:\s+(?=\d)", ":", _in_one_spelling(text))
    if not text or len(text) > MAX_VALUE_CHARACTERS:
        return None
    if _bracket_depth(text) > MAX_DEPTH:
        return None
    if is_choice and (choice := _choice(text)):
        return choice
    text = _last_step(text)
    if match := _SET_BUILDER.fullmatch(text):
        text = match[1]
    return _moment(text) or _quantity(text) or _listing(text) or _equation(text) or _words(text) or _expression(text)


def _last_step(text: str) -> str:
    """The last step of a derivation: `x = 5` of `2x = 10 \\implies x = 5`, or the last line of an `align`
    environment."""
    if _LINES.search(text):
        rows = [row.replace("&", "").strip() for row in _LINES.sub("", text).split(r"\\")]
        text = next((row for row in reversed(rows) if row), "")
    return undecorated(_IMPLIES.split(text)[-1].removeprefix(r"\approx"))


def is_choice_letter(text: str) -> bool:
    """Whether a row's answer is a choice: a letter from A to J, alone, in parentheses, or before `)`, `.` or `:`."""
    text = _plain_choice(_in_one_spelling(text))
    return re.fullmatch(r"\(?[A-J]\)?|[A-J][):.]\s*\S.*|\([A-J]\)\s*\S.*", text, re.DOTALL) is not None


def _in_one_spelling(text: str) -> str:
    return undecorated(plain_latex(undecorated(plain_characters(text))))


def _plain_choice(text: str) -> str:
    """`\\textbf{(B) }12` is `(B) 12`."""
    return _CHOICE_IN_FONT.sub(r"\1 ", text, count=1).strip()


def _choice(text: str) -> Choice | None:
    text = _plain_choice(text)
    match = _CHOICE.match(text)
    if not match or not (after := _AFTER_CHOICE.match(text, match.end())):
        return None
    if _ANOTHER_CHOICE.match(text, after.end()):
        return None
    letter = next(filter(None, match.groups()))
    if letter.islower() and not match[2] and len(text) > 1:
        return None
    return Choice(letter.upper(), text[after.end() :].strip())


def _moment(text: str) -> Moment | None:
    for pattern, order in (
        (_ISO_DATE, (0, 1, 2)),
        (_CJK_DATE, (0, 1, 2)),
        (_DAY_MONTH, (2, 1, 0)),
        (_MONTH_DAY, (2, 0, 1)),
    ):
        if match := pattern.fullmatch(text):
            numbers = [_month(group) for group in match.groups()]
            try:
                day = date(*(numbers[index] for index in order))
            except ValueError:
                return None
            return Moment("date", (day.year, day.month, day.day))
    if match := _TIME.fullmatch(_plain_words(text)):
        hour, minute, second = int(match[1]), int(match[2]), int(match[3] or 0)
        if match[4]:
            hour = hour % 12 + (12 if match[4].lower() == "p" else 0)
        if hour < 24 and minute < 60 and second < 60:
            return Moment("time", (hour, minute, second))
    return None


def _month(text: str) -> int:
    return int(text) if text.isdigit() else _MONTHS.index(text.lower()) + 1


def _quantity(text: str) -> Quantity | None:
    position, sign, unit, has_sign = 0, 1, "", False
    for _ in range(3):  # a sign may be before or after a currency
        if match := _SIGN.match(text, position):
            if has_sign:
                return None
            sign, position, has_sign = (1 if match[1] == "+" else -1), match.end(), True
        elif match := _CURRENCY.match(text, position):
            if unit:
                return None
            unit, position = read_unit(f" {match[0]}") or match[0], match.end()
            position += len(text) - position - len(text[position:].lstrip())
    found = read_number(text, position)
    if found is None:
        return None
    number, is_exact, position = found
    number, position = _with_words(text, position, number)
    rest = text[position:]
    if match := _BASE.fullmatch(rest):
        rest, unit = "", BASE + match[1] if match[1] else "modulo"
        # `12 mod 7` is 5; `12 \\pmod 7` and `12 (mod 7)` are congruence classes.
        if match[4] and is_exact and int(match[4]) and number >= int(match[4]):
            number %= int(match[4])
    if rest.strip():
        after = read_unit(rest)
        if after is None or (unit and after != unit):
            return None
        unit = after
    return Quantity(sign * number, is_exact, unit)


def _with_words(text: str, position: int, number: Fraction) -> tuple[Fraction, int]:
    """Applies the words after a number that change it, such as `3 and a half million` and `5 tenths`; returns the
    number and the end position."""
    while True:
        if fraction := read_fraction(text, position, number):
            number, position = fraction
        elif match := _MAGNITUDE.match(text, position):
            number, position = number * MAGNITUDES[match[1].lower()], match.end()
        else:
            return number, position


def _listing(text: str) -> Listing | None:
    opening, closing, inner = "", "", text
    for left, right in ((r"\{", r"\}"), ("(", ")"), ("[", "]"), ("(", "]"), ("[", ")"), ("{", "}")):
        if text.startswith(left) and text.endswith(right) and _is_one_pair(text, left, right):
            opening, closing, inner = left[-1], right[-1], text[len(left) : len(text) - len(right)]
            break
    separator = _SEPARATOR_IN_BRACKETS if opening else _SEPARATOR
    parts = [part.strip() for part in split_outside_brackets(inner, separator)]
    if len(parts) == 1:
        if not opening:
            return None
        only = read_value(inner)
        if only is None or isinstance(only, Words | Expression) or opening + closing in ("(]", "[)"):
            return None
        return Listing((only,), opening, closing, text)
    items = [read_value(part) for part in parts if part]
    if len(items) < 2 or any(item is None for item in items):
        return None
    num_words = sum(isinstance(item, Words) for item in items)
    if num_words and (not opening or num_words < len(items)):
        return None  # a part of a sentence, such as `18, I think`
    return Listing(tuple(item for item in items if item is not None), opening, closing, text)


def _bracket_depth(text: str) -> int:
    depth = deepest = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    return deepest


def _is_one_pair(text: str, left: str, right: str) -> bool:
    """Whether the bracket at the beginning is closed by the one at the end."""
    depth = 0
    body = text.replace(r"\{", "{").replace(r"\}", "}")
    for index, character in enumerate(body):
        depth += (character in "([{") - (character in ")]}")
        if depth == 0:
            return index == len(body) - 1 and body[0] == left[-1] and body[-1] == right[-1]
    return False


def _equation(text: str) -> Value | None:
    """`x = 5`, or the last part of a chain such as `3 + 15 = 18`."""
    parts = [part.strip() for part in split_outside_brackets(text, _EQUALS)]
    if len(parts) == 1:
        if match := _RATIO_OF_TWO.fullmatch(text):
            denominator = Fraction(match[2])
            is_exact = "." not in text
            return Quantity(Fraction(match[1]) / denominator, is_exact) if denominator else None
        if match := re.match(rf"({_VARIABLE.pattern})\s*\\in\s+(?=\S)", text):
            value = read_value(text[match.end() :])
            return None if value is None else Assignment(match[1], value, text)
        return None
    if not parts[-1]:
        return None
    if len(parts) == 2 and _VARIABLE.fullmatch(parts[1]) and (value := _quantity(parts[0])):
        return Assignment(parts[1], value, text)
    value = read_value(parts[-1])
    if value is None or isinstance(value, Words) or not all(map(_may_be_a_side, parts[:-1])):
        return None
    if any(_is_another_number(_quantity(part), value) for part in parts[:-1]):
        return Expression(text)  # `5 = 4` is false
    if any(_is_converted(_quantity(part), value) for part in parts[:-1]):
        return value  # `1 km = 1000 m`, where `km` and `m` are no variables
    if _VARIABLE.fullmatch(undecorated(parts[0])):
        return Assignment(undecorated(parts[0]), value, text)
    if isinstance(value, Quantity) and not re.search(
        r"(?<![\\A-Za-z])[a-zA-Z]{1,2}(?![A-Za-z])", _COMMAND.sub(" ", parts[0])
    ):
        return value
    return Expression(text) if _is_mathematical(text) else None


def _is_another_number(side: Quantity | None, value: Value) -> bool:
    return (
        side is not None
        and isinstance(value, Quantity)
        and (side.unit == value.unit and side.is_exact and value.is_exact and side.number != value.number)
    )


def _is_converted(side: Quantity | None, value: Value) -> bool:
    return (
        side is not None
        and isinstance(value, Quantity)
        and is_conversion(side.number, side.unit, value.number, value.unit)
    )


def _may_be_a_side(text: str) -> bool:
    """Whether a text may be the left side of `=`: mathematics, a quantity, the name of the answer, or nothing."""
    if _NO_SIDE.fullmatch(text):
        return False
    return not text or _is_mathematical(text) or _quantity(text) is not None or _words(text) is not None


def _words(text: str) -> Words | None:
    text = _plain_words(text)
    if not _WORDS_ONLY.fullmatch(text) or len(text.split()) > MAX_WORDS:
        return None
    # One or two letters are variables, and the names of functions and constants are mathematics.
    if not _SENTENCE_WORD.fullmatch(text) and (
        max(map(len, re.split(r"[ '\-/.]+", text))) < 3 or _FUNCTION.search(text)
    ):
        return None
    return Words(" ".join(text.lower().replace("-", " ").split()))


def _plain_words(text: str) -> str:
    return " ".join(re.sub(r"\\(?:text|textbf|mathrm|operatorname)\s*\{([^{}]*)\}", r" \1 ", text).split()).rstrip(".")


def _expression(text: str) -> Expression | None:
    """The text as an expression, without a known unit after it: `2\\sqrt{3} cm`."""
    if (match := _UNIT_AT_THE_END.search(text)) and (unit := read_unit(match[0])) and is_known_unit(unit):
        text = text[: match.start()].rstrip()
    return Expression(text) if _is_mathematical(text) else None


def _is_mathematical(text: str) -> bool:
    """Whether no words are left after LaTeX commands and names of functions are removed."""
    if "\n\n" in text or "#" in text or "$" in text:
        return False
    left = _FUNCTION.sub(" ", _COMMAND.sub(" ", text))
    is_prose = any(pattern.search(left) for pattern in (_SENTENCE_WORD, _LONG_WORD, _OTHER_SCRIPT))
    return not is_prose and re.search(r"[^\W_]|\\", text) is not None
