"""Reads a run's folder, so that `rljob plan --from-run` and `--calibrate` can compare the run with its plan.

runs/x/  resolved.yaml, else job.yaml    the job as it ran
         metrics.jsonl                   a line of metrics for every step
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rljob_api.run_state import RunState
from rljob_api.v1alpha1.job import RLJob
from rljob_cli.errors import CliError
from rljob_cli.local.run_folder import RunFolder
from rljob_page.curves import lines_of
from rljob_page.errors import PageError
from rljob_page.run_files import JOB_FILE_NAME, METRICS_FILE_NAME, RunFiles, read_job, read_metrics
from rljob_planner.advice.run_facts import MetricsLine


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
    try:
        job, lines = read_job(folder), read_metrics(folder / METRICS_FILE_NAME)
    except PageError as error:
        raise CliError(str(error)) from None
    return _record(folder, job, lines, RunFolder(folder).run_state())


def record_of(files: RunFiles) -> RunRecord:
    """The record of a run whose files were read before. Raises CliError as `read_run`."""
    return _record(files.folder, files.job, lines_of(files.curves), files.state)


def _record(folder: Path, job: RLJob | None, lines: tuple[MetricsLine, ...], state: RunState | None) -> RunRecord:
    if job is None:
        raise CliError(
            f"{folder}: has no {JOB_FILE_NAME}, so it is not the folder of a run; pass another folder, such as"
            " runs/NAME"
        )
    if not (folder / METRICS_FILE_NAME).is_file():
        raise CliError(
            f"{folder}: has no {METRICS_FILE_NAME}: no step has finished yet, or it is not the folder of a run; wait"
            " for a step, or pass another folder, such as runs/NAME"
        )
    text = "" if state is None else f"step {state.progress.step} of {state.progress.total_steps}, {state.phase}"
    return RunRecord(folder, job, lines, text)
