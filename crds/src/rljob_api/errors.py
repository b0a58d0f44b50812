"""Exceptions for invalid jobs and documents, and `Problem`, one fault of a job file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class ContractError(Exception):
    """Base class: a document violates the contract."""


@dataclass(frozen=True)
class Problem:
    """One fault of a job file, or one warning about it."""

    path: str
    """Path of the field in wire names, such as `spec.pools[0].name`; empty for the whole document."""
    message: str
    """What is wrong, the value seen, and how to fix it."""
    line: int | None = None
    """Line in the file, from 1; None if the job did not come from a file."""
    column: int | None = None
    """Column in the file, from 1."""
    hides_line: bool = False
    """Whether the line contains a secret and must not be printed."""
    option: str = ""
    """The option of the command line that has set the value, such as `--set`; empty for a value of the file."""

    def located(self, source: str) -> str:
        """The problem with its location in front: the option, or line and column in the file `source`."""
        return f"{self.option}: {self}" if self.option else f"{source}:{self.line or 1}:{self.column or 1}: {self}"

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


class JobFileError(ContractError, ValueError):
    """A job file is invalid or cannot be read. The message has one line for each problem:
    `file:line:column: path: message`, or `--set: path: message`.

    `unchecked`: what these problems prevented from being checked, such as `further rules`; empty for nothing. If it is
    not empty, there may be more problems."""

    def __init__(self, source: str, problems: Sequence[Problem], *, unchecked: str = "") -> None:
        self.source = source
        self.problems = tuple(problems)
        self.unchecked = unchecked
        super().__init__("\n".join(problem.located(source) for problem in problems))


class DocumentError(ContractError, ValueError):
    """A document that operator and trainer exchange is too large, damaged, or of an unsupported version."""
