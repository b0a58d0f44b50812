"""Gets the Python stacks of running processes from another process, even if they hang.

A traced process has a file in memory (memfd) whose name says what the process is, and two signal handlers. Another
process of the same user on the same machine finds the file in /proc, sends a signal, and reads the file. No cleanup is
needed when a process is killed. The signals would end other processes, so only processes with such a file get them.

The first signal has a handler in Python. It runs between two instructions of the main thread, where the stacks of all
threads are complete, and writes them into the file. It does not run while the main thread is in native code, or waits
without a time limit. A process that has not responded after PYTHON_SECONDS gets the second signal. Its handler is C
code of `faulthandler`, which runs at once, whatever the process does. It reads the stack of a thread even while this
thread changes it, so it crashes some processes. For Python 3.11 programs that call functions deeply or start many
threads, 2 to 10 % of these signals ended the process. Of 36,000 first signals to the same programs, one did, for an
unknown reason.

Otherwise a traced process continues: the kernel or Python restarts interrupted system calls. The only exception is
native code that sleeps and does not check for interruption.

Alternative considered: py-spy reads another process's memory. This needs ptrace, which containers forbid.
"""

from __future__ import annotations

import atexit
import faulthandler
import hashlib
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from types import FrameType

PYTHON_SIGNAL, DUMP_SIGNAL = 45, 44
"""The first and the second signal. They are two of Linux's real-time signals, which have no names. Ray, torch, vLLM and
Python's own modules do not use them."""
PYTHON_SECONDS = 2.0
FILE_PREFIX = "rljob-stacks"
POLL_SECONDS = 0.05
NUM_EQUAL_POLLS = 4
"""A file that has grown counts as complete after this many polls without a change."""
MAX_STACKS_BYTES = 256 << 10
"""Limit for one process. faulthandler's own limit of 100 threads with 100 frames can be larger."""
NOT_RUNNING = {"T": "stopped by a signal", "t": "stopped by a debugger", "Z": "a zombie: it has exited"}
_SECTION = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+)", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_OF_HANDLER = re.compile(r'^  File ".*", line \d+ in _write_stacks\n', re.MULTILINE)
"""The frame of the handler in Python, which is not of interest."""
_LIBRARIES = re.compile(r"/(?:site-packages|dist-packages|lib/python[0-9.]+)/(?!rljob_)")


class StackFile:
    """Makes this process a traced one. Its forks are traced, too, and write into the same file."""

    def __init__(self, run_folder: str | Path, role: str, rank: int | None = None) -> None:
        """`run_folder` identifies the run; `role` says in one word what this process is, such as `controller`."""
        self._run_folder = run_folder
        self._descriptor = -1
        if sys.platform == "linux":
            # Without this line the signal would kill the process while faulthandler's handler is not installed: before
            # `rename` below, and while the interpreter exits.
            signal.signal(DUMP_SIGNAL, signal.SIG_IGN)
        self.rename(role, rank)
        if sys.platform == "linux":
            signal.signal(PYTHON_SIGNAL, self._write_stacks)
            # As faulthandler does: the kernel restarts system calls where it can, so that native code notices nothing.
            signal.siginterrupt(PYTHON_SIGNAL, False)
            # While the interpreter exits, it would set the default action, which ends the process.
            atexit.register(signal.signal, PYTHON_SIGNAL, signal.SIG_IGN)

    def rename(self, role: str, rank: int | None = None) -> None:
        """Changes the role and rank that this process reports."""
        if sys.platform != "linux":
            return
        parts = [FILE_PREFIX, _key(self._run_folder), re.sub(r"[^\w.+-]", "_", role)[:100], str(rank or 0)]
        parts += [f"{threading.main_thread().ident or 0:x}", "" if rank is None else "ranked"]
        before, self._descriptor = self._descriptor, os.memfd_create(":".join(parts))
        faulthandler.register(DUMP_SIGNAL, file=self._descriptor, all_threads=True)
        if before >= 0:
            os.close(before)

    def _write_stacks(self, _signal: int, _frame: FrameType | None) -> None:
        faulthandler.dump_traceback(self._descriptor, all_threads=True)


@dataclass(frozen=True)
class TracedProcess:
    """A process with a StackFile."""

    process_id: int
    role: str
    rank: int | None
    main_thread: int
    """Thread identifier as faulthandler prints it."""
    file: Path
    """The StackFile's file, as `/proc/<process>/fd/<number>`."""
    identity: tuple[int, int]
    """Device and inode of the file. A process and its forks share one file."""


@dataclass(frozen=True)
class Stacks:
    """The stacks of one process, and its state."""

    process_id: int
    role: str
    rank: int | None
    title: str
    """The command line of the process. Ray writes the name of the running worker method there."""
    state: str
    """The kernel's state letter, such as `S`; if there are no stacks, also the reason in words."""
    wait_channel: str
    """The kernel function in which the process waits; empty if unknown."""
    text: str
    """The stacks of all threads, most recent call first; empty if the process wrote none."""
    innermost_frame: str
    """The innermost frame of the main thread, or why it is unknown."""
    innermost_frame_outside_libraries: str
    """The innermost frame of the main thread in code of the trainer or of the user; empty if there is none."""


def traced_processes(run_folder: str | Path, processes: Path = Path("/proc")) -> list[TracedProcess]:
    """Returns the traced processes of the run on this machine or in this pod, without the calling process."""
    key, own = _key(run_folder), os.getpid()
    numbers = sorted(int(folder.name) for folder in processes.iterdir() if folder.name.isdecimal())
    return [found for number in numbers if number != own for found in _traced(processes / str(number), key)]


def take_stacks(traced: Sequence[TracedProcess], seconds: float) -> list[Stacks]:
    """Takes the stacks of all these processes, at the same time except for processes that share a file. A process that
    has not responded when `seconds` have passed since the call has an empty text."""
    deadline = time.monotonic() + seconds
    return [stacks for each in _without_shared_files(traced) for stacks in _take(each, deadline)]


def _take(traced: Sequence[TracedProcess], deadline: float) -> list[Stacks]:
    """Takes the stacks of processes of which no two share a file. `deadline`: as `time.monotonic` counts."""
    states = [_state(each) for each in traced]
    before = [_size(each.file) for each in traced]
    got_signal = [
        state not in NOT_RUNNING and _send_signal(each, PYTHON_SIGNAL)
        for each, state in zip(traced, states, strict=True)
    ]
    waiting = {index: (start, 0) for index, start in enumerate(before) if got_signal[index]}
    now = time.monotonic()
    second_signal: float | None = now + min(PYTHON_SECONDS, (deadline - now) / 2)
    """When it is sent; None after that."""
    while waiting and (now := time.monotonic()) < deadline:
        if second_signal is not None and now >= second_signal:
            second_signal = None
            for index, (size, _) in waiting.items():
                if size == before[index]:
                    _send_signal(traced[index], DUMP_SIGNAL)
        time.sleep(POLL_SECONDS)
        for index, (size, num_equal) in list(waiting.items()):
            if _identity(traced[index].file) != traced[index].identity:
                # The process has exited, or has just been renamed and writes into another file from now on.
                got_signal[index] = False
                del waiting[index]
                continue
            new_size = _size(traced[index].file)
            num_equal = num_equal + 1 if new_size == size else 0
            waiting[index] = (new_size, num_equal)
            if new_size > before[index] and num_equal >= NUM_EQUAL_POLLS:
                del waiting[index]
    return [
        _stacks(each, start, has_signal) for each, start, has_signal in zip(traced, before, got_signal, strict=True)
    ]


def _without_shared_files(traced: Sequence[TracedProcess]) -> Iterator[list[TracedProcess]]:
    """A process and its forks share a file. Yields lists of processes in which no two processes share one."""
    by_file: dict[tuple[int, int], list[TracedProcess]] = {}
    for each in traced:
        by_file.setdefault(each.identity, []).append(each)
    for together in zip_longest(*by_file.values()):
        yield [each for each in together if each is not None]


def _key(run_folder: str | Path) -> str:
    # The path is not resolved: a hanging storage may be the reason for taking the stacks.
    return hashlib.sha256(os.path.abspath(run_folder).encode()).hexdigest()[:12]


def _traced(folder: Path, key: str) -> Iterator[TracedProcess]:
    """Yields the process with this folder in /proc if it is a traced process of the run with this key."""
    try:
        files = sorted((folder / "fd").iterdir())
    except OSError:
        return
    for file in files:
        try:
            name = os.readlink(file)
        except OSError:
            continue
        if not name.startswith(f"/memfd:{FILE_PREFIX}:{key}:"):
            continue
        _, _, _, role, rank, main_thread, is_ranked = name.removesuffix(" (deleted)").split(":")
        identity = _identity(file)
        if identity is not None:
            number = int(rank) if is_ranked else None
            yield TracedProcess(int(folder.name), role, number, int(main_thread, 16), file, identity)
        return


def _send_signal(process: TracedProcess, number: int) -> bool:
    """Returns whether the signal was sent."""
    # Checked just before the signal: after an exec the process has no handlers, and the signal would end it.
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", _read(process.file.parent.parent / "status"), re.MULTILINE)
    if caught is None or not all(int(caught[1], 16) >> (each - 1) & 1 for each in (PYTHON_SIGNAL, DUMP_SIGNAL)):
        return False
    try:
        os.kill(process.process_id, number)
    except OSError:
        return False
    return True


def _stacks(process: TracedProcess, start: int, got_signal: bool) -> Stacks:
    text, state, folder = _text(process, start), _state(process), process.file.parent.parent
    wait_channel = _read(folder / "wchan").strip("0\n")
    title = _read(folder / "cmdline").replace("\0", " ").strip()
    if text:
        innermost_frame, innermost_frame_outside_libraries = _innermost_frames(text, process.main_thread)
    else:
        why = NOT_RUNNING.get(state) or ("did not respond" if got_signal else "starting or exiting")
        why = why if state else "no longer running"
        state = f"{state} ({why})"
        innermost_frame = (
            f"unknown: the process is {why}" if why != "did not respond" else "unknown: it did not respond"
        )
        innermost_frame_outside_libraries = ""
        if wait_channel:
            innermost_frame += f"; it waits in the kernel function {wait_channel}"
    return Stacks(
        process.process_id,
        process.role,
        process.rank,
        title,
        state,
        wait_channel,
        text,
        innermost_frame,
        innermost_frame_outside_libraries,
    )


def _innermost_frames(text: str, main_thread: int) -> tuple[str, str]:
    """Returns two frames of the main thread: the innermost one, and the innermost one outside of libraries."""
    starts = list(_SECTION.finditer(text))
    ends = [*(start.start() for start in starts[1:]), len(text)][: len(starts)]
    sections = {int(start[1], 16): text[start.start() : end] for start, end in zip(starts, ends, strict=True)}
    # In a forked process the thread that forked is the main thread, under another identifier; it may be the only one.
    section = sections.get(main_thread) or (next(iter(sections.values())) if len(sections) == 1 else "")
    frames = [(found[1], f"{found[1]}:{found[2]} {found[3]}") for found in _FRAME.finditer(section)]
    outside = [frame for file, frame in frames if not _LIBRARIES.search(file) and not file.startswith("<")]
    innermost = frames[0][1] if frames else "unknown: the main thread runs no Python code"
    return innermost, outside[0] if outside else ""


def _text(process: TracedProcess, start: int) -> str:
    try:
        with process.file.open("rb") as file:
            file.seek(start)
            return _OF_HANDLER.sub("", file.read(MAX_STACKS_BYTES).decode(errors="replace"))
    except OSError:
        return ""


def _identity(file: Path) -> tuple[int, int] | None:
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0


def _state(process: TracedProcess) -> str:
    """Returns the kernel's state letter; empty if the process no longer exists."""
    # The state follows the name of the process, which is in parentheses and may contain any character.
    return _read(process.file.parent.parent / "stat").rpartition(")")[2].strip()[:1]


def _read(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""
