"""Kubernetes quantities: the numbers are those of its own documentation and parser."""

from __future__ import annotations

from fractions import Fraction

import pytest
from pydantic import TypeAdapter, ValidationError

from rljob_api.quantities import bytes_of, number_of
from rljob_api.scalars import Quantity

QUANTITY = TypeAdapter[str](Quantity)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("0", 0),
        ("7", 7),
        ("+7", 7),
        ("00.50", Fraction(1, 2)),
        (".5", Fraction(1, 2)),
        ("2.", 2),
        ("500m", Fraction(1, 2)),
        ("3u", Fraction(3, 10**6)),
        ("3n", Fraction(3, 10**9)),
        ("1k", 10**3),
        ("1.5M", 1_500_000),
        ("2G", 2 * 10**9),
        ("2T", 2 * 10**12),
        ("2P", 2 * 10**15),
        ("1E", 10**18),
        ("1.5Ki", 1536),
        ("1Mi", 2**20),
        ("1Gi", 2**30),
        ("1Ti", 2**40),
        ("1Pi", 2**50),
        ("1Ei", 2**60),
        ("1e3", 1000),
        ("1E3", 1000),
        ("1.2e+2", 120),
        ("5e-1", Fraction(1, 2)),
        # Kubernetes rounds up to a nano-unit, and limits binary amounts to the largest 64-bit integer.
        ("1e-12", Fraction(1, 10**9)),
        ("0.1n", Fraction(1, 10**9)),
        ("16Ei", 2**63 - 1),
    ],
)
def test_a_quantity_is_a_number(text: str, number: Fraction | int) -> None:
    assert QUANTITY.validate_python(text) == text
    assert number_of(text) == number


@pytest.mark.parametrize(
    ("text", "number"),
    [("1Gi", 2**30), ("500M", 5 * 10**8), ("1.5Ki", 1536), ("7", 7), ("1e3", 1000), ("2500m", 3), ("1n", 1)],
)
def test_fractions_of_a_byte_are_rounded_up(text: str, number: int) -> None:
    assert bytes_of(text) == number


@pytest.mark.parametrize(
    "text", ["", "Gi", ".", "-1", "1.2.3", "1GiB", "1gi", "1K", "1e", "1e100", "1 Gi", "0x10", "1\n"]
)
def test_an_invalid_quantity_is_rejected(text: str) -> None:
    with pytest.raises(ValidationError):
        QUANTITY.validate_python(text)
    with pytest.raises(ValueError, match="not a Kubernetes quantity"):
        number_of(text)


def test_whole_numbers_need_no_quotes() -> None:
    assert QUANTITY.validate_python(4) == "4"
    for other in (-1, 0.5, True, 2**63):
        with pytest.raises(ValidationError):
            QUANTITY.validate_python(other)
