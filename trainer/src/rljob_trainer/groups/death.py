"""Why a worker process is gone: what Ray says, what the kernel has counted, and the process's own last words.

Ray knows the exit code of a process that ends itself in Python. Of one that is killed or crashes it knows only that the
connection is closed; then the kernel's count of processes killed for lack of memory, and the last lines of the worker's
log, tell more.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rljob_trainer.control_groups import control_group_folders, read_or_empty
from rljob_trainer.errors import FailedWorker

ASK_SECONDS = 10.0
"""How long a node is asked for its count; it may be gone, too."""
LAST_BYTES = 1 << 16
CRASH = re.compile(r"\*\*\* (SIG[A-Z]+) received at time=(\d+)")
"""What Ray's fault handler writes before the end; stacks of all threads may follow."""
CRASH_SECONDS = 60.0
"""A crash that is longer ago was that of another process with the same log."""


@dataclass(frozen=True)
class MemoryKills:
    """How many processes the kernel had killed for lack of memory, and the file in which it counts them."""

    counter: Path
    count: int


@dataclass(frozen=True)
class Place:
    """Where a rank runs, what was known of it when it was built, and where its output is."""

    process: int | None = None
    """None before anything is known of it."""
    address: str = ""
    roles: tuple[str, ...] = ()
    log_file: Path | None = None
    node_id: str | None = None
    memory_kills: MemoryKills | None = None
    pod: str | None = None
    node_name: str | None = None

    def __str__(self) -> str:
        if self.process is None:
            return "before it was built"
        where = f"pod {self.pod}, node {self.node_name or self.address}" if self.pod else self.address
        roles = f"{', '.join(self.roles)}; " if self.roles else ""
        return f"{roles}process {self.process} on {where}"

    def failed_worker(self, rank: int, called: str = "") -> FailedWorker:
        """For an error that came from it; `called` is the role that was."""
        role = called if called in self.roles else ", ".join(self.roles)
        return FailedWorker(role or "worker", rank, self.pod, self.node_name, self.log_file)

    @property
    def more(self) -> str:
        """Where more can be read about it, for the end of a message."""
        return f"; its last words are in {self.log_file}" if self.log_file else ""


def memory_kills(file_system: Path = Path("/")) -> MemoryKills | None:
    """Of this process's container, else of its machine; None where the kernel does not count (before Linux 4.13)."""
    counters = [
        folder / name
        for folder in control_group_folders("memory", file_system)
        for name in ("memory.events", "memory.oom_control")
    ]
    for counter in (*counters, file_system / "proc/vmstat"):
        count = _kills_in(read_or_empty(counter))
        if count is not None:
            return MemoryKills(counter, count)
    return None


def cause_of_death(error: RayError, place: Place) -> str:
    """Ray's text without its identifiers; for a process that just ended, what is known of the reason.

    Asks the node of the process, and reads the end of its log."""
    text = " ".join(str(error).split())
    detail = re.search(r"Worker exit detail: (.*?)(?= There are some potential root causes|$)", text)
    if detail is None:
        return re.sub(r"^.*?(?=The actor is dead because|The actor died because)", "", text)
    if "connection error" not in detail[1]:
        return detail[1]
    crash = _crash_in(place.log_file)
    if crash:
        return f"it crashed in native code ({crash})"
    crash_text = "" if place.log_file else ", native code crashed (a log folder would tell)"
    before = place.memory_kills
    now = None if before is None or place.node_id is None else _read_on(place.node_id, before.counter)
    if before is None or now is None:
        return (
            "its process ended without a word; the kernel kills processes when memory runs out (see dmesg), "
            "and native code can crash"
        )
    if now > before.count:
        return (
            f"the kernel killed it for lack of memory (oom_kill in {before.counter} rose from {before.count} to {now} "
            "since it was built); give its pool more memory, or the job smaller batches"
        )
    return (
        "its process ended without a word; the kernel killed nothing there for lack of memory, so somebody killed it "
        f"(kill -9){crash_text}, or its code ended it (os._exit)"
    )


def _crash_in(log_file: Path | None) -> str | None:
    """How the end of a log names a crash; None for no crash, and for a log that is not there."""
    if log_file is None:
        return None
    try:
        with log_file.open("rb") as log:
            log.seek(max(0, log_file.stat().st_size - LAST_BYTES))
            crashes = CRASH.findall(log.read().decode(errors="replace"))
    except OSError:
        return None
    signals = [name for name, seconds in crashes if abs(time.time() - float(seconds)) < CRASH_SECONDS]
    return signals[-1] if signals else None


def _kills_in(text: str) -> int | None:
    """From a file of lines `name number`."""
    found = re.search(r"^oom_kill (\d+)$", text, re.MULTILINE)
    return int(found[1]) if found else None


def _read_on(node_id: str, counter: Path) -> int | None:
    """The count of a node now; None for one that does not answer. Elsewhere that can take the start of a process."""

    def read() -> str:
        return counter.read_text()

    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    try:
        if node_id == ray.get_runtime_context().get_node_id():
            return _kills_in(read())
        asked = ray.remote(read).options(num_cpus=0, max_retries=0, scheduling_strategy=there).remote()
        return _kills_in(str(ray.get(asked, timeout=ASK_SECONDS)))
    except (RayError, OSError, ValueError):
        return None
