"""The trainer's program in the test's own process: no seconds spent on imports, and parts of it can be replaced."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from rljob_api.handover import TrainerJob, dump_job
from rljob_api.loading import load_job_file
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

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self.run_folder = folder / "run"
        self._monkeypatch = monkeypatch
        self._capsys = capsys

    def __call__(self, job: Document, ray_address: str | None, *, attempt: int = 1, **variables: str) -> Ended:
        """One attempt; `variables` are added to its environment."""
        job_file = self.folder / "job.yaml"
        job_file.write_text(json.dumps(job))
        environment = {
            "RLJOB_SPEC": dump_job(TrainerJob(name="small", spec=load_job_file(job_file).spec)),
            "RLJOB_RUN_FOLDER": str(self.run_folder),
            "RLJOB_ATTEMPT": str(attempt),
            "RLJOB_JOB_FOLDER": str(self.folder),
            "RLJOB_DEVICE": "cpu",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{self.folder}:{SUPPORT_FOLDER}",
            **({"RAY_ADDRESS": ray_address} if ray_address else {}),
            **variables,
        }
        with self._monkeypatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            code = main()
        shown = self._capsys.readouterr()
        return Ended(code, shown.out + shown.err, RunFiles(self.run_folder))
