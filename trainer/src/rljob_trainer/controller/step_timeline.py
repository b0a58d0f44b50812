"""Timelines of the steps that the job names: the controller's phases, and what every worker process did meanwhile."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from rljob_trainer.groups.worker_processes import WorkerProcesses
from rljob_trainer.observability.spans import SPANS
from rljob_trainer.observability.timeline import ProcessSpans, timeline_file, write_timeline

log = logging.getLogger(__name__)


class StepTimeline:
    """`begin` before a step and `end` after it; both do nothing for a step that is not wanted."""

    def __init__(self, run_folder: Path, steps: Sequence[int], processes: Mapping[str, WorkerProcesses]) -> None:
        """`steps` count from 1. `processes` by what people call them."""
        self.run_folder = run_folder
        self.steps = frozenset(steps)
        self.processes = processes

    def begin(self, step: int) -> None:
        """Forgets what was before. Raises WorkerDiedError."""
        if step in self.steps:
            self._take()

    def end(self, step: int) -> None:
        """Writes the file; one that cannot be written is only said. Raises WorkerDiedError."""
        if step not in self.steps:
            return
        path = timeline_file(self.run_folder, step)
        try:
            write_timeline(path, self._take())
        except OSError as error:
            log.warning("%s: the timeline cannot be written (%s)", path, error.strerror)
        else:
            log.info("timeline of step %d: %s", step, path)

    def _take(self) -> list[ProcessSpans]:
        rows = [ProcessSpans("controller", SPANS.take())]
        for name, processes in self.processes.items():
            rows += [
                ProcessSpans(f"{name}, rank {rank}, {address}", spans)
                for rank, (address, spans) in enumerate(processes.take_spans())
            ]
        return rows
