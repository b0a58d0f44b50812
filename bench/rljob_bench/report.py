"""Prints results as tables and writes them as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rljob_bench import machine
from rljob_bench.rounds import Timings

OURS = "RLJob"
FLOOR = "floor"


@dataclass(frozen=True)
class Bar:
    """A value that a measurement should reach. `value` is None if it could not be measured."""

    text: str
    value: float | None
    limit: float
    is_at_least: bool = False

    @property
    def is_met(self) -> bool | None:
        """Whether the bar is met; None if the value could not be measured."""
        if self.value is None:
            return None
        return self.value >= self.limit if self.is_at_least else self.value <= self.limit

    def line(self) -> str:
        """A line below the table."""
        if self.value is None:
            return f"- not measured: {self.text}"
        return f"- {'met' if self.is_met else 'MISSED'}: {self.text}: {self.value:.4g}"


@dataclass(frozen=True)
class Measurement:
    """One table: several contenders, compared on one question."""

    title: str
    header: tuple[str, ...]
    """Names of the columns."""
    rows: Mapping[str, tuple[float | None, ...]]
    bars: tuple[Bar, ...] = ()
    seconds: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Seconds of every call that counts, by contender."""
    num_decimals: int | None = None
    """Number of decimals; by default about three significant digits."""

    def text(self) -> str:
        """The table in Markdown, with a line for each bar."""
        lines = [f"### {self.title}", "", _line(["", *self.header]), _line(["---"] * (len(self.header) + 1))]
        rows = {name: [_number(value, self.num_decimals) for value in values] for name, values in self.rows.items()}
        lines += [_line([name, *values]) for name, values in rows.items()]
        return "\n".join([*lines, "", *(bar.line() for bar in self.bars)])


def of_timings(title: str, timings: Mapping[str, Timings], base: str, bars: Sequence[Bar]) -> Measurement:
    """A table of milliseconds of every contender, with each median as a multiple of that of `base`."""
    rows = {
        name: (1e3 * each.fastest, 1e3 * each.median, each.median / timings[base].median)
        for name, each in timings.items()
    }
    return Measurement(
        title,
        ("fastest, ms", "median, ms", f"median / {base}"),
        rows,
        tuple(bars),
        {name: each.seconds for name, each in timings.items()},
    )


def ratio(timings: Mapping[str, Timings], name: str, base: str) -> float | None:
    """The ratio of two medians; None if one was not measured."""
    if name not in timings or base not in timings:
        return None
    return timings[name].median / timings[base].median


@dataclass
class Report:
    """All measurements of a program."""

    program: str
    versions: dict[str, str]
    notes: list[str] = field(default_factory=list)
    measurements: list[Measurement] = field(default_factory=list)
    load_before: float = field(default_factory=machine.load)

    def add(self, measurement: Measurement) -> None:
        """Stores and prints a measurement."""
        self.measurements.append(measurement)
        print(f"\n{measurement.text()}", flush=True)

    def print_head(self) -> None:
        """Prints `head`."""
        print(self.head(), flush=True)

    def head(self) -> str:
        """The program, the date, the commit, the machine and the notes so far."""
        described = ", ".join(f"{name} {value}" for name, value in machine.described_machine().items())
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        title = f"## {self.program}, {machine.today()}, commit {machine.commit()}"
        return "\n".join([title, "", f"{described}; load before: {self.load_before:.2f}", versions, *self.notes])

    def write(self, path: Path | None, markdown_path: Path | None = None) -> None:
        """Writes everything as JSON, including the seconds of every call, and the head and the tables as Markdown. None
        leaves one out."""
        print(f"\nload after: {machine.load():.2f}", flush=True)
        if markdown_path is not None:
            markdown_path.write_text("\n\n".join([self.head(), *(each.text() for each in self.measurements)]) + "\n")
        if path is None:
            return
        document = {
            "program": self.program,
            "date": machine.today(),
            "commit": machine.commit(),
            "machine": machine.described_machine(),
            "load": [self.load_before, machine.load()],
            "versions": self.versions,
            "notes": self.notes,
            "measurements": [_document(measurement) for measurement in self.measurements],
        }
        path.write_text(json.dumps(document, indent=1) + "\n")


def _document(measurement: Measurement) -> dict[str, object]:
    return {
        "title": measurement.title,
        "columns": measurement.header,
        "rows": measurement.rows,
        "bars": [
            {"text": bar.text, "value": bar.value, "limit": bar.limit, "is_met": bar.is_met} for bar in measurement.bars
        ],
        "seconds": measurement.seconds,
    }


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _number(value: float | None, num_decimals: int | None) -> str:
    if value is None:
        return "-"
    if num_decimals is not None:
        return f"{value:,.{num_decimals}f}"
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3f}" if value < 1 else f"{value:.4g}"
