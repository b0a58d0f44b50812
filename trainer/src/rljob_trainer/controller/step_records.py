"""Timelines and profiles of single steps."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from rljob_api.v1alpha1.training import Profile
from rljob_trainer.controller.stop_request import StepAbandonedError
from rljob_trainer.errors import described
from rljob_trainer.groups.worker_processes import WorkerProcesses
from rljob_trainer.observability.idle_time import with_idle_time
from rljob_trainer.observability.profiles import profile_file, suffix_of
from rljob_trainer.observability.spans import MAX_KEPT, SPANS, longest
from rljob_trainer.observability.timeline import ProcessSpans, newest_timeline_file, timeline_file, write_timeline
from rljob_trainer.workers.protocols import ActorGroup

log = logging.getLogger(__name__)

SPANS_OF_NEWEST = 4_000
"""Spans in the timeline of the newest step, of all processes."""
MIN_SPANS_OF_NEWEST = 100
"""Spans that each process has in it, even if there are then more in total."""


class StepTimeline:
    """Writes the timelines of some steps, and `timelines/newest.json`. Call `begin` before each step and `end` after
    it. A file that cannot be written does not end the run."""

    def __init__(self, run_folder: Path, steps: Sequence[int], processes: Mapping[str, WorkerProcesses]) -> None:
        """`steps`: the numbers of the steps whose timeline is kept, from 1. `processes`: the worker processes by the
        name of their pool."""
        self.run_folder = run_folder
        self.steps = frozenset(steps)
        self.processes = processes
        num_processes = 1 + sum(len(each.handles) for each in processes.values())
        self.max_spans = max(MIN_SPANS_OF_NEWEST, SPANS_OF_NEWEST // num_processes)
        """Spans of a process in `newest.json`."""
        self._is_recorded = False
        self._has_failed = False

    def begin(self, step: int, *, is_recorded: bool) -> None:
        """Drops everything that was recorded before the step. `is_recorded`: whether the step is written to
        `newest.json`; steps whose timeline is kept always are."""
        self._is_recorded = step in self.steps or (is_recorded and not self._has_failed)
        if self._is_recorded:
            SPANS.take()
            for processes in self.processes.values():
                processes.drop_spans()

    def end(self, step: int) -> None:
        """Writes the step's timeline. Raises WorkerDiedError."""
        if not self._is_recorded:
            return
        rows = self._take()
        if step in self.steps and self._write(path := timeline_file(self.run_folder, step), step, rows, MAX_KEPT):
            log.info("timeline of step %d: %s", step, path)
        self._has_failed = not self._write(newest_timeline_file(self.run_folder), step, rows, self.max_spans)

    def _write(self, path: Path, step: int, rows: Sequence[ProcessSpans], max_spans: int) -> bool:
        """Returns whether the file was written. `max_spans`: of each process."""
        try:
            few = [ProcessSpans(each.name, longest(each.spans, max_spans)) for each in with_idle_time(rows)]
            write_timeline(path, step, few)
        except Exception as error:
            log.warning("%s: the timeline cannot be written (%s)", path, described(error))
            return False
        return True

    def _take(self) -> list[ProcessSpans]:
        rows = [ProcessSpans("controller", SPANS.take())]
        for name, processes in self.processes.items():
            rows += [
                ProcessSpans(f"{name}, rank {rank}, {address}", spans)
                for rank, (address, spans) in enumerate(processes.take_spans())
            ]
        return rows


class StepProfiles:
    """Lets the actor's workers profile some steps."""

    def __init__(self, run_folder: Path, profile: Profile | None, actor: ActorGroup) -> None:
        self.run_folder = run_folder
        self.steps = frozenset(profile.steps if profile else ())
        self.ranks = profile.ranks if profile else ()
        self.suffix = suffix_of(profile.type) if profile else ""
        self.actor = actor

    @contextmanager
    def of_step(self, step: int) -> Iterator[None]:
        """The block is the step; does nothing for steps without a profile. The profile of an abandoned step is dropped,
        because a stop leaves little time. Raises WorkerDiedError."""
        if step not in self.steps:
            yield
            return
        self._begin(step)
        try:
            yield
        except StepAbandonedError:
            self.actor.discard_profile()
            raise
        self._end(step)

    def _begin(self, step: int) -> None:
        """A rank that does not exist is only logged, because an elastic job may have fewer workers."""
        num_ranks = len(self.actor.begin_profile(self.ranks, self.run_folder, step))
        absent = sorted({rank for rank in self.ranks if rank >= num_ranks})
        if absent:
            log.warning(
                "spec.training.profile.ranks: the actor has %d workers, so there is no profile of %s; use ranks from 0 "
                "to %d",
                num_ranks,
                ", ".join(map(str, absent)),
                num_ranks - 1,
            )

    def _end(self, step: int) -> None:
        """Writes the profiles of the step; a fault is only logged."""
        for rank, fault in enumerate(self.actor.end_profile()):
            path = profile_file(self.run_folder, step, rank, self.suffix)
            if fault is not None:
                log.warning("%s: the profile cannot be written (%s)", path, fault)
            elif rank in self.ranks:
                log.info("profile of step %d: %s", step, path)
