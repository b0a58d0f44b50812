"""Kubernetes quantities as numbers."""

from __future__ import annotations

from fractions import Fraction

SUFFIXES = {
    "m": Fraction(1, 1000),
    "k": Fraction(10**3),
    "M": Fraction(10**6),
    "G": Fraction(10**9),
    "T": Fraction(10**12),
    "P": Fraction(10**15),
    "E": Fraction(10**18),
    "Ki": Fraction(2**10),
    "Mi": Fraction(2**20),
    "Gi": Fraction(2**30),
    "Ti": Fraction(2**40),
    "Pi": Fraction(2**50),
    "Ei": Fraction(2**60),
}


def bytes_of(quantity: str) -> int:
    """`2Gi` -> 2147483648. The pattern of `scalars.Quantity` is taken for granted."""
    digits = quantity.rstrip("mkMGTPEKi")
    suffix = quantity[len(digits) :]
    return int(Fraction(digits) * SUFFIXES.get(suffix, Fraction(1)))
