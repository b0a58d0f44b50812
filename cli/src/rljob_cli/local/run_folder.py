"""The folder of one run, with a lock and checks, so that two runs do not use the same folder.

runs/<name>/  job.yaml          the job of the newest attempt, with all defaults and all settings of the recipe
              attempts.jsonl    one line at the start and one at the end of each attempt
              metrics.jsonl, samples.jsonl, tensorboard/, plots/, logs/      written by the trainer
              resolved.yaml, checkpoints/, export/, rljob-run-state.json     written by the trainer
              view.html         the page of the run (`rljob view`)
              .lock             held while an attempt runs
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from rljob_api.constants import RUN_STATE_FILE_NAME
from rljob_api.contract_documents import load_run_state
from rljob_api.errors import DocumentError
from rljob_api.job_file import resolved_job_text
from rljob_api.run_state import RunState
from rljob_api.v1alpha1.job import RLJob
from rljob_cli.errors import RunFolderError
from rljob_page.run_files import ATTEMPTS_FILE_NAME, JOB_FILE_NAME, LOCK_FILE_NAME, attempt_rows

CHECKPOINT_PATTERN = "step-*"


class RunFolder:
    """Reads and writes the folder of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.checkpoints = self.path / "checkpoints"
        self.run_state_file = self.path / RUN_STATE_FILE_NAME

    @contextmanager
    def locked(self) -> Iterator[int]:
        """Creates the folder and holds its lock within the context; yields the lock's file descriptor.

        A process that inherits the descriptor also holds the lock, until it exits.

        Raises:
            RunFolderError: another run holds the lock, or the folder cannot be created.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            file = (self.path / LOCK_FILE_NAME).open("a+", encoding="utf-8")
        except OSError as error:
            raise RunFolderError(f"{self.path}: cannot be used ({error.strerror}); use another --run-folder") from error
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                file.seek(0)
                holder = file.read().strip() or "unknown"
                raise RunFolderError(
                    f"{self.path}: another run is using it (process {holder}); wait for it, or use another --run-folder"
                ) from error
            self._write_holder(file)
            yield file.fileno()

    def _write_holder(self, lock: TextIO) -> None:
        """Writes the id of this process into the lock file. Raises RunFolderError."""
        try:
            os.ftruncate(lock.fileno(), 0)
            os.write(lock.fileno(), f"{os.getpid()}\n".encode())
        except OSError as error:
            raise self._cannot_be_written(error) from error

    def num_attempts(self) -> int:
        """The number of attempts that were started so far, by attempts.jsonl. Raises RunFolderError."""
        return max((attempt for attempt, _ in self._records()), default=0)

    def bucket(self) -> str | None:
        """The job's folder in its bucket, if the newest attempt has stored its checkpoints there. Raises
        RunFolderError."""
        starts = [facts for _, facts in self._records() if "started" in facts]
        found = starts[-1].get("bucket") if starts else None
        return found if isinstance(found, str) else None

    def has_results(self) -> bool:
        """Whether an attempt has completed a step or begun to save a checkpoint. Otherwise there is nothing to resume,
        and nothing that a new run could overwrite."""
        state = self.run_state()
        trained = state is not None and state.progress.step > 0
        return trained or (self.checkpoints.is_dir() and any(self.checkpoints.glob(CHECKPOINT_PATTERN)))

    def check_resume(self, other_command: str, *, resume: bool) -> None:
        """Rejects a new run in a folder with results, --resume in a folder without a run, and a folder that has files
        but no run.

        Args:
            other_command: the user's command with the opposite choice: with --resume added, or with --resume removed.
            resume: whether the user's command has --resume.

        Raises:
            RunFolderError: the folder is rejected.
        """
        attempts = self.num_attempts()
        others = sorted(entry.name for entry in self.path.iterdir() if entry.name != LOCK_FILE_NAME)
        if resume and not attempts:
            raise RunFolderError(f"{self.path}: no run to resume; start one with `{other_command}`")
        if others and not attempts:
            raise RunFolderError(
                f"{self.path}: is not empty and not the folder of a run (it contains {others[0]}); "
                "use another --run-folder"
            )
        if self.has_results() and not resume:
            raise RunFolderError(
                f"{self.path}: already contains a run ({self._progress_text()}); resume it with `{other_command}`, "
                "or use another --run-folder for a new run"
            )

    def write_job(self, job: RLJob) -> None:
        """Writes the resolved job: an equivalent job file with all defaults and recipe settings filled in.

        Raises:
            RunFolderError: it cannot be written.
        """
        temporary = self.path / (JOB_FILE_NAME + ".tmp")
        try:
            temporary.write_text(resolved_job_text(job.metadata, job.spec), encoding="utf-8")
            temporary.replace(self.path / JOB_FILE_NAME)
        except OSError as error:
            raise self._cannot_be_written(error) from error

    def record(self, attempt: int, **facts: str | int) -> None:
        """Appends a line about an attempt to attempts.jsonl.

        Raises:
            RunFolderError: it cannot be written.
        """
        line = json.dumps({"attempt": attempt, **facts})
        try:
            with (self.path / ATTEMPTS_FILE_NAME).open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError as error:
            raise self._cannot_be_written(error) from error

    def run_state(self) -> RunState | None:
        """The trainer's last run state, of any attempt; None if there is none, or if the file cannot be parsed."""
        try:
            return load_run_state(self.run_state_file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, DocumentError):
            return None

    def run_state_of(self, attempt: int) -> RunState | None:
        """The last run state of this attempt; None if the attempt has written none, or if the file cannot be parsed."""
        state = self.run_state()
        return state if state is not None and state.attempt == attempt else None

    def _cannot_be_written(self, error: OSError) -> RunFolderError:
        return RunFolderError(
            f"{self.path}: cannot be written ({error.strerror}); free disk space, or use another --run-folder"
        )

    def _progress_text(self) -> str:
        state = self.run_state()
        if state is None:
            return f"{self.num_attempts()} attempts, with checkpoints"
        return f"step {state.progress.step} of {state.progress.total_steps}, {state.phase}"

    def _records(self) -> Iterator[tuple[int, dict[str, object]]]:
        """The attempt's number and the content of each valid line of attempts.jsonl. Raises RunFolderError."""
        path = self.path / ATTEMPTS_FILE_NAME
        try:
            yield from attempt_rows(path)
        except FileNotFoundError:
            return
        except OSError as error:
            raise RunFolderError(f"{path}: cannot be read ({error.strerror}); use another --run-folder") from error
