"""Main program of the container `driver` in the head pod. It prints the output of the trainer's driver, so that
`kubectl logs` shows it, and writes a copy into the run folder, where it outlives the pod:
`logs/attempt-<N>/driver.log`.

Ray writes the output of each submitted program into a separate file in its log folder. This program follows all of
these files, in the order in which they were last written. They may not exist yet, grow, be replaced, or disappear.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from pathlib import Path
from typing import BinaryIO

from rljob_api.constants import DASHBOARD_PORT, LOGS_FOLDER, POD_RAY_LOG_FOLDER
from rljob_trainer.attempt_logs import attempt_folder
from rljob_trainer.pod.log_copy import LogCopy
from rljob_trainer.pod.ray_jobs import RayJobs
from rljob_trainer.settings import read_pod_settings

POLL_SECONDS = 0.5
READ_BYTES = 1 << 16
MAX_LINE_BYTES = 1 << 16
"""A longer line is printed in parts, before it is complete."""
SOURCE_PREFIX, COPY_PREFIX = "job-driver-", "driver-"
"""Beginnings of the names of Ray's files, and of the copies of other programs' files."""
_TRAINER_LOG_NAME = re.compile(r"job-driver-.*-([1-9][0-9]{0,9})-([1-9][0-9]{0,9})\.log")
"""Finds the numbers of the attempt and of the submission in the name of the trainer's file. The trainer's submission
ids are `<job>-<attempt>-<submission>`."""


def main() -> int:
    """Runs until SIGTERM, and then until Ray's dashboard has ended (so the driver has, too) or the grace period is
    over."""
    settings = read_pod_settings()
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: stopping.set())
    logs = DriverLogs(Path(POD_RAY_LOG_FOLDER), sys.stdout.buffer, settings.run_folder)
    while not stopping.wait(POLL_SECONDS):
        logs.print_new()
    # The head's other container first stops the driver, and then exits. The dashboard runs until this exit.
    head, deadline = RayJobs(DASHBOARD_PORT, None), time.monotonic() + settings.grace_seconds
    while head.is_listening() and time.monotonic() < deadline:
        logs.print_new()
        time.sleep(POLL_SECONDS)
    logs.close()
    return 0


def copy_of(name: str, run_folder: Path) -> Path:
    """Returns the path of the copy of one of Ray's files. The copy of another program's output has the program's
    submission id in its name."""
    match = _TRAINER_LOG_NAME.fullmatch(name)
    if match is None:
        return run_folder / LOGS_FOLDER / name.replace(SOURCE_PREFIX, COPY_PREFIX, 1)
    folder = attempt_folder(run_folder, int(match[1]))
    return folder / ("driver.log" if match[2] == "1" else f"driver-{match[2]}.log")


class DriverLogs:
    """The files in Ray's log folder with the output of submitted programs."""

    def __init__(self, folder: Path, output: BinaryIO, run_folder: Path | None) -> None:
        """Without a `run_folder` no copies are written."""
        self._folder = folder
        self._output = output
        self._run_folder = run_folder
        self._logs: dict[str, _FollowedLog] = {}

    def print_new(self) -> None:
        """Prints the lines that were completed since the last call, and parts of a line that is too long."""
        present = sorted(self._folder.glob(f"{SOURCE_PREFIX}*.log"), key=_written_at)
        for name in self._logs.keys() - {path.name for path in present}:
            self._logs.pop(name).close()
        for path in present:
            log = self._logs.get(path.name)
            if log is not None and not log.is_of(path):
                self._logs.pop(path.name).close()
                log = None
            if log is None and (log := self._opened(path)) is None:
                continue
            self._logs[path.name] = log
            log.print_new()
        self._output.flush()

    def close(self) -> None:
        """Prints the rest, including a last line without a newline."""
        self.print_new()
        for log in self._logs.values():
            log.close()
        self._logs.clear()
        self._output.flush()

    def _opened(self, path: Path) -> _FollowedLog | None:
        try:
            source = path.open("rb")
        except OSError:
            return None
        copy = copy_of(path.name, self._run_folder) if self._run_folder else None
        return _FollowedLog(source, path, self._output, copy)


class _FollowedLog:
    """One file that is open. It may have been renamed or removed since then."""

    def __init__(self, source: BinaryIO, path: Path, output: BinaryIO, copy: Path | None) -> None:
        self._source = source
        self._identity = _identity(os.fstat(source.fileno()))
        self._output = output
        self._unfinished_line = b""
        self._copy = LogCopy(copy, path) if copy else None

    def is_of(self, path: Path) -> bool:
        """Whether the path still names this file, and the file was not truncated."""
        try:
            status = path.stat()
        except OSError:
            return False
        return _identity(status) == self._identity and status.st_size >= self._source.tell()

    def print_new(self) -> None:
        while data := self._source.read(READ_BYTES):
            if self._copy:
                self._copy.write(data)
            lines, newline, rest = data.rpartition(b"\n")
            if newline:
                self._output.write(self._unfinished_line + lines + newline)
                self._unfinished_line = b""
            self._unfinished_line += rest
            if len(self._unfinished_line) > MAX_LINE_BYTES:
                self._output.write(self._unfinished_line)
                self._unfinished_line = b""

    def close(self) -> None:
        self.print_new()
        self._output.write(self._unfinished_line + b"\n" if self._unfinished_line else b"")
        self._source.close()
        if self._copy:
            self._copy.close()


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _written_at(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


if __name__ == "__main__":
    sys.exit(main())
