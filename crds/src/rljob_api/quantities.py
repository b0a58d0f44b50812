"""Parses Kubernetes quantities such as `500m`, `1.5`, `1e3` and `16Gi` into exact numbers."""

from __future__ import annotations

import math
import re
from fractions import Fraction

_DECIMAL: dict[str, int] = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_BINARY: dict[str, int] = {
    suffix: 2 ** (10 * power) for power, suffix in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi", "Ei"), start=1)
}
QUANTITY_PATTERN = r"^\+?([0-9]+(\.[0-9]*)?|\.[0-9]+)([numkMGTPE]|[KMGTPE]i|[eE][-+]?[0-9]{1,2})?$"
"""Quantities that Kubernetes accepts, except negative ones, which no field of a pod accepts. Kubernetes also reads a
missing number (`Ki`) as 0, and exponents of any length; these are rejected here."""
_LARGEST_BINARY = 2**63 - 1
_SMALLEST = Fraction(1, 10**9)


def number_of(quantity: str) -> Fraction:
    """The number of a quantity: `500m` -> 1/2, `1e3` -> 1000.

    As in Kubernetes, fractions of a nano-unit are rounded up, and an amount with a binary suffix is limited to 2**63-1.
    Raises ValueError if `QUANTITY_PATTERN` does not match."""
    found = re.fullmatch(QUANTITY_PATTERN, quantity)
    if found is None:
        raise ValueError(f"not a Kubernetes quantity: {quantity!r}")
    digits, suffix = found[1], found[3] or ""
    mantissa = Fraction(f"0{digits}0" if "." in digits else digits)
    if suffix in _BINARY:
        number = min(mantissa * _BINARY[suffix], Fraction(_LARGEST_BINARY))
    else:
        exponent = _DECIMAL[suffix] if suffix in _DECIMAL else int(suffix[1:])
        power = Fraction(f"1e{exponent}")
        number = mantissa * power
    return math.ceil(number / _SMALLEST) * _SMALLEST


def bytes_of(quantity: str) -> int:
    """The number of bytes of a quantity: `2Gi` -> 2147483648. Fractions of a byte are rounded up, as in Kubernetes.
    Raises ValueError as `number_of` does."""
    return math.ceil(number_of(quantity))
