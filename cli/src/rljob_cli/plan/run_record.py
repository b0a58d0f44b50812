"""Reads a run's folder, so that `rljob plan --from-run` and `--calibrate` can compare the run with its plan.

runs/x/  resolved.yaml, else job.yaml    the job as it ran
         metrics.jsonl                   a line of metrics for every step
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from rljob_api.errors import JobFileError
from rljob_api.job_file import load_job_file
from rljob_api.v1alpha1.job import RLJob
from rljob_cli.errors import CliError
from rljob_cli.local.run_folder import JOB_FILE_NAME, RunFolder
from rljob_cli.plain_text import one_line
from rljob_planner.advice.run_facts import MetricsLine

RESOLVED_JOB_FILE_NAME = "resolved.yaml"
METRICS_FILE_NAME = "metrics.jsonl"


@dataclass(frozen=True)
class RunRecord:
    """A run: its job, its metrics and its state."""

    folder: Path
    job: RLJob
    lines: tuple[MetricsLine, ...]
    """The numeric metrics of each line of metrics.jsonl, by name."""
    state: str
    """Progress and phase, `step 12 of 12, Complete`; empty if the folder has no run state."""


def read_run(folder: Path) -> RunRecord:
    """Reads a run's folder. Raises CliError if the folder has no job or no metrics, or if they cannot be read."""
    if not folder.is_dir():
        raise CliError(f"{folder}: is not a folder; pass the folder of a run, such as runs/NAME")
    job = _job(folder)
    lines = _metrics(folder / METRICS_FILE_NAME)
    return RunRecord(folder, job, lines, _state(folder))


def _job(folder: Path) -> RLJob:
    """The job of the run: from `resolved.yaml`, which has the values that the trainer chose for `Auto`; if the training
    never began, from `job.yaml`."""
    for name in (RESOLVED_JOB_FILE_NAME, JOB_FILE_NAME):
        if (folder / name).is_file():
            try:
                return load_job_file(folder / name)
            except JobFileError as error:
                raise CliError(
                    f"{folder / name}: this version of rljob cannot read it ({one_line(error)}); use the version that"
                    " made the run, or fix the file"
                ) from None
    raise CliError(
        f"{folder}: has no {JOB_FILE_NAME}, so it is not the folder of a run; pass another folder, such as runs/NAME"
    )


def _metrics(file: Path) -> tuple[MetricsLine, ...]:
    """The numeric metrics of each line. The last line is skipped if it is incomplete, because the run may still be
    writing it."""
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise CliError(
            f"{file.parent}: has no {file.name}: no step has finished yet, or it is not the folder of a run; wait for a"
            " step, or pass another folder, such as runs/NAME"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise CliError(f"{file}: cannot be read ({one_line(error)}); check the file") from None
    rows = text.splitlines()
    found: list[MetricsLine] = []
    for number, row in enumerate(rows, start=1):
        try:
            data = json.loads(row)
        except (ValueError, RecursionError) as error:
            if number == len(rows):
                break
            raise CliError(f"{file}: line {number} is not valid JSON ({one_line(error)}); remove the line") from None
        if isinstance(data, dict):
            found.append({name: float(value) for name, value in data.items() if _is_number(value)})
    return tuple(found)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _state(folder: Path) -> str:
    """The field `RunRecord.state`."""
    state = RunFolder(folder).run_state()
    return "" if state is None else f"step {state.progress.step} of {state.progress.total_steps}, {state.phase}"
