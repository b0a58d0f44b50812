"""What `rljob plan` says, beside what was measured: published runs, torch's memory tracker, runs on this machine.

    PYTHONPATH=tests/support python bench/planner.py [--quick] [--json PATH] [--runs FOLDER]

The planner is arithmetic, so most of this takes seconds and no GPU. verl has no part in it; some of the published runs
are its. Runs on this machine take half an hour or more on two cores; those that `--runs` has are not made again.
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
    """What was asked for."""

    is_quick: bool
    json_path: Path | None
    runs: Path | None


def read_planner_options() -> PlannerOptions:
    """From the command line."""
    parser = argparse.ArgumentParser(description="What the planner says, beside what was measured.")
    parser.add_argument("--quick", action="store_true", help="without runs on this machine")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results there, too")
    parser.add_argument("--runs", type=Path, metavar="FOLDER", help="keep the runs on this machine there")
    chosen = parser.parse_args()
    return PlannerOptions(chosen.quick, chosen.json, chosen.runs)


def main() -> None:
    """The program."""
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
