"""Runs the `rljob` command as a process, in a folder with a job file."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from rljob_testing.settings import inherited_environment

SMALL_JOB = """\
apiVersion: rljob.dev/v1alpha1
kind: RLJob
metadata: {name: small}
spec:
  pools:
  - {name: main, nodes: 1, gpusPerNode: 1}
  training:
    steps: 3
    batchSize: 4
    model: {source: some/model}
    dataset: {type: File, file: {path: rows.jsonl}}
    rewards: [{type: MathAnswer}]
    rollout: {groupSize: 2}
"""


@dataclass(frozen=True)
class JobFolder:
    """A folder with a job file and the stand-in trainer."""

    folder: Path

    @property
    def job_file(self) -> Path:
        """Path of the job file."""
        return self.folder / "job.yaml"

    @property
    def run_folder(self) -> Path:
        """The run folder of the job `small`."""
        return self.folder / "runs" / "small"

    def command(self, *arguments: str, mode: str = "finish", **variables: str) -> subprocess.Popen[str]:
        """Starts `rljob ARGUMENTS` in the folder."""
        environment = inherited_environment() | {"STAND_IN": mode, "COLUMNS": "200", **variables}
        program = [sys.executable, "-m", "rljob_cli", *arguments]
        pipe = subprocess.PIPE
        return subprocess.Popen(
            program, cwd=self.folder, env=environment, stdout=pipe, stderr=subprocess.STDOUT, text=True
        )

    def start(self, *arguments: str, mode: str = "finish", **variables: str) -> subprocess.Popen[str]:
        """Starts `rljob run job.yaml` with the stand-in."""
        return self.command("run", "job.yaml", "--code", "code", *arguments, mode=mode, **variables)

    def run(self, *arguments: str, mode: str = "finish", **variables: str) -> tuple[int, str]:
        """Runs `rljob run job.yaml` to its end and returns exit code and output."""
        process = self.start(*arguments, mode=mode, **variables)
        output, _ = process.communicate(timeout=60)
        return process.returncode, output
