"""The options of `rljob run`."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rljob_api.job_changes import Change


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The options of `rljob run`."""

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
        return shlex.join(["rljob", "run", str(self.file), *flags, *given])
