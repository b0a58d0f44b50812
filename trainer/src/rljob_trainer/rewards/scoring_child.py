"""The parent's end of one scoring process: starting it, talking to it without ever blocking, killing all of it."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rljob_trainer.rewards.base import ScorerSpec
from rljob_trainer.rewards.wire import encode

READ_BYTES = 1 << 16
MAX_MESSAGE_BYTES = 16 << 20
"""Of a process; a score and a traceback are far below."""
NUM_LOG_LINES = 10
ENDING_SECONDS = 2.0
"""How long a process whose connection is closed may take to end before it is killed: the kernel closes connections
first, and it has to be known who ended the process."""
TOKEN_BYTES = 8
"""Random ones, before each frame. They are of the length of `scoring_program`'s TOKEN_CHARACTERS in hexadecimal."""


@dataclass(frozen=True)
class Garbled:
    """Something in the connection that is no answer to a frame: the scorer has written there."""


@dataclass(frozen=True)
class CoreUse:
    """Of a process's main thread, since it began."""

    seconds_run: float
    seconds_waited: float
    """For a core, without what it waits now."""
    is_runnable: bool
    """It runs or waits for a core."""


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
        self._unanswered: deque[str] = deque()
        """The token of each frame that has no answer yet."""
        self._was_killed = False
        self._has_closed = False
        """The scorer has closed its connection and went on."""
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
            token = secrets.token_hex(TOKEN_BYTES)
            self._unanswered.append(token)
            self._unsent += (len(token) + len(frame)).to_bytes(8, "little") + token.encode() + frame
        self.flush()

    def flush(self) -> None:
        """Writes as much as the connection takes. A process that is gone is found out by reading, not here."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            while self._unsent:
                del self._unsent[: self.connection.send(self._unsent)]

    def receive(self) -> list[object]:
        """The answers to frames, in their order, that have come in full since the last call; `Garbled` for anything
        else."""
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
        return [self._answer(line) for line in lines]

    def _answer(self, line: bytes) -> object:
        try:
            message = json.loads(line)
        except (RecursionError, ValueError):
            return Garbled()
        match message:
            case [str() as token, answer] if self._unanswered and token == self._unanswered[0]:
                self._unanswered.popleft()
                return answer
        return Garbled()

    def has_ended(self) -> bool:
        """Whether the process is gone or no longer listens.

        It is not reaped, so that the id of its process group cannot be given to another. A forked child of it may
        still hold the connection open; therefore the look at the process itself.
        """
        return self._is_closed or self._is_process_gone()

    def _is_process_gone(self) -> bool:
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return True

    def kill(self) -> None:
        """Ends the process and everything in its process group, and reaps it."""
        give_up_at = time.monotonic() + ENDING_SECONDS
        while not (has_ended := self._is_process_gone()) and self._is_closed and time.monotonic() < give_up_at:
            time.sleep(0.01)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._was_killed = self._process.wait() == -signal.SIGKILL and has_ended
        self._has_closed = self._is_closed and not has_ended
        self.connection.close()
        os.close(self._lifeline)

    def core_use(self) -> CoreUse | None:
        """None where the kernel does not say."""
        folder = Path(f"/proc/{self.pid}")
        try:
            ran, waited, *_ = (folder / "schedstat").read_text().split()
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            return CoreUse(int(ran) / 1e9, int(waited) / 1e9, state == "R")
        except (OSError, IndexError, ValueError):
            return None

    def was_killed(self) -> bool:
        """Whether SIGKILL had ended the process before `kill` did, as the kernel does where memory is short; call after
        `kill`. Nobody can tell whether the process sent that signal to itself."""
        return self._was_killed

    def describe_end(self) -> str:
        """How the process ended and the last lines that it wrote; call after `kill`."""
        status = self._process.returncode
        if self._has_closed:
            return "closed the connection that carries its scores, and its process was ended"
        ending = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit code {status}"
        with self._log_file.open("rb") as log:
            log.seek(self._log_start)
            lines = log.read().decode(errors="replace").splitlines()[-NUM_LOG_LINES:]
        return "\n".join([f"ended its process ({ending}); its last output is in {self._log_file}", *lines])
