"""Runs the `rljob` command as a process, in a folder with a job file."""

from __future__ import annotations

import gc
import logging
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

from rljob_cli.__main__ import main
from rljob_testing.settings import inherited_environment, replace_environment

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
        """Starts `rljob run job.yaml` with the stand-in. The process is forked from this one, which has loaded the
        command's libraries; so it ignores environment variables that Python reads when it starts."""
        environment = inherited_environment() | {"STAND_IN": mode, "COLUMNS": "200", **variables}
        command = ["rljob", "run", "job.yaml", "--code", "code", *arguments]
        return subprocess.Popen(
            command,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # Python itself ignores SIGPIPE.
            restore_signals=False,
            preexec_fn=partial(_become_command, command, environment),
        )

    def run(self, *arguments: str, mode: str = "finish", **variables: str) -> tuple[int, str]:
        """Runs `rljob run job.yaml` to its end and returns exit code and output."""
        process = self.start(*arguments, mode=mode, **variables)
        output, _ = process.communicate(timeout=60)
        return process.returncode, output


def _become_command(command: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Runs `rljob` in a forked process, instead of the program that Popen would start."""
    # Popen waits until the new process has closed its other files.
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    gc.freeze()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    logging.getLogger().handlers.clear()
    replace_environment(environment)
    sys.path.insert(0, os.getcwd())
    sys.argv = list(command)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)  # noqa: SIM115
    code: object = 1
    try:
        main()
        code = 0
    except SystemExit as ended:
        code = ended.code
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(code if isinstance(code, int) else 0 if code is None else 1)
