"""The trainer's side of the process of one tracker. Only `wait` and `kill` wait for the process."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO

from rljob_api.v1alpha1.tracker import TrackerType
from rljob_trainer.observability.log import printable
from rljob_trainer.trackers.messages import REPORT_PREFIX, End, Message, Redaction, encode

log = logging.getLogger(__name__)

PROGRAM = "rljob_trainer.trackers.tracker_program"
MAX_WAITING_BYTES = 32 << 20
"""Messages that wait for the process. A row of metrics has about 5 kB, so these are some thousand steps."""
POLL_SECONDS = 0.05
KILLED_SECONDS = 5.0
"""W&B's service needs a moment to notice that its process was killed."""
MAX_REPORT_CHARS = 1000
VARIABLES: Mapping[str, str] = {
    # Both libraries report their own usage and crashes by default, also from clusters without access to the internet.
    "WANDB_ERROR_REPORTING": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    # MLflow's client accepts a folder only with this variable.
    "MLFLOW_ALLOW_FILE_STORE": "true",
    # The program repeats failed requests itself.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
}
"""Defaults of the process's environment; variables of the user override them."""


class TrackerProcess:
    """One process with its messages."""

    def __init__(
        self, kind: TrackerType, log_file: Path, environment: Mapping[str, str], program: str = PROGRAM
    ) -> None:
        """Starts the process. Its output is appended to `log_file`, without secrets.

        Raises:
            OSError: the process cannot be started, or the log file cannot be written.
        """
        self.kind = kind
        self.log_file = log_file
        self._redaction = Redaction(environment)
        self._waiting: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._num_waiting_bytes = 0
        self._lock = threading.Lock()
        """Guards `_num_waiting_bytes`, which two threads change."""
        self.num_dropped = 0
        self._is_ending = False
        self._has_failed = False
        output = log_file.open("a", encoding="utf-8", errors="backslashreplace")
        starter = subprocess.Popen(
            [sys.executable, "-P", "-m", program, kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**VARIABLES, **environment},
            # Ctrl-C in a terminal does not reach it.
            start_new_session=True,
            preexec_fn=_detach,
        )
        starter.wait()
        assert starter.stdin is not None
        assert starter.stdout is not None
        self.group = starter.pid
        """The id of the process group."""
        writer = threading.Thread(target=self._write_messages, args=(starter.stdin,), daemon=True)
        self._reader = threading.Thread(target=self._read_output, args=(starter.stdout, output), daemon=True)
        """Ends when the process, and all processes that it started, have ended."""
        writer.start()
        self._reader.start()

    def send(self, message: Message) -> None:
        """Queues a message. Drops it if the process has failed, or if too many messages wait."""
        line = encode(message)
        with self._lock:
            is_last = isinstance(message, End)
            is_full = self._num_waiting_bytes + len(line) > MAX_WAITING_BYTES and not is_last
            if not is_full and not self._has_failed:
                self._num_waiting_bytes += len(line)
                self._waiting.put(line)
                return
            if is_last:
                return
            self.num_dropped += 1
            is_first_full = is_full and self.num_dropped == 1
        if is_first_full:
            log.warning(
                "%s does not accept data fast enough, so rows are dropped; metrics.jsonl has all, see %s",
                self.kind,
                self.log_file,
            )

    def end(self, message: End) -> None:
        """Queues the last message. Call `wait` afterwards."""
        self._is_ending = True
        self.send(message)
        self._waiting.put(None)

    def wait(self, seconds_left: Callable[[], float]) -> None:
        """Waits until the process has ended, and kills it when `seconds_left()` is 0. KeyboardInterrupt kills it, too,
        and is not raised again: the run has already ended."""
        try:
            while self._reader.is_alive() and seconds_left() > 0:
                self._reader.join(POLL_SECONDS)
            if self._reader.is_alive():
                log.warning(
                    "%s did not accept all data in time, so its newest rows may be missing; metrics.jsonl has all, "
                    "see %s",
                    self.kind,
                    self.log_file,
                )
            self.kill()
        except KeyboardInterrupt:
            log.warning("%s: the newest data was not sent, because of a second stop request", self.kind)
            self._send_kill()
        if self.num_dropped:
            log.warning("%s: %d rows or tables were dropped; metrics.jsonl has all", self.kind, self.num_dropped)

    def kill(self) -> None:
        """Kills the process and its process group, if they still run. W&B's service is in a session of its own; it ends
        when it notices the end of the process."""
        self._is_ending = True
        self._send_kill()
        self._reader.join(KILLED_SECONDS)

    def _send_kill(self) -> None:
        if self._reader.is_alive():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.group, signal.SIGKILL)

    def _write_messages(self, pipe: IO[bytes]) -> None:
        """A thread: writes the messages, and waits for the process where it must."""
        try:
            with pipe:
                while (line := self._waiting.get()) is not None:
                    pipe.write(line)
                    pipe.flush()
                    with self._lock:
                        self._num_waiting_bytes -= len(line)
        except OSError:
            self._fail()

    def _fail(self) -> None:
        """Drops the messages that wait, because the process has ended before the run."""
        with self._lock:
            self._has_failed = True
            with contextlib.suppress(queue.Empty):
                while True:
                    is_message = self._waiting.get_nowait() is not None
                    self.num_dropped += is_message and not self._is_ending
        if not self._is_ending:
            log.warning("%s: its process has ended, so it gets no more data; see %s", self.kind, self.log_file)

    def _read_output(self, pipe: IO[bytes], output: IO[str]) -> None:
        """A thread: logs the reports, and writes everything else to the log file."""
        with pipe, output:
            for data in pipe:
                line = data.decode(errors="replace")
                if line.startswith(REPORT_PREFIX):
                    line = self._log_report(line.removeprefix(REPORT_PREFIX))
                with contextlib.suppress(OSError):
                    output.write(self._redaction(line))
                    output.flush()

    def _log_report(self, line: str) -> str:
        """Logs a report. Returns it as a line of the log file."""
        try:
            level, text = json.loads(line)
        except (ValueError, TypeError):
            return line
        shown = printable(self._redaction(str(text)), MAX_REPORT_CHARS)
        log.log(logging.WARNING if level == "warning" else logging.INFO, "%s", shown)
        return shown + "\n"


def _detach() -> None:
    """Runs in the new process before the program. A child of this process runs the program, and this process ends, so
    that the program is no descendant of the trainer. When a Ray job is stopped, Ray sends SIGTERM to all descendants of
    the trainer; then W&B's service would end before it has sent the last data."""
    if os.fork():
        os._exit(0)
