"""What each process did during a step, from a timeline of the run: the spans of each process, the memory at the
boundaries of the step, and how long each worker was idle, by what it waited for.

The trainer records when a worker is idle, and what it waits for, as spans whose names begin with `idle: `.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from rljob_page.run_files import Json, is_finite

MEMORY_TRACK, PEAK_TRACK, PROCESS_TRACK = "memory (MiB)", "peak of memory (MiB)", "process memory (MiB)"
"""Names of the counters of every worker process."""
MAX_PROCESSES = 32
"""Processes that are shown."""
MAX_SPANS = 600
"""Spans of a process that are shown; the shortest are left out."""
IDLE_PREFIX = "idle: "
"""Begins the names of the spans in which a worker waits."""
_MAX_DEPTH = 6

Spans = Sequence[tuple[str, str, float, float]]
"""Thread, name, begin and duration in milliseconds."""


@dataclass
class Process:
    """One process of a step. Times are in milliseconds from the first record of the step, memory is in MiB."""

    name: str
    spans: list[tuple[str, float, float, int]] = field(default_factory=list)
    """Name, begin, duration, and row. Spans in one row do not overlap."""
    idle: dict[str, float] = field(default_factory=dict)
    """Milliseconds in which the worker waited, by what it waited for; the largest first."""
    idle_spans: list[tuple[str, float, float]] = field(default_factory=list)
    """The same as spans: what it waited for, begin, duration."""
    memory: list[Json] = field(default_factory=list)
    """At each boundary: `after` (its name), `at`, `owners` (MiB by owner), `peak` and `process`."""
    omitted_spans: int = 0


@dataclass(frozen=True)
class Timeline:
    """One step."""

    milliseconds: float
    processes: list[Process]
    """The controller comes first."""
    omitted_processes: int


def read_timeline(document: Json) -> Timeline | None:
    """Reads a timeline in the Trace Event Format; None if no process has a span that takes time. Events that cannot be
    read are skipped."""
    entries = document.get("traceEvents")
    events = [event for event in entries if isinstance(event, dict)] if isinstance(entries, list) else []
    names = {}
    for event in events:
        arguments, pid = event.get("args"), event.get("pid")
        if event.get("name") == "process_name" and isinstance(arguments, dict) and isinstance(pid, int | str):
            names[pid] = str(arguments.get("name", ""))
    shown = list(names)[:MAX_PROCESSES]
    spans = {pid: list(_spans(event for event in events if event.get("pid") == pid)) for pid in shown}
    end = max((begin + length for found in spans.values() for _, _, begin, length in found), default=0.0)
    if end <= 0:
        return None
    processes = []
    for pid in shown:
        process = Process(names[pid], memory=list(_memory(event for event in events if event.get("pid") == pid)))
        calls = [span for span in spans[pid] if not span[1].startswith(IDLE_PREFIX)]
        process.idle_spans = [
            (name.removeprefix(IDLE_PREFIX), begin, length)
            for _, name, begin, length in spans[pid]
            if name.startswith(IDLE_PREFIX)
        ]
        process.spans, process.omitted_spans = _rows(calls)
        process.idle = _by_cause(process.idle_spans)
        processes.append(process)
    return Timeline(end, processes, len(names) - len(shown))


def _spans(events: Iterable[Json]) -> Iterator[tuple[str, str, float, float]]:
    """Each complete event."""
    for event in events:
        begin, length = event.get("ts"), event.get("dur")
        if event.get("ph") == "X" and is_finite(begin) and is_finite(length):
            yield str(event.get("tid")), str(event.get("name", "")), begin / 1000, max(0.0, length / 1000)


def _rows(spans: Spans) -> tuple[list[tuple[str, float, float, int]], int]:
    """The longest spans with their rows, and how many are left out. Each thread has rows of its own: one for each
    level of nested calls."""
    longest = sorted(spans, key=lambda span: -span[3])[:MAX_SPANS]
    by_thread: dict[str, list[tuple[str, str, float, float]]] = {}
    for span in sorted(longest, key=lambda span: (span[2], -span[3])):
        by_thread.setdefault(span[0], []).append(span)
    placed: list[tuple[str, float, float, int]] = []
    first_row = 0
    for thread in dict.fromkeys(span[0] for span in spans):
        ends: list[float] = []
        for _, name, begin, length in by_thread.get(thread, ()):
            row = next((index for index, end in enumerate(ends) if begin >= end), len(ends))
            ends[row : row + 1] = [begin + length]
            placed.append((name, begin, length, first_row + min(row, _MAX_DEPTH - 1)))
        first_row += min(len(ends), _MAX_DEPTH)
    return placed, len(spans) - len(longest)


def _by_cause(idle: Iterable[tuple[str, float, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for cause, _, length in idle:
        total[cause] = total.get(cause, 0.0) + length
    return dict(sorted(total.items(), key=lambda item: -item[1]))


def _memory(events: Iterable[Json]) -> Iterator[Json]:
    """The counters of one process at each boundary, in order."""
    mark: Json = {}
    for event in events:
        if event.get("ph") != "C":
            continue
        values = event.get("args")
        numbers = (
            {str(key): value for key, value in values.items() if is_finite(value)} if isinstance(values, dict) else {}
        )
        if event.get("name") == MEMORY_TRACK:
            if mark:
                yield mark
            at = event.get("ts")
            mark = {
                "after": str(event.get("cat", "")),
                "at": at / 1000 if is_finite(at) else 0.0,
                "owners": {name: value for name, value in numbers.items() if value},
            }
        elif mark and numbers and event.get("name") in (PEAK_TRACK, PROCESS_TRACK):
            mark["peak" if event.get("name") == PEAK_TRACK else "process"] = max(numbers.values())
    if mark:
        yield mark
