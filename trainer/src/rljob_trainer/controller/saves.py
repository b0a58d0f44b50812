"""The saves of a run: when one is begun, when it ends, and what the two take of the training's time.

A save is begun after a step, before the step's row of metrics is written, and blocks for the copy. It becomes a
checkpoint when it is on disk: after a later step, before the next save, or at the end of the run. So the step's own row
says what it took, and is in the file before there is a checkpoint from which a resumed run would go on after it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from rljob_trainer.controller.checkpointing import Checkpointing
from rljob_trainer.controller.run_output import RunOutput
from rljob_trainer.controller.run_reporter import RunReporter
from rljob_trainer.datasets.cursor import CursorState
from rljob_trainer.observability.metrics import Metrics
from rljob_trainer.observability.timing import Clock, PhaseTimer
from rljob_trainer.workers.protocols import TrainedGroup

log = logging.getLogger(__name__)


class Saves:
    """Of one start of the trainer. `timing_s/save` is the time of a copy, `timing_s/save_wait` that of waiting until a
    save is on disk and of making it a checkpoint."""

    def __init__(
        self,
        checkpointing: Checkpointing,
        groups: Sequence[TrainedGroup],
        output: RunOutput,
        reporter: RunReporter,
        num_steps: int,
        clock: Clock,
    ) -> None:
        self.checkpointing = checkpointing
        self.groups = groups
        self.output = output
        self.reporter = reporter
        self.num_steps = num_steps
        self.timer = PhaseTimer(clock, reporter.in_phase)
        self.unevaluated_step: int | None = None
        """The step whose evaluation is due and not done; the controller says so."""
        self.in_newest_row: Metrics = {}

    def begin_if_due(self, step: int, cursor: CursorState, kl_coefficient: float | None = None) -> None:
        """After `step` steps, before their row is written. For `kl_coefficient` see ControllerState. Raises
        CheckpointError."""
        self._finish(wait=False)
        if self.checkpointing.is_due(step, self.num_steps):
            self._begin(step, cursor, kl_coefficient)

    def take_seconds(self) -> Metrics:
        """What saves took since the row before; for the row of the newest step."""
        self.in_newest_row = self.timer.take()
        return self.in_newest_row

    def end(self) -> None:
        """Waits for the save under way. Raises CheckpointError."""
        self._finish(wait=True)
        self._write_late_seconds()

    def save_on_request(self, cursor: CursorState, kl_coefficient: float | None = None) -> int:
        """A checkpoint of where the run is, complete; the number of steps in it. Raises CheckpointError."""
        step = self.reporter.state.progress.step
        if step > 0 and step != self.checkpointing.last_begun_step:
            self._begin(step, cursor, kl_coefficient)
        self.end()
        return step

    def _begin(self, step: int, cursor: CursorState, kl_coefficient: float | None) -> None:
        """Blocks for the copy, and for the save before if that is still being written."""
        self._finish(wait=True)
        with self.timer.phase("save"):
            self.checkpointing.begin(step, cursor, self.groups, kl_coefficient)

    def _finish(self, *, wait: bool) -> None:
        pending = self.checkpointing.pending
        if pending is None:
            return
        is_evaluated = pending.state.step != self.unevaluated_step
        with self.timer.phase("save_wait"):
            committed = self.checkpointing.finish(self.groups, wait=wait, is_evaluated=is_evaluated)
        if committed:
            log.info("checkpoint of step %d is complete", committed.step)
            self.reporter.checkpoint_saved(committed)

    def _write_late_seconds(self) -> None:
        """What came after the newest step's row: the last wait, and a save on request."""
        late = self.timer.take()
        if late:
            # Of two values for one step readers take the last, so it has to hold both.
            total = {name: self.in_newest_row.get(name, 0.0) + seconds for name, seconds in late.items()}
            self.output.saved(self.reporter.state.progress.step, total)
