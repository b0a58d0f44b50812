"""Schedules the saves of a run: when a save starts, when it is committed, and how much training time it takes.

A save starts after a step, before the step's metrics are written, and blocks training during the copy. It is committed
as a checkpoint once it is on disk: after a later step, before the next save, or at the end of the run. So the metrics
of a step include the time of its save, and these metrics are on disk before a run can resume from the checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from rljob_trainer.controller.checkpointing import Checkpointing, StateParts
from rljob_trainer.controller.run_output import RunOutput
from rljob_trainer.controller.run_reporter import RunReporter
from rljob_trainer.observability.metrics import Metrics
from rljob_trainer.observability.timing import Clock, PhaseTimer
from rljob_trainer.workers.protocols import TrainedGroup

log = logging.getLogger(__name__)


class Saves:
    """The saves of one start of the trainer. Metrics: `timing_s/save` is the time of the copy, `timing_s/save_wait` the
    time of waiting until a save is on disk and of committing it."""

    def __init__(
        self,
        checkpointing: Checkpointing,
        part_states: Callable[[], StateParts],
        groups: Sequence[TrainedGroup],
        output: RunOutput,
        reporter: RunReporter,
        num_steps: int,
        clock: Clock,
    ) -> None:
        """`part_states` returns the current state of the controller's parts; it is called when a save starts."""
        self.checkpointing = checkpointing
        self.part_states = part_states
        self.groups = groups
        self.output = output
        self.reporter = reporter
        self.num_steps = num_steps
        self.timer = PhaseTimer(clock, reporter.in_phase)
        self.unevaluated_step: int | None = None
        """The step after which an evaluation is due but not yet done; set by the controller."""
        self.newest_seconds: Metrics = {}
        """The save times among the newest step's metrics."""
        self._is_postponed = False
        """Whether the next step that may be saved is saved, although its number is not due."""
        self._must_not_save = False
        """Whether the newest step must not be saved."""

    def begin_if_due(self, step: int, *, postpones: bool = False) -> None:
        """Starts a save after `step` steps if one is due. `postpones`: this step must not be saved; if a save is due,
        it starts after a later step. Call it before writing the step's metrics. Raises CheckpointError."""
        self._finish(wait=False)
        is_due = self._is_postponed or self.checkpointing.is_due(step, self.num_steps)
        self._is_postponed = is_due and postpones
        self._must_not_save = postpones
        if is_due and not postpones:
            self._begin(step)

    def begin_if_best(self, step: int, metrics: Metrics) -> None:
        """Records the results of the evaluations after `step` steps, and starts a save if they are the best ones and
        this step is not saved yet. Call it after writing the metrics. Raises CheckpointError."""
        best = self.checkpointing.best
        if best is None or step == 0 or self._must_not_save or not best.record(step, metrics):
            return
        if step != self.checkpointing.last_begun_step:
            self._begin(step)
            self._write_late_seconds()

    def take_seconds(self) -> Metrics:
        """Returns the time that saves took since the last call, as metrics for the newest step."""
        self.newest_seconds = self.timer.take()
        return self.newest_seconds

    def end(self) -> None:
        """Waits for the save in progress and commits it. Raises CheckpointError."""
        self._finish(wait=True)
        self._write_late_seconds()

    def save_on_request(self) -> int:
        """Saves and commits a checkpoint of the current state, unless it is already saved or no step is done yet.
        Returns the number of completed steps. Raises CheckpointError."""
        step = self.reporter.state.progress.step
        if step > 0 and step != self.checkpointing.last_begun_step:
            self._begin(step)
        self.end()
        return step

    def _begin(self, step: int) -> None:
        """Starts a save. Blocks during the copy, and first until the previous save is written."""
        self._finish(wait=True)
        with self.timer.phase("save"):
            self.checkpointing.begin(step, self.part_states(), self.groups)

    def _finish(self, *, wait: bool) -> None:
        """Commits and reports the save in progress, if there is one and it is on disk. `wait`: first waits for
        the disk."""
        pending = self.checkpointing.pending
        if pending is None:
            return
        is_evaluated = pending.state.step != self.unevaluated_step
        with self.timer.phase("save_wait"):
            committed = self.checkpointing.finish(self.groups, wait=wait, is_evaluated=is_evaluated)
        if committed:
            log.info("checkpoint of step %d is complete", committed.step)
            best = self.checkpointing.best.up_to(committed.step) if self.checkpointing.best is not None else ()
            self.reporter.checkpoint_saved(committed, *best[:1])

    def _write_late_seconds(self) -> None:
        """Writes the save time that was spent after the newest step's metrics were written: the last wait, and a save
        on request."""
        late = self.timer.take()
        if late:
            # If a step has two values, readers use the last one. So this value must be the total.
            total = {name: self.newest_seconds.get(name, 0.0) + seconds for name, seconds in late.items()}
            self.newest_seconds = {**self.newest_seconds, **total}
            self.output.saved(self.reporter.state.progress.step, total)
