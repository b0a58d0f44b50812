"""Who started whom, from /proc."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


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


def is_alive(process: Process) -> bool:
    """Whether it still runs; a zombie does not."""
    entry = _read(Path("/proc") / str(process.pid))
    return entry is not None and entry[0].started == process.started


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
