"""Compares two answers.

Integers, fractions and symbols are compared exactly. A number with a decimal point or an exponent equals another number
within `RELATIVE_TOLERANCE`; if the other number is exact, the difference must also be less than 0.5. Anything but a
plain number is parsed by math-verify's LaTeX parser and compared by sympy. Expressions with variables are evaluated at
fixed points and at one point that depends on both expressions. They are equal if both are real at the same points and
have the same values there; if there are few such points, sympy simplifies their difference.
This module has no time limit; the process pool has one.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from rljob_trainer.rewards import math_sympy
from rljob_trainer.rewards.math_context import leading_verdict
from rljob_trainer.rewards.math_units import BASE, number_in_base, same_unit
from rljob_trainer.rewards.math_values import (
    Assignment,
    Choice,
    Expression,
    Listing,
    Moment,
    Quantity,
    Value,
    Words,
    read_value,
)

RELATIVE_TOLERANCE = Fraction(1, 10**6)
MAX_DIFFERENCE = Fraction(1, 2)
"""The difference from an exact number must be smaller. Beyond a million, `RELATIVE_TOLERANCE` alone would accept the
next integer."""
MAX_SHORT_WORD = 4
"""Words of up to this many letters may be products of variables: `xyz`."""


def are_equal(expected: Value, given: Value) -> bool:
    """Whether the response's answer (`given`) equals the row's answer (`expected`)."""
    expected, given = _single(expected), _single(given)
    if expected == given or _text(expected) == _text(given) != "":
        return True
    match expected, given:
        case Choice(), _:
            return _is_choice(expected, given)
        case Assignment(), Assignment() if _bare(expected.variable) == _bare(given.variable):
            return are_equal(expected.value, given.value)
        case Assignment(), Assignment():
            return math_sympy.same_expression(expected.text, given.text)
        case Assignment(), Expression():
            return are_equal(expected.value, given) or math_sympy.same_expression(expected.text, given.text)
        case Expression(), Assignment():
            return are_equal(expected, given.value) or math_sympy.same_expression(expected.text, given.text)
        case Assignment(), _:
            return are_equal(expected.value, given)
        case _, Assignment():
            return are_equal(expected, given.value)
        case Quantity(), Quantity():
            return _same_quantity(expected, given)
        case Listing(), Listing():
            return _same_listing(expected, given)
        case Words(), Words():
            return (
                _without_article(expected.text) == _without_article(given.text)
                or expected.text == leading_verdict(given.text)  # `No. The sum is odd.`
                or _same_product(expected, given)
            )
        case Quantity(unit=""), Moment(kind="time", parts=(numerator, denominator, 0)) if denominator:
            return expected.number == Fraction(numerator, denominator)  # `3:10` is a ratio, too
        case (Moment() | Words(), _) | (_, Moment() | Words()):
            return _same_product(expected, given)
        case (Listing(), _) | (_, Listing()):
            return math_sympy.same_set(_alternatives(expected), _alternatives(given))
        case Quantity(), Expression():
            return math_sympy.equals_number(given.text, expected.number, expected.is_exact)
        case Expression(), Quantity():
            return math_sympy.equals_number(expected.text, given.number, given.is_exact)
        case Expression(), Expression():
            return math_sympy.same_expression(expected.text, given.text)
    return False


def same_number(first: Fraction, second: Fraction, *, num_exact: int) -> bool:
    """Whether two numbers are equal. `num_exact` is the number of exact ones: two must be identical; otherwise they
    must agree within `RELATIVE_TOLERANCE`, and differ by less than 0.5 if one is exact."""
    if num_exact == 2 or first == second:
        return first == second
    difference = abs(first - second)
    if num_exact and difference >= MAX_DIFFERENCE:
        return False
    return difference <= RELATIVE_TOLERANCE * max(abs(first), abs(second))


def _single(value: Value) -> Value:
    """`(18)` and `{18}` are 18."""
    while isinstance(value, Listing) and len(value.items) == 1:
        value = value.items[0]
    return value


def _text(value: Value) -> str:
    return _bare(value.text) if isinstance(value, Listing | Assignment | Expression) else ""


def _alternatives(value: Value) -> list[str]:
    """The texts of the alternatives in `x < 1 or x > 2`; for any other value its own text."""
    if isinstance(value, Listing) and not value.opening:
        return [text for item in value.items for text in _alternatives(item)]
    match value:
        case Listing() | Assignment() | Expression():
            return [value.text]
        case Quantity():
            return [str(value.number)]
    return []


def _bare(text: str) -> str:
    """The text without any white space."""
    return "".join(text.split())


def _is_choice(expected: Choice, given: Value) -> bool:
    value = read_value(expected.rest) if expected.rest else None
    if isinstance(given, Choice):
        # `B 13` does not equal `(B) 12`; words after the letter are ignored.
        rest = read_value(given.rest) if given.rest else None
        is_other = isinstance(value, Quantity) and isinstance(rest, Quantity) and not _same_quantity(value, rest)
        return expected.letter == given.letter and not is_other
    return value is not None and are_equal(value, given)


def _same_quantity(first: Quantity, second: Quantity) -> bool:
    """Whether two numbers with units are equal. `first` is the row's answer."""
    num_exact = first.is_exact + second.is_exact
    if second.unit.startswith(BASE) and not first.unit:
        return first.number == number_in_base(second.number, second.unit)
    if not same_unit(first.unit, second.unit):
        return False
    if same_number(first.number, second.number, num_exact=num_exact):
        return True
    # 50% equals 0.5, and also 50.
    if "%" not in (first.unit, second.unit) or first.unit == second.unit:
        return False
    fractions = [value.number / 100 if value.unit == "%" else value.number for value in (first, second)]
    return same_number(fractions[0], fractions[1], num_exact=num_exact)


def _same_listing(first: Listing, second: Listing) -> bool:
    """Whether two listings are equal: in any order if they are sets or have no brackets, else in the same order."""
    brackets = {first.opening + first.closing, second.opening + second.closing}
    if len(first.items) != len(second.items):
        return False
    if _is_named(first) != _is_named(second):
        return _same_in_order(first, second)  # the values of `x = 1, y = 2` are 1 and 2, in this order
    if brackets <= {"", "{}"}:
        return _same_in_any_order(first.items, second.items)
    if "" not in brackets and len(brackets) == 2:
        return False
    return _same_in_order(first, second)


def _is_named(listing: Listing) -> bool:
    """Whether the listing assigns values to different variables: `x = 1, y = 2`, but not `x = 1, x = 2`."""
    names = {item.variable for item in listing.items if isinstance(item, Assignment)}
    return len(names) == len(listing.items)


def _same_in_order(first: Listing, second: Listing) -> bool:
    return all(are_equal(*pair) for pair in zip(first.items, second.items, strict=True))


def _same_in_any_order(first: Sequence[Value], second: Sequence[Value]) -> bool:
    remaining = list(second)
    for item in first:
        index = next((index for index, other in enumerate(remaining) if are_equal(item, other)), None)
        if index is None:
            return False
        del remaining[index]
    return True


def _without_article(text: str) -> str:
    first, _, rest = text.partition(" ")
    return rest if first in ("a", "an", "the") and rest else text


def _same_product(first: Value, second: Value) -> bool:
    """Whether two short words are the same product of variables: `xyz` equals `z y x`."""
    texts = [value.text for value in (first, second) if isinstance(value, Words | Expression)]
    short = [value for value in (first, second) if isinstance(value, Words) and len(value.text) <= MAX_SHORT_WORD]
    return len(texts) == 2 and len(short) > 0 and math_sympy.same_expression(*texts)
