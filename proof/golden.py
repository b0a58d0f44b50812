"""Compares our functions with verl 0.9.1: for each one, the number of cases and the largest absolute difference.

    python proof/golden.py

The cases are those of the tests (`rljob_testing.golden`). Each is checked against its own tolerance before it is
measured. verl's numbers are float32, rounded to 7 digits.
"""

from __future__ import annotations

import platform
import sys
import time

import torch

from rljob_testing.golden import advantage_cases, correction_cases, loss_cases, verl_cases


def main() -> int:
    """Prints the table. Raises AssertionError if a case exceeds the tolerance of its test."""
    by_function: dict[str, list[verl_cases.GoldenCase]] = {}
    for case in (*advantage_cases.ADVANTAGE_CASES, *loss_cases.LOSS_CASES, *correction_cases.CORRECTION_CASES):
        verl_cases.check(case)
        by_function.setdefault(case.function, []).append(case)
    print(f"{time.strftime('%Y-%m-%d')}, torch {torch.__version__}, Python {platform.python_version()}\n")
    print("| function | cases | numbers | largest difference |")
    print("|---|---|---|---|")
    for function, cases in by_function.items():
        count = sum(each.found.numel() for case in cases for each in case.compare())
        print(f"| {function} | {len(cases)} | {count} | {max(map(verl_cases.largest_difference, cases)):.1e} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
