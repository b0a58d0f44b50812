"""Watches processes of the sandbox: collects what they write, and kills them at their limits."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rljob_trainer.processes.child_process import CoreUse, read_core_use
from rljob_trainer.processes.time_limit import TimeLimit

TICK_SECONDS = 0.02
"""The interval in which threads and files are checked."""
MAX_THREADS = 64
MAX_FILES = 256
MAX_FOLDER_BYTES = 32 << 20
READ_BYTES = 1 << 16
_FLAGS_FIELD, _NUM_THREADS_FIELD = 6, 17
"""Indices of the flags and of the number of threads in `/proc/PID/stat`, after the command's name."""
_PF_EXITING = 0x4
"""The flag of a thread that is ending. The kernel sets it before it closes the thread's files."""


@dataclass(eq=False)
class Stream:
    """A pipe from a process."""

    descriptor: int
    what: str
    """For messages, such as `standard output`."""
    max_bytes: int
    data: bytearray = field(default_factory=bytearray)


@dataclass(eq=False)
class Process:
    """A process of the sandbox that has not been reaped."""

    pid: int
    pidfd: int
    folder: Path | None
    """The folder in which it can create files."""
    streams: list[Stream]
    was_killed: bool = False
    """Whether `kill` ended it."""

    def kill(self) -> None:
        """Sends SIGKILL. A process that is ending or has ended already is left as it is."""
        if not _is_ending(self.pid):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            self.was_killed = True


def watch(processes: Sequence[Process], seconds: float) -> str:
    """Waits until the first process has ended by itself, and then kills the others. Kills all if one exceeds a limit.
    Returns the exceeded limit, such as `ran longer than 4 s`, or an empty string. All processes have ended then."""
    with selectors.DefaultSelector() as selector:
        for process in processes:
            selector.register(process.pidfd, selectors.EVENT_READ, process)
            for stream in process.streams:
                selector.register(stream.descriptor, selectors.EVENT_READ, stream)
        running = list(processes)
        stopped = _watch_first(selector, running, seconds)
        for process in running:
            process.kill()
        while running:
            _read(selector, running, None)
        while any(isinstance(key.data, Stream) for key in selector.get_map().values()):
            # Reads the rest of the data in the pipes. No process can write any more.
            _read(selector, running, None)
    return stopped


def _watch_first(selector: selectors.BaseSelector, running: list[Process], seconds: float) -> str:
    """Waits until the first process has ended or a process exceeds a limit; returns the limit."""
    first = running[0]
    began = time.monotonic()
    limit, next_tick = TimeLimit(seconds, began, None), began + TICK_SECONDS
    while first in running:
        if too_much := _read(selector, running, max(0.0, next_tick - time.monotonic())):
            return too_much
        now = time.monotonic()
        if now < next_tick:
            continue
        if now - next_tick > 1:
            limit.extend_after_standstill(now - next_tick)
        next_tick = now + TICK_SECONDS
        for process in running:
            if too_much := _exceeded(process):
                return too_much
        if now > limit.next_check and not limit.gets_more_time(_core_use(running), now):
            return f"ran longer than {seconds:g} s"
    return ""


def _read(selector: selectors.BaseSelector, running: list[Process], timeout: float | None) -> str:
    """Waits for an event and handles it. Returns the limit that a stream exceeds, or an empty string."""
    for key, _ in selector.select(timeout):
        if isinstance(key.data, Process):
            selector.unregister(key.fd)
            running.remove(key.data)
            continue
        stream: Stream = key.data
        data = os.read(stream.descriptor, READ_BYTES)
        if not data:
            selector.unregister(key.fd)
        elif len(stream.data) + len(data) > stream.max_bytes:
            selector.unregister(key.fd)
            return f"wrote more than {stream.max_bytes} bytes to {stream.what}"
        stream.data += data
    return ""


def _exceeded(process: Process) -> str:
    """The limit of threads or files that the process exceeds, or an empty string."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        fields = _stat_fields(Path(f"/proc/{process.pid}"))
        if int(fields[_NUM_THREADS_FIELD]) > MAX_THREADS:
            return f"started more than {MAX_THREADS} threads"
    if process.folder is not None:
        files = [entry.stat(follow_symlinks=False) for entry in os.scandir(process.folder)]
        if len(files) > MAX_FILES:
            return f"created more than {MAX_FILES} files"
        if sum(each.st_blocks * 512 for each in files) > MAX_FOLDER_BYTES:
            return f"wrote more than {MAX_FOLDER_BYTES} bytes into files"
    return ""


def _is_ending(pid: int) -> bool:
    """Whether all threads of the process are ending or have ended. This distinguishes a process whose end has closed
    its pipes from a process that has closed its pipes itself."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        return all(int(_stat_fields(each)[_FLAGS_FIELD]) & _PF_EXITING for each in threads)
    except (OSError, IndexError, ValueError):
        return False


def _stat_fields(folder: Path) -> list[str]:
    """The fields of a process or thread in its folder in `/proc`, after the command's name."""
    return (folder / "stat").read_text().rpartition(")")[2].split()


def _core_use(processes: Sequence[Process]) -> CoreUse | None:
    """The CPU use of all processes together."""
    uses = [use for process in processes if (use := read_core_use(process.pid)) is not None]
    if not uses:
        return None
    return CoreUse(
        sum(each.seconds_run for each in uses),
        sum(each.seconds_waited for each in uses),
        any(each.is_runnable for each in uses),
    )
