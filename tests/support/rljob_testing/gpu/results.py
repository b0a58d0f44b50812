"""Results of the programs that test a device: printed one by one, as JSON, and as a Markdown table for the docs."""

from __future__ import annotations

import json
import platform
import time
import traceback
import unittest
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from importlib import metadata
from pathlib import Path

import torch


class Outcome(StrEnum):
    """How a test ended."""

    PASSED = "passed"
    SKIPPED = "skipped"
    FAILED = "failed"
    LEFT_OUT = "left out"
    """Not started, or stopped before its own time limit, because the time of the program was over."""


@dataclass(frozen=True)
class Result:
    """The result of one test."""

    name: str
    outcome: Outcome
    seconds: float = 0.0
    reason: str = ""
    """Why the test was skipped or left out, or how it failed."""
    notes: dict[str, float] = field(default_factory=dict)
    """Measured values by name."""

    def text(self) -> str:
        """Lines for the terminal."""
        lines = [f"{self.outcome:8}{self.seconds:7.2f} s  {self.name}"]
        lines += [f"{'':19}{name}: {value:.3g}" for name, value in self.notes.items()]
        lines += [f"{'':19}{line}" for line in self.reason.splitlines()]
        return "\n".join(lines)

    def table_line(self) -> str:
        """A row of the Markdown table. For a failed test it has only the last line of the reason, which is the
        error."""
        notes = [f"{name}: {value:.3g}" for name, value in self.notes.items()]
        cells = [
            self.name,
            self.outcome,
            f"{self.seconds:.2f}" if self.seconds else "",
            "; ".join(notes + self.reason.splitlines()[-1:]),
        ]
        return _line(cells)


@dataclass
class Results:
    """All results of a program."""

    device: str
    versions: dict[str, str]
    results: list[Result] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    def print_head(self) -> None:
        """Prints the device and the versions."""
        print(self.head(), flush=True)

    def head(self) -> str:
        """The device and the versions, in one line."""
        return f"{self.device}; {', '.join(f'{name} {each}' for name, each in self.versions.items())}"

    def add(self, result: Result) -> None:
        """Stores and prints a result."""
        self.results.append(result)
        print(result.text(), flush=True)

    @property
    def elapsed(self) -> float:
        """Seconds since the program began."""
        return time.monotonic() - self.started

    def has_time(self, limit: float) -> bool:
        """Whether a test that takes as long as the longest one so far would end within `limit` seconds."""
        return self.elapsed + max((each.seconds for each in self.results), default=0.0) < limit

    def counts(self) -> dict[str, int]:
        """How many tests ended in each way."""
        return {str(each): sum(result.outcome == each for result in self.results) for each in Outcome}

    def summary(self) -> str:
        """The counts and the whole time, in one line."""
        counts = ", ".join(f"{count} {name}" for name, count in self.counts().items())
        return f"{counts} in {self.elapsed:.0f} s"

    def exit_code(self) -> int:
        """1 if a test failed or none passed."""
        counts = self.counts()
        return 1 if counts[Outcome.FAILED] or not counts[Outcome.PASSED] else 0

    def markdown(self) -> str:
        """The device, a table of all tests, and the counts."""
        rows = [_line(("test", "outcome", "seconds", "measured, or reason")), _line(["---"] * 4)]
        return "\n".join([self.head(), "", *rows, *(each.table_line() for each in self.results), "", self.summary()])

    def write(self, json_path: Path | None, markdown_path: Path | None) -> None:
        """Writes both forms; None leaves one out."""
        if json_path is not None:
            document = {
                "device": self.device,
                "versions": self.versions,
                "seconds": self.elapsed,
                "counts": self.counts(),
                "results": [asdict(result) for result in self.results],
            }
            json_path.write_text(json.dumps(document, indent=1) + "\n")
        if markdown_path is not None:
            markdown_path.write_text(self.markdown() + "\n")


def result_of(name: str, test: Callable[[dict[str, float]], None]) -> Result:
    """Calls a test with an empty mapping for its measured values, and returns its result."""
    notes: dict[str, float] = {}
    started = time.perf_counter()
    outcome, reason = Outcome.PASSED, ""
    try:
        test(notes)
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            # Errors of a kernel are reported only when the device is synchronized.
            torch.cuda.synchronize()
    except unittest.SkipTest as error:
        outcome, reason = Outcome.SKIPPED, str(error)
    except Exception:
        outcome, reason = Outcome.FAILED, traceback.format_exc()
    return Result(name, outcome, time.perf_counter() - started, reason, notes)


def described_device(device_type: str) -> str:
    """Name of the device and, for a GPU, its memory."""
    if device_type == "cpu":
        return f"cpu ({platform.machine()}, {torch.get_num_threads()} threads)"
    properties = torch.cuda.get_device_properties(0)
    return f"{properties.name} ({properties.total_memory / 2**30:.0f} GiB), CUDA {torch.version.cuda}"


def installed_versions(libraries: Sequence[str]) -> dict[str, str]:
    """Versions of Python and of the libraries that are installed."""
    found = {"python": platform.python_version()}
    for name in libraries:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"
