"""What each process did during a step, from a timeline of the run: the spans of each process, the memory at the
boundaries of the step, and how long each worker was idle, by what the controller did in that time.

The trainer records when a worker is idle, and what it waits for, as spans whose names begin with `idle: `. Without them
(timelines of older trainers), a worker counts as idle while none of its threads runs a call, and the controller's phase
says what it waits for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from rljob_page.run_files import Json, is_finite

MEMORY_TRACK, PEAK_TRACK, PROCESS_TRACK = "memory (MiB)", "peak of memory (MiB)", "process memory (MiB)"
"""Names of the counters of every worker process."""
MAX_PROCESSES = 32
"""Processes that are shown; their idle time is computed for these only."""
MAX_SPANS = 600
"""Spans of a process that are shown; the shortest are left out."""
IDLE_PREFIX = "idle: "
"""Begins the names of the spans in which a worker waits."""
BETWEEN_CALLS = "the controller"
_MAX_DEPTH = 6

Interval = tuple[float, float]
"""Begin and end in milliseconds."""


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
    """Reads a timeline in the Trace Event Format; None if the document has no process with spans. Events that cannot be
    read are skipped."""
    entries = document.get("traceEvents")
    events = [event for event in entries if isinstance(event, dict)] if isinstance(entries, list) else []
    names = {}
    for event in events:
        arguments = event.get("args")
        if event.get("name") == "process_name" and isinstance(arguments, dict):
            names[event.get("pid")] = str(arguments.get("name", ""))
    shown = list(names)[:MAX_PROCESSES]
    spans = {pid: list(_spans(event for event in events if event.get("pid") == pid)) for pid in shown}
    if not any(spans.values()):
        return None
    end = max(begin + length for found in spans.values() for _, _, begin, length in found)
    controller = next((pid for pid in shown if names[pid] == "controller"), None)
    phases = [(name, begin, begin + length) for _, name, begin, length in spans.get(controller, ())]
    has_waits = any(name.startswith(IDLE_PREFIX) for found in spans.values() for _, name, _, _ in found)
    processes = []
    for pid in shown:
        process = Process(names[pid], memory=list(_memory(event for event in events if event.get("pid") == pid)))
        calls = [span for span in spans[pid] if not span[1].startswith(IDLE_PREFIX)]
        waits = [
            (name.removeprefix(IDLE_PREFIX), begin, length)
            for _, name, begin, length in spans[pid]
            if name.startswith(IDLE_PREFIX)
        ]
        process.spans, process.omitted_spans = _rows(calls)
        if pid != controller:
            process.idle_spans = waits if has_waits else list(_idle(calls, phases, end))
            process.idle = _by_cause(process.idle_spans)
        processes.append(process)
    return Timeline(end, processes, len(names) - len(shown))


def _spans(events: Iterable[Json]) -> Iterator[tuple[object, str, float, float]]:
    """Thread, name, begin and duration in milliseconds of each complete event."""
    for event in events:
        begin, length = event.get("ts"), event.get("dur")
        if event.get("ph") == "X" and is_finite(begin) and is_finite(length):
            yield event.get("tid"), str(event.get("name", "")), begin / 1000, max(0.0, length / 1000)


def _rows(spans: Sequence[tuple[object, str, float, float]]) -> tuple[list[tuple[str, float, float, int]], int]:
    """The longest spans with their rows, and how many are left out. Each thread has rows of its own: one for each level
    of calls within calls."""
    longest = sorted(spans, key=lambda span: -span[3])[:MAX_SPANS]
    placed: list[tuple[str, float, float, int]] = []
    first_row = 0
    for thread in dict.fromkeys(span[0] for span in spans):
        ends: list[float] = []
        for _, name, begin, length in sorted(
            (span for span in longest if span[0] == thread), key=lambda span: (span[2], -span[3])
        ):
            row = next((index for index, end in enumerate(ends) if begin >= end), len(ends))
            ends[row : row + 1] = [begin + length]
            placed.append((name, begin, length, first_row + min(row, _MAX_DEPTH - 1)))
        first_row += min(len(ends), _MAX_DEPTH)
    return placed, len(spans) - len(longest)


def _idle(
    spans: Sequence[tuple[object, str, float, float]], phases: Sequence[tuple[str, float, float]], end: float
) -> Iterator[tuple[str, float, float]]:
    """The gaps between the spans of a worker, each cut where a phase of the controller begins or ends."""
    for begin, stop in _gaps(((begin, begin + length) for _, _, begin, length in spans), end):
        cuts = sorted({begin, stop, *(cut for _, *both in phases for cut in both if begin < cut < stop)})
        for first, last in pairwise(cuts):
            middle = (first + last) / 2
            cause = next((name for name, start, until in phases if start <= middle < until), None)
            yield BETWEEN_CALLS if cause is None else f"the controller's phase {cause}", first, last - first


def _gaps(busy: Iterable[Interval], end: float) -> Iterator[Interval]:
    """The parts of 0 to `end` that no interval covers."""
    reached = 0.0
    for begin, stop in sorted(busy):
        if begin > reached:
            yield reached, begin
        reached = max(reached, stop)
    if reached < end:
        yield reached, end


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
                "at": at / 1000 if isinstance(at, int | float) else 0.0,
                "owners": {name: value for name, value in numbers.items() if value},
            }
        elif mark and numbers and event.get("name") in (PEAK_TRACK, PROCESS_TRACK):
            mark["peak" if event.get("name") == PEAK_TRACK else "process"] = max(numbers.values())
    if mark:
        yield mark
