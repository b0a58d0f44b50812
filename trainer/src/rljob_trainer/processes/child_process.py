"""The parent's side of a process that runs user code: starts it, exchanges messages without blocking, kills its process
group."""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

READ_BYTES = 1 << 16
MAX_MESSAGE_BYTES = 16 << 20
"""The maximum size of a message from the process; a result with a traceback is far smaller."""
NUM_LOG_LINES = 10
ENDING_SECONDS = 2.0
"""If a process has closed its connection, `kill` waits this long for the process to end by itself: the kernel closes
the connections of a process shortly before the process ends. Without the wait, `kill` could not know whether it ended
the process itself."""
TOKEN_BYTES = 8
"""The length of the random token before each frame. Its hexadecimal form has TOKEN_CHARACTERS (`child_program`)."""


@dataclass(frozen=True)
class Reply:
    """A line that the process wrote into its connection, if it has the form of a reply. `token` is not checked yet:
    only the token of a frame that was sent proves that the line is not from user code."""

    token: str
    value: object


@dataclass(frozen=True)
class InvalidReply:
    """Anything in the connection that is not a reply to a frame, because user code wrote into the connection."""


@dataclass(frozen=True)
class CoreUse:
    """CPU use of a process's main thread since it started."""

    seconds_run: float
    seconds_waited: float
    """Seconds that the thread waited for a core. A wait counts only when it is over."""
    is_runnable: bool
    """True if the thread runs or waits for a core."""


class ChildProcess:
    """One process that runs user code, in its own process group. Its program is built on `child_program`.

    The output of user code is appended to the log file. When this object's process ends, the child's guardian notices
    that the pipe `_lifeline` is closed, and kills the process group.
    """

    def __init__(self, program: str, log_file: Path, environment: Mapping[str, str], carried: str) -> None:
        """Starts `python -m program SOCKET_FD LIFELINE_FD`.

        Args:
            program: a module, such as `rljob_trainer.rewards.scoring_program`.
            carried: what the connection carries, for messages, such as `scores`.
        """
        self._carried = carried
        self.connection, child_end = socket.socketpair()
        guardian_end, self._lifeline = os.pipe()
        self.connection.setblocking(False)
        self._log_file = log_file
        self._unsent = bytearray()
        self._tokens = _random_tokens()
        self._core_use: CoreUse | None = None
        """CPU use at `_core_use_read_at`."""
        self._core_use_read_at = -math.inf
        self._unread = b""
        self._was_killed = False
        self._closed_while_running = False
        """True if the process closed its connection but kept running. Known after `kill`."""
        self._is_disconnected = False
        flags = ["-P", "-u", "-X", "faulthandler"]
        command = ["-m", program, str(child_end.fileno()), str(guardian_end)]
        with log_file.open("ab") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                [sys.executable, *flags, *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=dict(environment),
                pass_fds=(child_end.fileno(), guardian_end),
                # A process group of its own can be killed as a whole, and does not get Ctrl-C from the terminal.
                start_new_session=True,
            )
        child_end.close()
        os.close(guardian_end)

    @property
    def pid(self) -> int:
        """The id of the process, and of its process group."""
        return self._process.pid

    @property
    def has_unsent(self) -> bool:
        """Whether `flush` must be called again when the connection is writable."""
        return bool(self._unsent)

    def send(self, *frames: bytes) -> list[str]:
        """Queues frames and writes as much as the connection accepts without blocking. Returns the token of each frame;
        the replies to it have the same token."""
        tokens = [next(self._tokens) for _ in frames]
        for token, frame in zip(tokens, frames, strict=True):
            self._unsent += (len(token) + len(frame)).to_bytes(8, "little") + token.encode() + frame
        self.flush()
        return tokens

    def flush(self) -> None:
        """Writes as much as the connection accepts without blocking. The end of the process is detected by reading, not
        here."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            while self._unsent:
                del self._unsent[: self.connection.send(self._unsent)]

    def receive(self) -> list[Reply | InvalidReply]:
        """The complete lines since the last call, in order."""
        try:
            while data := self.connection.recv(READ_BYTES):
                self._unread += data
            self._is_disconnected = True
        except BlockingIOError:
            pass
        except ConnectionResetError:
            self._is_disconnected = True
        *lines, self._unread = self._unread.split(b"\n")
        if len(self._unread) > MAX_MESSAGE_BYTES:
            lines, self._unread = [*lines, b"too long"], b""
        return [_reply(line) for line in lines]

    def has_ended(self) -> bool:
        """Whether the process has ended or closed its connection.

        The process is not reaped, so that the id of its process group is not reused. The connection alone does not
        suffice, because a forked child of the process may keep it open.
        """
        return self._is_disconnected or self._is_process_gone()

    def _is_process_gone(self) -> bool:
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return True

    def kill(self) -> None:
        """Kills all processes of the process group and reaps the process."""
        give_up_at = time.monotonic() + ENDING_SECONDS
        while not (has_ended := self._is_process_gone()) and self._is_disconnected and time.monotonic() < give_up_at:
            time.sleep(0.01)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._was_killed = self._process.wait() == -signal.SIGKILL and has_ended
        self._closed_while_running = self._is_disconnected and not has_ended
        self.connection.close()
        os.close(self._lifeline)

    def core_use(self, max_age: float = 0.0) -> CoreUse | None:
        """CPU use of the main thread; None if the kernel does not report it. `max_age`: the result may be this many
        seconds old. Reading it takes longer than a short call."""
        now = time.monotonic()
        if not max_age or now - self._core_use_read_at > max_age:
            self._core_use, self._core_use_read_at = read_core_use(self.pid), now
        return self._core_use

    def was_killed(self) -> bool:
        """Whether SIGKILL ended the process before `kill` did, as the kernel's out-of-memory killer does. Call it after
        `kill`. A process that sent SIGKILL to itself looks the same."""
        return self._was_killed

    def describe_end(self) -> str:
        """How the process ended, and its last lines of output. Call it after `kill`."""
        status = self._process.returncode
        if self._closed_while_running:
            return f"closed the connection that carries its {self._carried}, so its process was killed"
        ending = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit code {status}"
        with self._log_file.open("rb") as log:
            log.seek(self._log_start)
            lines = log.read().decode(errors="replace").splitlines()[-NUM_LOG_LINES:]
        return "\n".join([f"ended its process ({ending}); its last output is in {self._log_file}", *lines])


def _random_tokens() -> Iterator[str]:
    """Many at a time: for each request to the kernel, this thread may have to wait for another thread of Python."""
    while True:
        block = secrets.token_hex(256 * TOKEN_BYTES)
        for start in range(0, len(block), 2 * TOKEN_BYTES):
            yield block[start : start + 2 * TOKEN_BYTES]


def read_core_use(pid: int) -> CoreUse | None:
    """CPU use of a process's main thread; None if the kernel does not report it."""
    folder = Path(f"/proc/{pid}")
    try:
        ran, waited, *_ = (folder / "schedstat").read_text().split()
        state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
        return CoreUse(int(ran) / 1e9, int(waited) / 1e9, state == "R")
    except (OSError, IndexError, ValueError):
        return None


def _reply(line: bytes) -> Reply | InvalidReply:
    try:
        message = json.loads(line)
    except (RecursionError, ValueError):
        return InvalidReply()
    match message:
        case [str() as token, value]:
            return Reply(token, value)
    return InvalidReply()
