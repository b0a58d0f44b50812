"""Finds out why a worker process died, from Ray's error, the kernel's counters and the end of the worker's log.

If a process exits in Python, Ray knows its exit code. If it is killed or crashes, Ray only knows that the connection
was closed. Then the kernel's counter of out-of-memory kills and the end of the worker's log show the cause.
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

COUNTER_TIMEOUT_SECONDS = 10.0
"""Timeout for reading the counter on the worker's node. Perhaps the whole node is lost, and nothing responds."""
LOG_END_BYTES = 1 << 16
"""How much of the end of a log is searched for a crash."""
CRASH = re.compile(r"\*\*\* (SIG[A-Z]+) received at time=(\d+)")
"""A line that Ray's fault handler writes into the log when a process crashes: the signal, and the time in seconds since
1970. Stacks of all threads may follow."""
RAY_MEMORY_KILL = re.compile(r"killed due to the node running low on memory(?:.*? was (\S+) used / (\S+) limit)?")
"""Part of the error of a worker that Ray's memory monitor killed: used and allowed memory, for example "7.6GB". Ray has
an exception class for this for tasks only, not for actors."""
CRASH_SECONDS = 60.0
"""A crash that is longer ago than this belongs to an earlier process with the same log file."""


@dataclass(frozen=True)
class MemoryKills:
    """The kernel's counter of processes that it has killed because memory ran out."""

    counter: Path
    """The file that contains the counter in a line `oom_kill NUMBER`."""
    count: int
    """The counter's value when the worker process started."""


@dataclass(frozen=True)
class WorkerLocation:
    """Where a rank runs: process, node, pod and log file, as the process reported them when it started."""

    process: int | None = None
    """Process id; None before the process has reported it."""
    address: str = ""
    """Address of the Ray node."""
    roles: tuple[str, ...] = ()
    log_file: Path | None = None
    node_id: str | None = None
    """Ray's id of the node."""
    memory_kills: MemoryKills | None = None
    pod: str | None = None
    """Name of the Kubernetes pod; None outside Kubernetes."""
    node_name: str | None = None
    """Name of the Kubernetes node; None outside Kubernetes."""

    def __str__(self) -> str:
        if self.process is None:
            return "before it was built"
        where = f"pod {self.pod}, node {self.node_name or self.address}" if self.pod else self.address
        roles = f"{', '.join(self.roles)}; " if self.roles else ""
        return f"{roles}process {self.process} on {where}"

    def failed_worker(self, rank: int, called: str = "") -> FailedWorker:
        """Describes this rank for an error. `called` is the role whose method was called; empty if not known. If it is
        not a role of this rank, the description names all roles."""
        role = called if called in self.roles else ", ".join(self.roles)
        return FailedWorker(role or "worker", rank, self.pod, self.node_name, self.log_file)

    @property
    def log_hint(self) -> str:
        """The log file as a suffix for an error message; empty if there is none."""
        return f"; see the end of its log: {self.log_file}" if self.log_file else ""


def memory_kills(file_system: Path = Path("/")) -> MemoryKills | None:
    """Reads the counter of this process's container, or, if the container has none, the counter of its machine. Returns
    None if there is no counter (before Linux 4.13)."""
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
    """The cause as a code for the operator, if it is known for certain."""

    def __str__(self) -> str:
        return self.text


def failure_cause(error: RayError, location: WorkerLocation) -> FailureCause:
    """Returns why a worker process died, from Ray's `error`: its text without identifiers. If Ray only knows that the
    connection was closed, returns the cause that the end of the worker's log and the kernel's counter on its node
    show."""
    text = " ".join(str(error).split())
    monitored = RAY_MEMORY_KILL.search(text)
    if monitored is not None:
        used = f" ({monitored[1]} used, limit {monitored[2]})" if monitored[1] else ""
        return FailureCause(
            f"out of memory: Ray's memory monitor killed it, because its pod or machine had almost no memory{used};"
            " give its pool more memory, or reduce the job's batch size",
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
            log.seek(max(0, log_file.stat().st_size - LOG_END_BYTES))
            crashes = CRASH.findall(log.read().decode(errors="replace"))
    except OSError:
        return None
    signals = [name for name, seconds in crashes if abs(time.time() - float(seconds)) < CRASH_SECONDS]
    return signals[-1] if signals else None


def _kills_in(text: str) -> int | None:
    """Returns the number in the line `oom_kill NUMBER` of a counter file's text; None if there is no such line."""
    found = re.search(r"^oom_kill (\d+)$", text, re.MULTILINE)
    return int(found[1]) if found else None


def _read_on(node_id: str, counter: Path) -> int | None:
    """Returns the current value of a counter on a node; None if the node does not respond or the counter cannot be
    read. On another node Ray may first have to start a process for this."""

    def read() -> str:
        return counter.read_text()

    on_node = NodeAffinitySchedulingStrategy(node_id, soft=False)
    try:
        if node_id == ray.get_runtime_context().get_node_id():
            return _kills_in(read())
        reference = ray.remote(read).options(num_cpus=0, max_retries=0, scheduling_strategy=on_node).remote()
        return _kills_in(str(ray.get(reference, timeout=COUNTER_TIMEOUT_SECONDS)))
    except (RayError, OSError, ValueError):
        return None
