"""Compares what `rljob plan` predicts with what was measured: published runs, torch's memory tracker, runs here.

    PYTHONPATH=tests/support python bench/planner.py [--quick] [--json PATH] [--runs FOLDER]

No part needs a GPU. Published runs and the search take seconds, the memory tracker minutes. Runs on this machine take
half an hour or more on two cores; with `--runs FOLDER` they are kept, and not repeated by the next start.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rljob_bench.machine import installed_versions
from rljob_bench.planner_against_published import time_measurements
from rljob_bench.planner_memory import memory_measurements
from rljob_bench.planner_runs import run_measurements
from rljob_bench.planner_search import search_seconds
from rljob_bench.report import Report


@dataclass(frozen=True)
class PlannerOptions:
    """The options of the command line."""

    is_quick: bool
    json_path: Path | None
    runs: Path | None


def read_planner_options() -> PlannerOptions:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Compares the predictions of rljob plan with measurements.")
    parser.add_argument("--quick", action="store_true", help="skip runs on this machine and slow cases")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the results to this file")
    parser.add_argument("--runs", type=Path, metavar="FOLDER", help="keep and reuse runs on this machine here")
    chosen = parser.parse_args()
    return PlannerOptions(chosen.quick, chosen.json, chosen.runs)


def main() -> None:
    """Prints and writes the report. Returns normally also if a bar is missed; the report says so."""
    options = read_planner_options()
    report = Report("bench/planner.py", installed_versions(("torch",)))
    if options.is_quick:
        report.notes.append("--quick: without runs on this machine")
    report.print_head()
    for measurement in time_measurements():
        report.add(measurement)
    report.add(search_seconds())
    for measurement in memory_measurements(is_quick=options.is_quick):
        report.add(measurement)
    if not options.is_quick:
        with tempfile.TemporaryDirectory() as folder:
            for measurement in run_measurements(options.runs or Path(folder)):
                report.add(measurement)
    report.write(options.json_path)


if __name__ == "__main__":
    main()
