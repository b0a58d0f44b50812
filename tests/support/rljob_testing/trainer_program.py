"""The trainer's program in the test's own process: no seconds spent on imports, and parts of it can be replaced."""

from __future__ import annotations

import io
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest

from rljob_api.handover import TrainerJob, dump_job
from rljob_api.job_file import load_job_file
from rljob_testing.settings import inherited_environment, inherited_python_path
from rljob_testing.training_runs import Document, RunFiles
from rljob_trainer.__main__ import main

SUPPORT_FOLDER = Path(__file__).parents[1]


@dataclass(frozen=True)
class Ended:
    """A run that has ended."""

    exit_code: int
    terminal: str
    files: RunFiles


class RunTrainer:
    """Runs `python -m rljob_trainer` to its end, as the operator would start it. Relative paths of the job start at
    `folder`, which is also on the PYTHONPATH of workers and rewards."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, job: Document, ray_address: str | None, *, attempt: int = 1, **variables: str) -> Ended:
        """One attempt; `variables` are added to its environment."""
        environment = self._environment(job, ray_address, attempt) | variables
        terminal = io.StringIO()
        captured = (redirect_stdout(terminal), redirect_stderr(terminal))
        with pytest.MonkeyPatch.context() as patch, captured[0], captured[1], _own_signals():
            for name, value in environment.items():
                patch.setenv(name, value)
            code = main()
        return Ended(code, terminal.getvalue(), self.files)

    def start(self, job: Document, ray_address: str | None) -> subprocess.Popen[str]:
        """The first attempt as a process of its own."""
        return subprocess.Popen(
            [sys.executable, "-m", "rljob_trainer"],
            env=inherited_environment() | self._environment(job, ray_address, attempt=1),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    @property
    def files(self) -> RunFiles:
        """What the run writes."""
        return RunFiles(self.folder / "run")

    def _environment(self, job: Document, ray_address: str | None, attempt: int) -> dict[str, str]:
        job_file = self.folder / "job.yaml"
        job_file.write_text(json.dumps(job))
        return {
            "RLJOB_SPEC": dump_job(TrainerJob(name="small", spec=load_job_file(job_file).spec)),
            "RLJOB_RUN_FOLDER": str(self.files.folder),
            "RLJOB_ATTEMPT": str(attempt),
            "RLJOB_JOB_FOLDER": str(self.folder),
            "RLJOB_DEVICE": "cpu",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(self.folder), str(SUPPORT_FOLDER), *inherited_python_path()]),
            **({"RAY_ADDRESS": ray_address} if ray_address else {}),
        }


@contextmanager
def _own_signals() -> Iterator[None]:
    """The trainer takes over signals and logging of its process; here that is pytest's."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    logger = logging.getLogger("rljob_trainer")
    propagates, log_handlers = logger.propagate, list(logger.handlers)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        logger.propagate, logger.handlers[:] = propagates, log_handlers
