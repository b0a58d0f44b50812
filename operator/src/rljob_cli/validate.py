"""`rljob validate`: shows every problem of a job file where it stands, and what is doubtful in a valid one."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.text import Text

from rljob_api.errors import JobFileError, Problem
from rljob_api.job_file import job_file_warnings, load_job_file_to_run, resolved_job_text
from rljob_api.standard_streams import write_utf8
from rljob_api.v1alpha1.job import RLJob


def validate_file(path: Path, console: Console) -> RLJob | None:
    """The job in the file, after its warnings and one line that says so; None after printing every problem with its
    source line."""
    try:
        job = load_job_file_to_run(path)
    except JobFileError as error:
        lines = _source_lines(path)
        for problem in error.problems:
            _print_problem(path, problem, lines, console)
        count = len(error.problems)
        console.print(f"{path}: {count} problem{'s' if count > 1 else ''} found", style="bold red", soft_wrap=True)
        return None
    print_warnings(path, job, console)
    pools = ", ".join(f"{pool.name} {pool.nodes}x{pool.gpus_per_node}" for pool in job.spec.pools)
    console.print(Text(f"{path}: RLJob {job.metadata.name} is valid (pools: {pools})", style="green"), soft_wrap=True)
    return job


def print_warnings(path: Path, job: RLJob, console: Console) -> None:
    """Prints the job's warnings, each with its source line."""
    lines = _source_lines(path)
    for problem in job_file_warnings(path, job):
        _print_problem(path, problem, lines, console, "warning: ")


def print_resolved(job: RLJob, console: Console) -> None:
    """The job file that says the same with nothing left open."""
    write_utf8(console.file, resolved_job_text(job.metadata, job.spec))


def _print_problem(path: Path, problem: Problem, lines: list[str], console: Console, kind: str = "") -> None:
    """`FILE:LINE:COL: kind: path: message`, the line itself, and a mark under the column."""
    line, column = problem.line or 1, problem.column or 1
    console.print(Text(f"{path}:{line}:{column}: {kind}{problem}"), soft_wrap=True)
    if line <= len(lines):
        number = f"{line:5} | "
        console.print(Text(number + lines[line - 1], style="dim"), soft_wrap=True)
        console.print(Text(" " * (len(number) + column - 1) + "^", style="red"), soft_wrap=True)


def _source_lines(path: Path) -> list[str]:
    """The file's lines; none if it cannot be read, which is then the problem that is shown."""
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return []
