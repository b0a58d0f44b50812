"""Starts the trainer, forwards Ctrl-C to it, and makes sure that no process is left at the end.

The trainer runs in its own session. So Ctrl-C in a terminal reaches only this process, which forwards it once. The
trainer then finishes or abandons its step and saves a checkpoint; before the first step it exits immediately. A second
Ctrl-C kills the trainer and all its processes. SIGTERM and SIGHUP act like Ctrl-C. If this process is killed, the
kernel sends SIGTERM to the trainer (PR_SET_PDEATHSIG). Processes that the trainer leaves behind become children of this
process (PR_SET_CHILD_SUBREAPER), which kills them. Both features need Linux; on other systems, only those processes
that are still in the trainer's session are killed at the end.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from rljob_cli.errors import TrainerStartError

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
GRACE_SECONDS = 5.0
"""Processes that still run this long after the trainer's exit are killed."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

Announce = Callable[[str], None]


class TrainerProcess:
    """One run of the trainer."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        announce: Announce,
        what_a_stop_does: Callable[[], str],
    ) -> None:
        """`announce`: prints a message. `what_a_stop_does`: called at the first stop request; it returns a part of the
        message, such as `the trainer ends its step and saves a checkpoint`."""
        self._command = list(command)
        self._environment = dict(environment)
        self._announce = announce
        self._what_a_stop_does = what_a_stop_does
        self._process: subprocess.Popen[bytes] | None = None
        self._num_stop_requests = 0
        self._is_killed = False

    @property
    def was_killed_on_request(self) -> bool:
        """Whether a second stop request killed the trainer."""
        return self._is_killed

    def run(self, keep_open: Sequence[int] = (), on_start: Callable[[], None] = lambda: None) -> int:
        """Runs the trainer to its end; the file descriptors `keep_open` stay open in it.

        `on_start` is called as soon as the process exists. If it raises an exception, the process is killed. Returns
        the exit code, or 128 + the number of the signal that killed the process.

        Raises:
            TrainerStartError: the process cannot be started.
        """
        _adopt_orphans()
        earlier_children = _own_children()
        with self._forwarding_signals():
            self._process = self._start(keep_open)
            try:
                if self._num_stop_requests:
                    self._process.send_signal(signal.SIGINT)
                on_start()
                code = self._process.wait()
            finally:
                self._end_orphans(earlier_children)
        return code if code >= 0 else 128 - code

    def _start(self, keep_open: Sequence[int]) -> subprocess.Popen[bytes]:
        try:
            return subprocess.Popen(
                self._command,
                env=self._environment,
                start_new_session=True,
                pass_fds=tuple(keep_open),
                preexec_fn=_death_signal_setter(os.getpid()),
            )
        except OSError as error:
            text = (
                f"the trainer cannot be started ({error.strerror}: {self._command[0]}); check that this program can be"
                " executed and that the machine has free memory"
            )
            if error.errno == errno.E2BIG:
                num_bytes = sum(len(f"{name}={value}".encode()) for name, value in self._environment.items())
                text = (
                    f"the trainer cannot be started: its environment is larger than this system allows ({num_bytes} "
                    "bytes); shorten spec.env, or unset variables of this terminal"
                )
            raise TrainerStartError(text) from error

    @contextmanager
    def _forwarding_signals(self) -> Iterator[None]:
        # `nohup` ignores SIGHUP, so that the run continues after its terminal is closed.
        ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set()
        before = {number: signal.signal(number, self._on_stop) for number in STOP_SIGNALS if number not in ignored}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_stop(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGHUP and self._num_stop_requests:
            # A terminal that closes causes two SIGHUP: one from its shell, one from the kernel when the shell exits.
            return
        self._num_stop_requests += 1
        process = self._process
        if self._num_stop_requests == 1:
            self._announce(f"stopping: {self._what_a_stop_does()}; press Ctrl-C again to kill it immediately")
            if process is not None and process.poll() is None:
                process.send_signal(signal.SIGINT)
        elif process is not None:
            self._announce("killing the trainer")
            self._is_killed = process.poll() is None
            _signal_session(process.pid, signal.SIGKILL)

    def _end_orphans(self, earlier_children: set[int]) -> None:
        """Waits a few seconds for processes that the trainer left behind, then kills those that still run. After a
        second stop request, kills them immediately."""
        assert self._process is not None
        deadline = time.monotonic() + (GRACE_SECONDS if self._num_stop_requests < 2 else 0.0)
        while orphans := _own_children() - earlier_children:
            for pid in orphans:
                if time.monotonic() >= deadline:
                    _signal_process(pid, signal.SIGKILL)
                _reap(pid)
            time.sleep(0.05)
        _signal_session(self._process.pid, signal.SIGKILL)


def _adopt_orphans() -> None:
    """Processes whose parent exits become children of this process, if it is their ancestor."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _death_signal_setter(parent: int) -> Callable[[], None] | None:
    """A function that the new process calls first; None outside Linux. After the call, the kernel sends SIGTERM to the
    new process when its parent dies. The C library is loaded before the fork, because few operations are safe after a
    fork."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def prepare() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return prepare


def _own_children() -> set[int]:
    """Ids of this process's children; empty if /proc cannot be read."""
    try:
        return {int(pid) for pid in Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()}
    except OSError:
        return set()


def _reap(pid: int) -> None:
    """Removes an exited child from the process table. Does not wait for a running one."""
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return


def _signal_process(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _signal_session(leader: int, number: signal.Signals) -> None:
    try:
        os.killpg(leader, number)
    except (ProcessLookupError, PermissionError):
        return
