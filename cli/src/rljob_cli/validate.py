"""`rljob validate`: prints the errors of a job file with their lines, or warnings about a valid job."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from rljob.job_source import JobSource
from rljob_api.errors import JobFileError, Problem
from rljob_api.job_changes import Change
from rljob_api.job_file import (
    cluster_problems,
    load_job_text_to_run,
    read_job_text,
    resolved_job_text,
)
from rljob_api.standard_streams import write_utf8
from rljob_api.v1alpha1.job import RLJob
from rljob_api.v1alpha1.pools import Pool

_MAX_CHARACTERS = 160
"""The largest number of characters of a source line that are printed. A job in JSON may be one long line."""


def validate_file(path: Path, changes: Sequence[Change], console: Console) -> RLJob | None:
    """Validates a file with changes. If the job is valid: prints warnings (also about what a cluster would reject),
    then `FILE: RLJob NAME is valid`, and returns the job. Otherwise: prints the errors with their source lines, and
    returns None."""
    text = ""
    try:
        text = read_job_text(path)
        job = load_job_text_to_run(text, str(path), changes)
    except JobFileError as error:
        lines = text.splitlines()
        for problem in error.problems:
            _print_problem(str(path), problem, lines, console)
        count = len(error.problems)
        what = f"{count} problem{'s' if count > 1 else ''} found"
        more = f"; fix and validate again, because {error.unchecked} were not checked" if error.unchecked else ""
        console.print(Text(f"{path}: {what}{more}", "bold red"), soft_wrap=True)
        return None
    print_warnings(JobSource(job, text, str(path), tuple(changes)), console)
    for problem in cluster_problems(text, job, changes):
        _print_problem(str(path), problem, text.splitlines(), console, "warning: ")
    pools = ", ".join(map(_pool_text, job.spec.pools))
    console.print(Text(f"{path}: RLJob {job.metadata.name} is valid ({pools})", style="green"), soft_wrap=True)
    return job


def print_warnings(source: JobSource, console: Console) -> None:
    """Prints the warnings about the job, each with its source line."""
    lines = source.text.splitlines()
    for problem in source.warnings():
        _print_problem(source.name, problem, lines, console, "warning: ")


def print_resolved(job: RLJob, console: Console) -> None:
    """Prints an equivalent job file with all defaults filled in."""
    write_utf8(console.file, resolved_job_text(job.metadata, job.spec))


def _pool_text(pool: Pool) -> str:
    """`pool main: 4 nodes x 8 GPUs`."""
    nodes, gpus = pool.nodes, pool.gpus_per_node
    return f"pool {pool.name}: {nodes} node{'s' if nodes > 1 else ''} x {gpus} GPU{'s' if gpus > 1 else ''}"


def _print_problem(source: str, problem: Problem, lines: list[str], console: Console, prefix: str = "") -> None:
    """Prints `FILE:LINE:COLUMN: PREFIX FIELD: MESSAGE`, or the option instead of the file if the option has set the
    value. Below it, unless the source line contains a secret: the line, and a mark under the column."""
    line, column = problem.line or 1, problem.column or 1
    where = problem.option or f"{source}:{line}:{column}"
    console.print(Text(f"{where}: {prefix}{problem}"), soft_wrap=True)
    if line <= len(lines) and not problem.hides_line and not problem.option:
        number = f"{line:5} | "
        excerpt, offset = _excerpt(lines[line - 1], column)
        console.print(Text(number + excerpt, style="dim"), soft_wrap=True)
        console.print(Text(" " * (len(number) + offset) + "^", style="red"), soft_wrap=True)


def _excerpt(source: str, column: int) -> tuple[str, int]:
    """The part of the source line around a column, and the number of terminal columns to its left (a wide
    character takes two). Tabs and control characters become spaces, because their width depends on the terminal."""
    plain = "".join(letter if letter.isprintable() else " " for letter in source)
    start = max(0, column - 1 - _MAX_CHARACTERS // 2) if len(plain) > _MAX_CHARACTERS else 0
    end = start + _MAX_CHARACTERS
    before = ("..." if start else "") + plain[start : column - 1]
    return before + plain[column - 1 : end] + ("..." if end < len(plain) else ""), cell_len(before)
