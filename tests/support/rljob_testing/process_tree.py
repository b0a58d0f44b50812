"""Who started whom, from /proc; and processes that do not outlive who started them."""

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
    """A process; the start time tells it from a later one with the same number."""

    pid: int
    started: int
    title: str


def descendants(pid: int) -> set[Process]:
    """All processes below a process, at this moment."""
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
    """All processes that were started with this variable in their environment, whoever their parents are now."""
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
    """Whether it still runs; a zombie does not."""
    entry = _read(Path("/proc") / str(process.pid))
    return entry is not None and entry[0].started == process.started


def signal_when_parent_dies(number: signal.Signals) -> Callable[[], object]:
    """For `preexec_fn`: the new process is sent this signal when the thread that has started it is gone, also where a
    test run is killed and puts nothing in order. Only Linux can do that."""
    if sys.platform != "linux":
        return lambda: None
    # Loaded here: between fork and exec it could wait for a lock that a thread of the parent held.
    return partial(ctypes.CDLL(None).prctl, PR_SET_PDEATHSIG, int(number))


def _read(folder: Path) -> tuple[Process, int] | None:
    """The process and its parent; None for one that is gone or a zombie."""
    try:
        # pid (name) state parent ...; the name may hold anything, parentheses too. Field 22 is the start time.
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
        title = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return None
    if fields[0] == "Z":
        return None
    return Process(int(folder.name), int(fields[19]), title), int(fields[1])
