"""Finds out why a worker process died, from Ray's error, the kernel's counters and the end of the worker's log.

If a process exits in Python, Ray knows its exit code. If it is killed or crashes, Ray only knows that the connection
was closed. Then the kernel's counter of out-of-memory kills and the last lines of the worker's log show the cause.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rljob_api.constants import ErrorCause
from rljob_trainer.control_groups import control_group_folders, read_or_empty
from rljob_trainer.errors import FailedWorker

ASK_SECONDS = 10.0
"""Timeout for reading the counter on the worker's node; the node may be lost, too."""
LAST_BYTES = 1 << 16
CRASH = re.compile(r"\*\*\* (SIG[A-Z]+) received at time=(\d+)")
"""Written by Ray's fault handler when a process crashes; stacks of all threads may follow."""
RAY_MEMORY_KILL = re.compile(r"killed due to the node running low on memory(?:.*? was (\S+) used / (\S+) limit)?")
"""In the error of a worker that Ray killed. Ray has an exception class for this only for tasks, not for actors."""
CRASH_SECONDS = 60.0
"""An older crash in the log belongs to an earlier process with the same log file."""


@dataclass(frozen=True)
class MemoryKills:
    """The kernel's counter of processes killed because memory ran out: its file, and its value when the worker was
    built."""

    counter: Path
    count: int


@dataclass(frozen=True)
class WorkerLocation:
    """Where a rank runs: process, node, pod and log file, as known when it was built."""

    process: int | None = None
    """Process id; None before the process has reported it."""
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
        """Describes this rank for an error. `called` is the role whose method was called, if known."""
        role = called if called in self.roles else ", ".join(self.roles)
        return FailedWorker(role or "worker", rank, self.pod, self.node_name, self.log_file)

    @property
    def log_hint(self) -> str:
        """The log file as a suffix for an error message; empty if there is none."""
        return f"; see the end of its log: {self.log_file}" if self.log_file else ""


def memory_kills(file_system: Path = Path("/")) -> MemoryKills | None:
    """Reads the counter of this process's container, or else that of its machine. Returns None if there is no counter
    (before Linux 4.13)."""
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


@dataclass(frozen=True)
class FailureCause:
    """Why a worker process died."""

    text: str
    """The cause in a sentence, for an error message."""
    known_cause: ErrorCause | None = None
    """The cause for the operator, if it is known for certain."""

    def __str__(self) -> str:
        return self.text


def failure_cause(error: RayError, location: WorkerLocation) -> FailureCause:
    """Returns why a worker process died: the text of Ray's error without identifiers. If Ray only knows that the
    connection was closed, the cause comes from the end of the worker's log and the kernel's counter on its node."""
    text = " ".join(str(error).split())
    monitored = RAY_MEMORY_KILL.search(text)
    if monitored is not None:
        used = f" ({monitored[1]} used, limit {monitored[2]})" if monitored[1] else ""
        return FailureCause(
            f"out of memory: Ray's memory monitor killed it, because its pod or machine was nearly full{used}; give its"
            " pool more memory, or reduce the job's batch size",
            ErrorCause.HOST_MEMORY,
        )
    detail = re.search(r"Worker exit detail: (.*?)(?= There are some potential root causes|$)", text)
    if detail is None:
        return FailureCause(re.sub(r"^.*?(?=The actor is dead because|The actor died because)", "", text))
    if "connection error" not in detail[1]:
        return FailureCause(detail[1])
    crash = _crash_in(location.log_file)
    if crash:
        return FailureCause(f"it crashed in native code ({crash})")
    crash_text = "" if location.log_file else ", native code crashed (there is no log file to check)"
    before = location.memory_kills
    now = None if before is None or location.node_id is None else _read_on(location.node_id, before.counter)
    if before is None or now is None:
        return FailureCause(
            "its process exited without an error message; possible causes: out of memory (check dmesg for oom-kill) or "
            "a crash in native code"
        )
    if now > before.count:
        return FailureCause(
            f"out of memory: the kernel killed it (oom_kill in {before.counter} rose from {before.count} to {now} "
            "since it was built); give its pool more memory, or reduce the job's batch size",
            ErrorCause.HOST_MEMORY,
        )
    return FailureCause(
        "its process exited without an error message; it was not out of memory (the kernel's oom_kill counter is "
        f"unchanged), so either it was killed (kill -9){crash_text}, or its own code called os._exit"
    )


def _crash_in(log_file: Path | None) -> str | None:
    """Returns the signal of a recent crash at the end of a log, such as `SIGSEGV`; None if there is none."""
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
    """Reads `oom_kill` from a file of lines `name number`."""
    found = re.search(r"^oom_kill (\d+)$", text, re.MULTILINE)
    return int(found[1]) if found else None


def _read_on(node_id: str, counter: Path) -> int | None:
    """Reads the current counter of a node; None if the node does not respond. On another node Ray may first have to
    start a process for this."""

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
