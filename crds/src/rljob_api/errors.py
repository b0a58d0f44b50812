"""Everything that this package raises on purpose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class ContractError(Exception):
    """Something does not keep to the contract."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong in a job, and what to do about it."""

    path: str
    """Place in wire names, such as `spec.pools[0].name`; empty for the whole document."""
    message: str
    """What is wrong (with the value seen), then what to do."""
    line: int | None = None
    """From 1; None where the job did not come from a file."""
    column: int | None = None
    """From 1."""
    hides_line: bool = False
    """Whether the line of the file holds a secret, so that it must not be printed."""

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


class JobFileError(ContractError, ValueError):
    """A job file cannot be used."""

    def __init__(self, source: str, problems: Sequence[Problem]) -> None:
        self.source = source
        self.problems = tuple(problems)
        super().__init__(
            "\n".join(f"{source}:{problem.line or 1}:{problem.column or 1}: {problem}" for problem in problems)
        )


class HandoverError(ContractError, ValueError):
    """A document from one program to another is too large, damaged, or of a version that this program cannot read."""
