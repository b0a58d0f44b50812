"""Finds parents and children of processes in /proc, and starts processes that do not outlive their parent."""

from __future__ import annotations

import ctypes
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Process:
    """A process. The start time distinguishes it from a later process with the same pid."""

    pid: int
    started: int
    title: str


def descendants(pid: int) -> set[Process]:
    """All current descendants of a process."""
    parents: dict[int, int] = {}
    known: dict[int, Process] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and (entry := _read(folder)):
            known[entry[0].pid], parents[entry[0].pid] = entry
    found: set[Process] = set()
    for process in known.values():
        ancestor = parents[process.pid]
        while ancestor in parents and ancestor != pid:
            ancestor = parents[ancestor]
        if ancestor == pid:
            found.add(process)
    return found


def processes_with_variable(name: str, value: str) -> set[Process]:
    """All processes that were started with this environment variable, whichever parent they have now."""
    mark = f"{name}={value}".encode()
    found = set()
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdecimal() and mark in (folder / "environ").read_bytes().split(b"\0"):
                found |= {entry[0] for entry in [_read(folder)] if entry}
        except OSError:
            continue
    return found


def is_alive(process: Process) -> bool:
    """Whether the process still runs; a zombie does not."""
    entry = _read(Path("/proc") / str(process.pid))
    return entry is not None and entry[0].started == process.started


def signal_when_parent_dies(number: signal.Signals) -> Callable[[], object]:
    """For `preexec_fn`: sends the new process this signal when the thread that started it ends, also when the test run
    is killed and cannot clean up. Linux only."""
    if sys.platform != "linux":
        return lambda: None
    # Loaded before the fork: between fork and exec it could wait for a lock that another thread of the parent held.
    return partial(ctypes.CDLL(None).prctl, PR_SET_PDEATHSIG, int(number))


def _read(folder: Path) -> tuple[Process, int] | None:
    """The process and its parent's pid; None if it has ended or is a zombie."""
    try:
        # Format: pid (name) state parent ... The name may contain parentheses. Field 22 is the start time.
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
        title = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return None
    if fields[0] == "Z":
        return None
    return Process(int(folder.name), int(fields[19]), title), int(fields[1])
