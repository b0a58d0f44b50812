"""The options of `rljob run` and `rljob evaluate`."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from rljob_api.job_changes import Change
from rljob_cli.local.evaluation_job import EvaluationOptions


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The options of `rljob run`, which `rljob evaluate` has, too."""

    file: Path
    """The job file."""
    num_workers: int | None = None
    """Workers per pool; None for the size of the pool, at most the number of devices."""
    resume: bool = False
    run_folder: Path | None = None
    """None for `runs/NAME`."""
    code: Path | None = None
    """A folder with Python code, in addition to the job file's folder."""
    ray_address: str | None = None
    """Address of an existing Ray cluster; `auto` for one on this machine. None to run without a cluster."""
    changes: Sequence[Change] = ()
    uses_bucket: bool = False
    """Whether checkpoints and results are stored in the bucket of the job's `checkpoint.storage`."""
    evaluation: EvaluationOptions | None = None
    """Set for `rljob evaluate`."""

    def folder_of_run(self, name: str) -> Path:
        """The run's folder. If the command names none, each evaluation of a job gets a new folder."""
        if self.run_folder is not None:
            return self.run_folder
        runs = Path("runs")
        if self.evaluation is None:
            return runs / name
        return next(path for number in count(1) if not (path := runs / f"{name}-evaluation-{number}").exists())

    def command(self, *, resume: bool) -> str:
        """The command that runs the job again in the same folder, with the same options. `resume`: whether that command
        has --resume."""
        options: Mapping[str, object] = {
            "--workers": self.num_workers,
            "--run-folder": self.run_folder,
            "--code": self.code,
            "--ray": self.ray_address,
        }
        given = [part for name, value in options.items() if value is not None for part in (name, str(value))]
        given += [part for change in self.changes for part in change.arguments()]
        flags = [*(["--resume"] if resume else []), *(["--bucket"] if self.uses_bucket else [])]
        if self.evaluation is not None:
            return shlex.join(["rljob", "evaluate", str(self.file), *self.evaluation.arguments(), *given])
        return shlex.join(["rljob", "run", str(self.file), *flags, *given])
