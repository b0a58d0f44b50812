"""The parent's end of one scoring process: starting it, talking to it without ever blocking, killing all of it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from rljob_trainer.rewards.base import ScorerSpec
from rljob_trainer.rewards.wire import encode

READ_BYTES = 1 << 16
MAX_MESSAGE_BYTES = 16 << 20
"""Of a process; a score and a traceback are far below."""
NUM_LOG_LINES = 10


class ScoringChild:
    """One process running `scoring_program`, in a process group of its own.

    Whatever user code prints goes to the log file, which is opened for appending.
    """

    def __init__(self, spec: ScorerSpec, log_file: Path, environment: Mapping[str, str]) -> None:
        self.connection, child_end = socket.socketpair()
        guardian_end, self._lifeline = os.pipe()
        self.connection.setblocking(False)
        self._log_file = log_file
        self._unsent = bytearray()
        self._unread = b""
        self._is_closed = False
        flags = ["-P", "-u", "-X", "faulthandler"]
        program = ["-m", "rljob_trainer.rewards.scoring_program", str(child_end.fileno()), str(guardian_end)]
        with log_file.open("ab") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                [sys.executable, *flags, *program],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=dict(environment),
                pass_fds=(child_end.fileno(), guardian_end),
                # A process group that can be killed as a whole, and no Ctrl-C from the terminal.
                start_new_session=True,
            )
        child_end.close()
        os.close(guardian_end)
        self.send(encode([type(spec).__name__, vars(spec)]))

    @property
    def pid(self) -> int:
        """Also the id of the process group."""
        return self._process.pid

    @property
    def has_unsent(self) -> bool:
        """Whether `flush` has to be called again once the connection takes more."""
        return bool(self._unsent)

    def send(self, *frames: bytes) -> None:
        """Queues frames and writes as much as the connection takes."""
        for frame in frames:
            self._unsent += len(frame).to_bytes(8, "little") + frame
        self.flush()

    def flush(self) -> None:
        """Writes as much as the connection takes. A process that is gone is found out by reading, not here."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            while self._unsent:
                del self._unsent[: self.connection.send(self._unsent)]

    def receive(self) -> list[object]:
        """The messages that have come in full since the last call; bytes where the scorer has written there."""
        try:
            while data := self.connection.recv(READ_BYTES):
                self._unread += data
            self._is_closed = True
        except BlockingIOError:
            pass
        except ConnectionResetError:
            self._is_closed = True
        *lines, self._unread = self._unread.split(b"\n")
        if len(self._unread) > MAX_MESSAGE_BYTES:
            lines, self._unread = [*lines, b"too long"], b""
        return [_message(line) for line in lines]

    def has_ended(self) -> bool:
        """Whether the process is gone or no longer listens.

        It is not reaped, so that the id of its process group cannot be given to another. A forked child of it may
        still hold the connection open; therefore the look at the process itself.
        """
        if self._is_closed:
            return True
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return True

    def kill(self) -> None:
        """Ends the process and everything in its process group, and reaps it."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        self.connection.close()
        os.close(self._lifeline)

    def was_killed(self) -> bool:
        """Whether a signal ended the process; call after `kill`."""
        return self._process.returncode < 0

    def describe_end(self) -> str:
        """How the process ended and the last lines that it wrote; call after `kill`."""
        status = self._process.returncode
        ending = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit code {status}"
        with self._log_file.open("rb") as log:
            log.seek(self._log_start)
            lines = log.read().decode(errors="replace").splitlines()[-NUM_LOG_LINES:]
        return "\n".join([f"ended its process ({ending}); its last output is in {self._log_file}", *lines])


def _message(line: bytes) -> object:
    try:
        return json.loads(line)
    except ValueError:
        return line
