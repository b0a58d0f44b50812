"""Destinations of metrics. `metrics.jsonl` is always written. It is the only one that plots and resumed runs read."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from rljob_trainer.observability.jsonl import JsonlWriter, remove_rows_after
from rljob_trainer.observability.metrics import Metrics

METRICS_FILE_NAME = "metrics.jsonl"
TENSORBOARD_FOLDER_NAME = "tensorboard"

WallClock = Callable[[], float]
"""Seconds since 1970, such as `time.time`."""


class Sink(Protocol):
    """One destination. `step` never decreases from one call to the next; a step may be written in several calls
    (training, then evaluation)."""

    def write(self, step: int, metrics: Metrics) -> None:
        """Writes the metrics of one step."""

    def close(self) -> None:
        """Writes buffered metrics and closes files."""


class JsonlSink:
    """One row per call: `{"step": 3, "wall_time": 1700000000.0, "critic/rewards/mean": 0.5, ...}`.

    NaN and infinite values are written as null, because JSON does not support them.
    """

    def __init__(self, run_folder: Path, resumed_from_step: int | None, wall_clock: WallClock) -> None:
        """Opens the file, and first removes the rows of steps after `resumed_from_step` (None: a new run, so all rows).

        Raises:
            OSError: the file cannot be written.
        """
        path = run_folder / METRICS_FILE_NAME
        remove_rows_after(path, -1 if resumed_from_step is None else resumed_from_step)
        self._writer = JsonlWriter(path)
        self._wall_clock = wall_clock

    def write(self, step: int, metrics: Metrics) -> None:
        """Appends the row.

        Raises:
            OSError: the row cannot be written.
        """
        row: dict[str, object] = {"step": step, "wall_time": round(self._wall_clock(), 3)}
        for name, value in metrics.items():
            row[name] = float(value) if math.isfinite(value) else None
        self._writer.append(row)

    def close(self) -> None:
        """Closes the file."""
        self._writer.close()


class TensorBoardSink:
    """Scalars in TensorBoard's event format."""

    def __init__(self, run_folder: Path, resumed_from_step: int | None, wall_clock: WallClock) -> None:
        """Opens a new event file. In older event files, the points of steps after `resumed_from_step` (None: a new run,
        so all points) are marked as superseded.

        Raises:
            OSError: the file cannot be written.
        """
        self._wall_clock = wall_clock
        folder = run_folder / TENSORBOARD_FOLDER_NAME
        has_older = folder.is_dir() and any(folder.iterdir())
        self._writer = EventFileWriter(str(folder))
        if has_older:
            first_step = 0 if resumed_from_step is None else resumed_from_step + 1
            restart = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=wall_clock(), step=first_step, session_log=restart))

    def write(self, step: int, metrics: Metrics) -> None:
        """Adds one point per metric."""
        values = [Summary.Value(tag=name, simple_value=float(value)) for name, value in metrics.items()]
        self._writer.add_event(Event(wall_time=self._wall_clock(), step=step, summary=Summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        """Writes buffered points and closes the file."""
        self._writer.close()


class MetricLog:
    """Several sinks as one."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = tuple(sinks)

    def write(self, step: int, metrics: Metrics) -> None:
        """Writes the metrics to every sink, in order.

        Raises:
            OSError: a sink cannot write.
        """
        for sink in self._sinks:
            sink.write(step, metrics)

    def close(self) -> None:
        """Closes every sink."""
        for sink in self._sinks:
            sink.close()
