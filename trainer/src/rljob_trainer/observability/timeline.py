"""The timeline of one step, as a file for https://ui.perfetto.dev or chrome://tracing.

The form is the Trace Event Format (Duffy, Sinclair et al., "Trace Event Format", 2016): complete events ("X") with
times in microseconds, one row per process and thread, and counter events ("C"), one track per process and name. Clock
differences between nodes are not corrected.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rljob_trainer.observability.spans import Counts, Record, Span

TIMELINES_FOLDER_NAME = "timelines"
"""Name of the folder in the run folder."""
MEMORY_TRACK, MEMORY_PEAK_TRACK = "memory (MiB)", "peak of memory (MiB)"
PROCESS_MEMORY_TRACK = "process memory (MiB)"
"""Names of the counter tracks of every worker process."""
IDLE_PREFIX = "idle: "
"""Names of spans that begin with it are times in which a worker waits; see `idle_time`."""
IDLE_THREAD = 0
"""The number of the row of a process that has these spans."""


@dataclass(frozen=True)
class ProcessSpans:
    """One process of the timeline, with its spans and counter values."""

    name: str
    spans: Sequence[Record]


def timeline_file(run_folder: Path, step: int) -> Path:
    """Returns the path of the timeline of a step (from 1)."""
    return run_folder / TIMELINES_FOLDER_NAME / f"step-{step:06d}.json"


def newest_timeline_file(run_folder: Path) -> Path:
    """Returns the path of the timeline of the newest step."""
    return run_folder / TIMELINES_FOLDER_NAME / "newest.json"


def write_timeline(path: Path, step: int, processes: Sequence[ProcessSpans]) -> None:
    """Writes the processes in the given order, with times relative to the earliest record. The file is written
    atomically. Raises OSError."""
    moments = (_begin(each) for process in processes for each in process.spans)
    begin = min(moments, default=0.0)
    events: list[dict[str, object]] = []
    for number, process in enumerate(processes):
        about = {"ph": "M", "pid": number, "tid": 0}
        events.append({**about, "name": "process_name", "args": {"name": process.name}})
        events.append({**about, "name": "process_sort_index", "args": {"sort_index": number}})
        if any(isinstance(each, Span) and each.name.startswith(IDLE_PREFIX) for each in process.spans):
            events.append({**about, "name": "thread_name", "tid": IDLE_THREAD, "args": {"name": "idle"}})
        for each in sorted(process.spans, key=lambda each: (_begin(each), -_end(each))):
            events.append(_event(number, each, begin))
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    try:
        unfinished.write_text(json.dumps({"step": step, "traceEvents": events, "displayTimeUnit": "ms"}))
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _begin(record: Record) -> float:
    return record.at if isinstance(record, Counts) else record.started


def _end(record: Record) -> float:
    return record.at if isinstance(record, Counts) else record.ended


def _event(process: int, record: Record, begin: float) -> dict[str, object]:
    at = round((_begin(record) - begin) * 1e6, 1)
    if isinstance(record, Counts):
        return {
            "ph": "C",
            "name": record.track,
            "cat": record.after,
            "pid": process,
            "tid": 0,
            "ts": at,
            "args": dict(record.values),
        }
    return {
        "ph": "X",
        "name": record.name,
        "cat": "idle" if record.name.startswith(IDLE_PREFIX) else record.name.partition(".")[0],
        "pid": process,
        "tid": record.thread,
        "ts": at,
        "dur": round((record.ended - record.started) * 1e6, 1),
    }
