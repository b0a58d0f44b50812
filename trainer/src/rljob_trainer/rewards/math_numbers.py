"""Reads numbers: decimals with separators and exponents, fractions, mixed numbers, repeating decimals."""

from __future__ import annotations

import re
from fractions import Fraction

MAX_DIGITS = 1000
"""Longer numbers, and powers of ten beyond it, are left to sympy and the time limit."""

# Numbers as they are written; each pattern is matched at the place where a number begins.
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


def read_number(text: str, start: int) -> tuple[Fraction, bool, int] | None:
    """The number at `start`, whether it is exact, and where it ends."""
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
            (above, is_above_exact), (below, is_below_exact) = (_decimal(each) for each in match.groups() if each)
            return (above / below, is_above_exact and is_below_exact, match.end()) if below else None
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
