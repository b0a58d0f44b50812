"""Compares expressions with sympy, after math-verify's parser has parsed them as LaTeX."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import TypeVarTuple

import sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, NormalizationConfig, latex2sympy
from math_verify.grader import should_treat_as_complex
from sympy.core.relational import Relational
from sympy.logic.boolalg import And, BooleanFunction, Or

from rljob_trainer.rewards.base import MACHINE_ERRORS

Arguments = TypeVarTuple("Arguments")

RELATIVE_TOLERANCE = 1e-6
"""For values of which one has a decimal point."""
DIGITS = 50
"""The number of significant digits to which expressions are evaluated."""
EXACT_TOLERANCE = 1e-40
"""The relative tolerance for two constants without decimals, evaluated to `DIGITS` digits."""
MAX_DIFFERENCE = 0.5
"""The difference from an exact number must be smaller. Beyond a million, `RELATIVE_TOLERANCE` alone would accept the
next integer."""
POINTS = tuple(
    Fraction(numerator, denominator)
    for numerator, denominator in (
        *((2, 1), (3, 1), (7, 1), (17, 10), (29, 7), (5, 13), (11, 3), (1, 9), (101, 10)),
        *((-2, 1), (-3, 1), (-19, 10), (-5, 13), (-31, 6)),
    )
)
"""The values at which expressions are compared; different variables get different ones."""
NATURAL_POINTS = tuple(map(Fraction, (1, 2, 3, 4, 5, 7, 10)))
"""The values for expressions with sums, products, factorials or binomial coefficients, which need natural numbers."""
FAR_POINTS = (Fraction(10**9 + 7, 997), Fraction(-(10**9) - 9, 997))
"""The values at which inequalities are compared before they are solved; no end of an interval is near them."""
MIN_REAL_POINTS = 3
"""If two expressions are real at fewer points, comparing their values does not suffice."""
MAX_EXPANDED_POWER, MAX_EXPANDED_OPERATIONS = 12, 60
"""Limits for the polynomials that are expanded. Expanding a larger one takes long."""

_NORMALIZATION = NormalizationConfig(
    basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none", equations=False
)
_CONVERSION = ConversionConfig(lowercase_symbols=False)
"""`K` and `k` are different variables."""
_PLAIN_FUNCTIONS = re.compile(
    r"(?<![\\A-Za-z])(sinh|cosh|tanh|arcsin|arccos|arctan|sin|cos|tan|cot|sec|csc|log|ln|exp|pi|min|max|gcd|lcm)(?![A-Za-z])"
)
_LETTER_IN_FONT = re.compile(r"\\(?:mathrm|text|mathit)\s*\{\s*([A-Za-z])\s*\}")
_SQRT = re.compile(r"(?<![\\A-Za-z])sqrt\s*\(([^()]*(?:\([^()]*\)[^()]*)*)\)")
_POWER_OF_SEVERAL = re.compile(r"\^\s*(?:(-?\d{2,}|-\d)|\(([^()]*)\))")
_INFINITY = re.compile(r"(?<![\\A-Za-z])(?:infinity|infty|inf)(?![A-Za-z])")


def same_expression(expected: str, given: str) -> bool:
    """Whether two expressions, equations, inequalities or sets are equal."""
    return _or_false(_same_expression, expected, given)


def same_set(expected: Sequence[str], given: Sequence[str]) -> bool:
    """Whether intervals, sets, lists or inequalities are equal. Several texts of one answer are alternatives (a
    union)."""
    return _or_false(_same_set, expected, given)


def equals_number(expression: str, number: Fraction, is_exact: bool) -> bool:
    """Whether an expression without variables equals the number."""
    return _or_false(_equals_number, expression, number, is_exact)


def _or_false(compare: Callable[[*Arguments], bool], *arguments: *Arguments) -> bool:
    """The result of the comparison, or False if sympy fails: it raises all kinds of errors for what it cannot evaluate,
    and answers that cannot be compared are not equal. MACHINE_ERRORS are raised again."""
    try:
        return compare(*arguments)
    except MACHINE_ERRORS:
        raise
    except Exception:
        return False


def _same_expression(expected: str, given: str) -> bool:
    first, second = _parsed(expected), _parsed(given)
    return first is not None and second is not None and _same(first, second)


def _same_set(expected: Sequence[str], given: Sequence[str]) -> bool:
    first, second = ([_as_set(_parsed(text)) for text in texts] for texts in (expected, given))
    if not first or not second or None in first or None in second:
        return False
    return _same_sets(sympy.Union(*first), sympy.Union(*second))


def _equals_number(expression: str, number: Fraction, is_exact: bool) -> bool:
    value = _parsed(expression)
    exact = sympy.Rational(number.numerator, number.denominator)
    if isinstance(value, sympy.FiniteSet) and len(value) == 1:
        value = value.args[0]
    return isinstance(value, sympy.Expr) and _same_numbers(value, exact if is_exact else sympy.Float(exact, DIGITS))


def as_latex(text: str) -> str:
    """Converts plain spellings to LaTeX: `sqrt(2)`, `x**2`, `3*x`, `sin(x)`, `x^10`."""
    text = _LETTER_IN_FONT.sub(r"\1", text.replace("**", "^")).replace(r"\varnothing", r"\emptyset")
    while (changed := _SQRT.sub(r"\\sqrt{\1}", text)) != text:
        text = changed
    text = _PLAIN_FUNCTIONS.sub(r"\\\1 ", text)
    text = _INFINITY.sub(r"\\infty ", text)
    text = _POWER_OF_SEVERAL.sub(lambda match: "^{" + (match[1] or match[2]) + "}", text)
    return re.sub(r"(?<!\\)\*", r"\\cdot ", text)


@lru_cache(maxsize=2048)
def _parsed(text: str) -> sympy.Basic | sympy.MatrixBase | None:
    """Parses LaTeX, or a plain spelling of it; None if that fails."""
    latex = as_latex(text)
    try:
        found = latex2sympy(
            latex,
            is_real=not should_treat_as_complex(latex),
            normalization_config=_NORMALIZATION,
            conversion_config=_CONVERSION,
        )
    except MACHINE_ERRORS:
        raise
    except Exception:
        # The parser raises all kinds of errors for what it cannot parse, including its own subclasses of Exception.
        return None
    if not isinstance(found, sympy.Basic | sympy.MatrixBase):
        return None
    # The parser treats `i` as a variable.
    return found.subs({symbol: sympy.I for symbol in found.free_symbols if symbol.name == "i"})


def is_readable(text: str) -> bool:
    """Whether the text can be parsed."""
    return _parsed(text) is not None


def _same(first: sympy.Basic | sympy.MatrixBase, second: sympy.Basic | sympy.MatrixBase) -> bool:
    """Whether two parsed expressions, relations, sets or matrices are equal."""
    if isinstance(first, sympy.MatrixBase) or isinstance(second, sympy.MatrixBase):
        return (
            isinstance(first, sympy.MatrixBase)
            and isinstance(second, sympy.MatrixBase)
            and first.shape == second.shape
            and all(_same(*pair) for pair in zip(first.flat(), second.flat(), strict=True))
        )
    if first == second:
        return True
    if _is_relation(first) or _is_relation(second) or isinstance(first, sympy.Set) or isinstance(second, sympy.Set):
        if isinstance(first, Relational) and isinstance(second, Relational) and _proportional(first, second):
            return True
        is_set = isinstance(first, sympy.Set) or isinstance(second, sympy.Set)
        if not is_set and first.free_symbols != second.free_symbols:
            return False  # `x > 2` is not `y > 2`
        if not is_set and _differ_far_out(first, second):
            return False
        one, other = _as_set(first), _as_set(second)
        return one is not None and other is not None and _same_sets(one, other)
    if isinstance(first, sympy.Tuple) and isinstance(second, sympy.Tuple):
        return len(first) == len(second) and all(_same(*pair) for pair in zip(first, second, strict=True))
    if not isinstance(first, sympy.Expr) or not isinstance(second, sympy.Expr):
        return False
    symbols = sorted(first.free_symbols | second.free_symbols, key=str)
    return _same_at_points(first, second, symbols) if symbols else _same_numbers(first, second)


def _same_numbers(first: sympy.Expr, second: sympy.Expr) -> bool:
    """Whether two constants, which may be complex, are equal."""
    if first.free_symbols or second.free_symbols:
        return False
    first, second = first.doit(), second.doit()
    if first == second:
        return True
    if first.is_Rational and second.is_Rational:
        return False
    one, other = first.evalf(DIGITS), second.evalf(DIGITS)
    if (first.is_Rational or second.is_Rational) and bool(sympy.Abs(one - other) >= MAX_DIFFERENCE):
        return False
    return _near(one, other, _tolerance(first, second))


def _tolerance(first: sympy.Basic, second: sympy.Basic) -> float:
    return RELATIVE_TOLERANCE if first.has(sympy.Float) or second.has(sympy.Float) else EXACT_TOLERANCE


def _near(first: sympy.Expr, second: sympy.Expr, tolerance: float) -> bool:
    if tolerance == EXACT_TOLERANCE and first.is_Rational and second.is_Rational:
        return bool(first == second)
    try:
        difference, size = sympy.Abs(first - second), sympy.Max(sympy.Abs(first), sympy.Abs(second))
        if not size.is_finite:
            return bool(first == second)
        return bool(difference <= tolerance * size) or bool(size < sympy.Float("1e-45") and difference.equals(0))
    except (TypeError, ValueError, AttributeError):
        return False


def _same_at_points(first: sympy.Expr, second: sympy.Expr, symbols: Sequence[sympy.Symbol]) -> bool:
    """Whether two expressions are real at the same points and equal there; if these points are few, whether their
    difference simplifies to 0."""
    tolerance, num_real = _tolerance(first, second), 0
    if tolerance == RELATIVE_TOLERANCE and _has_another_term(first, second, symbols):
        return False
    is_natural = any(each.has(sympy.Sum, sympy.Product, sympy.factorial, sympy.binomial) for each in (first, second))
    points = (NATURAL_POINTS if is_natural else POINTS) + (_unforeseen_point(first, second, is_natural),)
    for shift in range(len(points)):
        point = {symbol: _rational(points[(shift + 4 * index) % len(points)]) for index, symbol in enumerate(symbols)}
        try:
            one, other = _real_value_at(first, point), _real_value_at(second, point)
        except (RecursionError, TypeError, ValueError, ZeroDivisionError, AttributeError):
            continue
        if one is None and other is None:
            continue
        if one is None or other is None or not _near(one, other, tolerance):
            return False
        num_real += 1
    return num_real >= MIN_REAL_POINTS or bool(sympy.simplify(first - second).is_zero)


def _has_another_term(first: sympy.Expr, second: sympy.Expr, symbols: Sequence[sympy.Symbol]) -> bool:
    """Whether two expressions with decimals differ in a term. This is checked because at the points a term such as
    `0.0000000001 x` is within the tolerance. Two polynomials differ if one of their coefficients does. Other
    expressions can be equal with different terms, by an identity; so they differ only if one has all terms of the
    other, and more. False for expressions that take long to expand."""
    if not _is_small(first) or not _is_small(second):
        return False
    one, other = _coefficients(first, symbols), _coefficients(second, symbols)
    terms = one.keys() | other.keys()
    differing = [term for term in terms if not _near(_number(one, term), _number(other, term), RELATIVE_TOLERANCE)]
    if not differing or all(term.is_polynomial(*symbols) for term in terms):
        return bool(differing)
    for more, less in ((one, other), (other, one)):
        if less.keys().isdisjoint(differing):
            rest = sum((more[term] * term for term in differing), sympy.S.Zero)
            return not _vanishes(rest, symbols)
    return False


def _is_small(expression: sympy.Expr) -> bool:
    """Whether the expression expands fast."""
    powers = [power.exp for power in expression.atoms(sympy.Pow) if power.exp.is_number]
    has_small_powers = all(power.is_real and abs(power) <= MAX_EXPANDED_POWER for power in powers)
    return has_small_powers and expression.count_ops() <= MAX_EXPANDED_OPERATIONS


def _coefficients(expression: sympy.Expr, symbols: Sequence[sympy.Symbol]) -> dict[sympy.Expr, sympy.Expr]:
    """The constant factor of each term of a sum, by the term without this factor. Decimals become fractions, so that
    expanding the sum adds no rounding errors."""
    expanded = sympy.expand(sympy.nsimplify(expression, rational=True))
    coefficients: dict[sympy.Expr, sympy.Expr] = {}
    for each in sympy.Add.make_args(expanded):
        coefficient, term = each.as_independent(*symbols, as_Add=False)
        coefficients[term] = coefficients.get(term, sympy.S.Zero) + coefficient
    return coefficients


def _number(coefficients: dict[sympy.Expr, sympy.Expr], term: sympy.Expr) -> sympy.Expr:
    return coefficients.get(term, sympy.S.Zero).evalf(DIGITS)


def _vanishes(expression: sympy.Expr, symbols: Sequence[sympy.Symbol]) -> bool:
    """Whether the expression is zero wherever it is real (`sin^2 x + cos^2 x - 1`)."""
    for shift in range(len(POINTS)):
        point = {symbol: _rational(POINTS[(shift + 4 * index) % len(POINTS)]) for index, symbol in enumerate(symbols)}
        value = _real_value_at(expression, point)
        if value is not None and bool(sympy.Abs(value) > EXACT_TOLERANCE):
            return False
    return True


def _unforeseen_point(first: sympy.Expr, second: sympy.Expr, is_natural: bool) -> Fraction:
    """A point that depends on the two expressions, so that no response can be constructed to agree at all points."""
    number = zlib.crc32(f"{first} {second}".encode())
    return Fraction(number % 13 + 6) if is_natural else Fraction(number % 9001 + 1000, 997)


def _real_value_at(expression: sympy.Expr, point: dict[sympy.Symbol, sympy.Rational]) -> sympy.Expr | None:
    value = expression.subs(point).doit()
    value = value if value.is_Rational else value.evalf(DIGITS)
    return value if value.is_real and value.is_finite else None


def _rational(value: Fraction) -> sympy.Rational:
    return sympy.Rational(value.numerator, value.denominator)


def _is_relation(value: sympy.Basic) -> bool:
    return isinstance(value, Relational | BooleanFunction)


def _proportional(first: Relational, second: Relational) -> bool:
    """Whether `left - right` of both differs only by a constant factor, which must be positive for inequalities."""
    if isinstance(first, sympy.Gt | sympy.Ge):
        first = first.reversed
    if isinstance(second, sympy.Gt | sympy.Ge):
        second = second.reversed
    if type(first) is not type(second):
        return False
    try:
        one, other = first.lhs - first.rhs, second.lhs - second.rhs
        symbols = sorted(one.free_symbols | other.free_symbols, key=str)
        point = {symbol: _rational(POINTS[(3 + 4 * index) % len(POINTS)]) for index, symbol in enumerate(symbols)}
        value, other_value = _real_value_at(one, point), _real_value_at(other, point)
        if not symbols or not value or not other_value:
            return False
        if not isinstance(first, sympy.Eq | sympy.Ne) and value / other_value < 0:
            return False
        return _same_at_points(one * other_value, value * other, symbols)
    except (TypeError, ValueError, AttributeError):
        return False


def _differ_far_out(first: sympy.Basic, second: sympy.Basic) -> bool:
    """Whether one of two inequalities of the same variable holds at a far point and the other does not. This is faster
    than solving them, which takes a minute for a polynomial of degree 14."""
    symbols = first.free_symbols
    if len(symbols) != 1:
        return False
    values = [[each.subs(dict.fromkeys(symbols, _rational(point))) for point in FAR_POINTS] for each in (first, second)]
    return any({one, other} == {sympy.true, sympy.false} for one, other in zip(*values, strict=True))


def _as_set(value: sympy.Basic | sympy.MatrixBase | None) -> sympy.Set | None:
    """The set of numbers that an inequality with one variable, a set or a list of numbers describes; None for anything
    else, and if sympy cannot solve the inequality."""
    try:
        match value:
            case sympy.FiniteSet() if any(_is_relation(item) for item in value.args):
                sets = [_as_set(item) for item in value.args]
                return None if None in sets else sympy.Union(*sets)
            case sympy.Set():
                return value
            case sympy.Tuple():
                return sympy.FiniteSet(*value.args)
            case sympy.Eq() if isinstance(value.rhs, sympy.Set):
                return value.rhs
            case Or():
                sets = [_as_set(item) for item in value.args]
                return None if None in sets else sympy.Union(*sets)
            case And():
                sets = [_as_set(item) for item in value.args]
                return None if None in sets else sympy.Intersection(*sets)
            case Relational() if len(value.free_symbols) == 1:
                return value.as_set()
            case sympy.Expr():
                return sympy.FiniteSet(value)
    except (TypeError, ValueError, NotImplementedError, AttributeError):
        return None
    return None


def _same_sets(first: sympy.Set, second: sympy.Set) -> bool:
    if first == second:
        return True
    match first, second:
        case sympy.Interval(), sympy.Interval():
            return (
                first.left_open == second.left_open
                and first.right_open == second.right_open
                and _same(first.start, second.start)
                and _same(first.end, second.end)
            )
        case (sympy.FiniteSet(), sympy.FiniteSet()) | (sympy.Union(), sympy.Union()):
            remaining = list(second.args)
            if len(first.args) != len(remaining):
                return False
            for item in first.args:
                is_same = [
                    _same_sets(item, other) if isinstance(item, sympy.Set) else _same(item, other)
                    for other in remaining
                ]
                if True not in is_same:
                    return False
                del remaining[is_same.index(True)]
            return True
    try:
        return bool(first.symmetric_difference(second).is_empty)
    except (TypeError, ValueError, NotImplementedError, AttributeError):
        return False
