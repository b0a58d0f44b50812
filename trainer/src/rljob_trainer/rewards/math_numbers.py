"""Parses numbers: decimals with separators and exponents, fractions, mixed numbers, repeating decimals."""

from __future__ import annotations

import re
from fractions import Fraction

MAX_DIGITS = 1000
"""Longer numbers and larger powers of ten are left to sympy, with the time limit of the process."""

# Spellings of numbers, each matched at the position where a number begins. From _PLAIN on: `1,234.5e3`, `3 / 4`,
# `\frac{3}{4}`, `1 1/2`, `2 \times 10^3`, `3rd`, `0.1\overline{6}` and `0.333...`.
_DIGITS = r"(?:[1-9]\d{0,2}(?:[, ]\d{3})+(?!\d)|\d+)"
_NUMBER = rf"(?:{_DIGITS}(?:\.\d*)?|\.\d+)"
_EXPONENT = r"(?:[eE][-+]?\d{1,4})"
_PLAIN = re.compile(rf"({_NUMBER})({_EXPONENT}?)(?![\d.]*\d)")
_RATIO = re.compile(rf"({_NUMBER})\s*/\s*({_NUMBER})(?![\d.])")
_FRAC = re.compile(rf"\\frac\s*(?:\{{\s*(-?\s*{_NUMBER})\s*\}}|(\d))\s*(?:\{{\s*({_NUMBER})\s*\}}|(\d))")
_MIXED = re.compile(r"(\d+)\s+(\d+)\s*/\s*(\d+)(?![\d.])|(\d+)\s*\\frac\s*\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\}")
_SCIENTIFIC = re.compile(
    rf"(?:({_NUMBER})\s*(?:\\times|\\cdot|\*|x)\s*)?10\s*(?:\^|\*\*)\s*(?:\{{\s*([-+]?\d{{1,4}})\s*\}}|(-?\d{{1,4}}))"
)
_ORDINAL = re.compile(r"(\d+)(?:st|nd|rd|th)")
_REPEATING = re.compile(r"(\d*)\.(\d*)(?:\\(?:overline|bar|dot)\s*(?:\{(\d+)\}|(\d))|\((\d+)\))")
_ELLIPSIS = re.compile(r"(\d*)\.(\d*?)(\d+?)\3{2,}(?:\.\.\.|\\l?dots|\\cdots)")

# Fractions in words after a number: `3 and a half`, `3 quarters`, `1 half`.
_FRACTIONS = {
    "half": 2,
    "third": 3,
    "quarter": 4,
    "fourth": 4,
    "fifth": 5,
    "sixth": 6,
    "seventh": 7,
    "eighth": 8,
    "ninth": 9,
    "ten-thousandth": 10**4,
    "hundred-thousandth": 10**5,
    "ten-millionth": 10**7,
    "hundred-millionth": 10**8,
    "tenth": 10,
    "twelfth": 12,
    "sixteenth": 16,
    "twentieth": 20,
    "hundredth": 100,
    "thousandth": 1000,
    "millionth": 10**6,
    "billionth": 10**9,
}
_COUNTS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_PART = "halves|" + "|".join(rf"{name}s?" for name in _FRACTIONS)
_TEXT = r"(?:\\text\s{0,3}\{)?"
# ` and a half` and ` quarters`; the groups are the count and the part.
AND_A_FRACTION = rf"\s{{0,3}}{_TEXT}\s{{0,3}}(?:\band|&)\s{{1,3}}(an?|{'|'.join(_COUNTS)}|\d)[\s-]{{1,3}}({_PART})"
IN_FRACTIONS = rf"\s{{0,3}}{_TEXT}\s{{0,3}}\b({_PART})"
_FRACTION_AFTER = re.compile(rf"(?:{AND_A_FRACTION}|{IN_FRACTIONS})(?![A-Za-z-])\s*\}}?", re.ASCII | re.IGNORECASE)


def read_fraction(text: str, start: int, number: Fraction) -> tuple[Fraction, int] | None:
    """Combines a number with the fraction in words at `start`; returns the result and the end position, or None if
    there is no such fraction. Example: 3 and ` quarters` give 3/4."""
    match = _FRACTION_AFTER.match(text, start)
    if not match:
        return None
    count, part = (match[1] or "").lower(), (match[2] or match[3]).lower()
    denominator = _FRACTIONS["half" if part == "halves" else part.removesuffix("s")]
    if not count:
        # `5 third graders` is not a fraction.
        return (number / denominator, match.end()) if part.endswith("s") or number == 1 else None
    numerator = int(count) if count.isdigit() else _COUNTS.index(count) + 1 if count in _COUNTS else 1
    return number + Fraction(numerator, denominator), match.end()


def read_number(text: str, start: int) -> tuple[Fraction, bool, int] | None:
    """The number at `start`, whether it is exact, and its end position; None if there is no number."""
    if match := _REPEATING.match(text, start) or _ELLIPSIS.match(text, start):
        groups = match.groups()
        block = next(filter(None, groups[2:]))
        return _repeating(groups[0], groups[1], block), True, match.end()
    if match := _MIXED.match(text, start):
        whole, part, parts = (int(group) for group in match.groups() if group is not None)
        return (whole + Fraction(part, parts), True, match.end()) if parts else None
    if match := _SCIENTIFIC.match(text, start):
        base, power = match[1] or "1", int(match[2] or match[3])
        if abs(power) > MAX_DIGITS:
            return None
        number, is_exact = _decimal(base)
        return number * Fraction(10) ** power, is_exact, match.end()
    for pattern in (_FRAC, _RATIO):
        if match := pattern.match(text, start):
            parsed = [_decimal(each) for each in match.groups() if each]
            (numerator, _), (denominator, _) = parsed
            are_exact = all(is_exact for _, is_exact in parsed)
            return (numerator / denominator, are_exact, match.end()) if denominator else None
    if match := _ORDINAL.fullmatch(text, start):
        return Fraction(int(match[1])), True, match.end()
    match = _PLAIN.match(text, start)
    if not match or match.end() - match.start() > MAX_DIGITS:
        return None
    if match[2] and abs(int(match[2][1:])) > MAX_DIGITS:
        return None
    number, is_exact = _decimal(match[1])
    number *= Fraction(10) ** int(match[2][1:]) if match[2] else 1
    return number, is_exact and not match[2], match.end()


def _decimal(text: str) -> tuple[Fraction, bool]:
    plain = re.sub(r"[, ]", "", text)
    return Fraction(plain.rstrip(".") if plain.endswith(".") else plain), "." not in plain.rstrip(".")


def _repeating(whole: str, fixed: str, block: str) -> Fraction:
    """0.1(6) is (16 - 1) / 90."""
    digits = int((whole + fixed + block) or "0") - int((whole + fixed) or "0")
    return Fraction(digits, (10 ** len(block) - 1) * 10 ** len(fixed))
