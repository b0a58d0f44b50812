"""The timeline of one step, as a file for https://ui.perfetto.dev or chrome://tracing.

The form is the Trace Event Format (Duffy, Sinclair et al., "Trace Event Format", 2016): complete events ("X") with
times in microseconds, one row per process and thread. Clocks of different nodes are compared as they are.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rljob_trainer.observability.spans import Span

FOLDER = "timelines"
"""In the run folder."""


@dataclass(frozen=True)
class ProcessSpans:
    """One row of the timeline: a process and what it did."""

    name: str
    spans: Sequence[Span]


def timeline_file(run_folder: Path, step: int) -> Path:
    """Where the timeline of a step (from 1) is."""
    return run_folder / FOLDER / f"step-{step:06d}.json"


def write_timeline(path: Path, processes: Sequence[ProcessSpans]) -> None:
    """Writes the processes in the order given, the earliest span at 0; all of the file or nothing. Raises OSError."""
    begin = min((span.started for process in processes for span in process.spans), default=0.0)
    events: list[dict[str, object]] = []
    for number, process in enumerate(processes):
        about = {"ph": "M", "pid": number, "tid": 0}
        events.append({**about, "name": "process_name", "args": {"name": process.name}})
        events.append({**about, "name": "process_sort_index", "args": {"sort_index": number}})
        for span in sorted(process.spans, key=lambda span: (span.started, -span.ended)):
            events.append(
                {
                    "ph": "X",
                    "name": span.name,
                    "cat": span.name.partition(".")[0],
                    "pid": number,
                    "tid": span.thread,
                    "ts": round((span.started - begin) * 1e6, 1),
                    "dur": round((span.ended - span.started) * 1e6, 1),
                }
            )
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    try:
        unfinished.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
