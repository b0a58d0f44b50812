"""Saving and resuming: the controller's side of `checkpoints`.

Order of a save: space check and folder (controller), copy (all workers; training goes on after it), shards (all
workers, in the background), manifest (controller), then old ones go.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from rljob_api.v1alpha1.checkpoint import Checkpoint as CheckpointSpec
from rljob_api.v1alpha1.checkpoint import Resume
from rljob_api.v1alpha1.status import CheckpointStatus
from rljob_trainer.checkpoints.errors import CheckpointError
from rljob_trainer.checkpoints.fencing import announce_start
from rljob_trainer.checkpoints.load import find_newest_complete, refuse_existing
from rljob_trainer.checkpoints.retention import prune
from rljob_trainer.checkpoints.save import CommittedCheckpoint, begin_save, commit, discard_save
from rljob_trainer.controller.state import ControllerState, state_of
from rljob_trainer.datasets.cursor import CursorState
from rljob_trainer.errors import ConfigurationError
from rljob_trainer.workers.protocols import ActorGroup

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ResumePoint:
    """A checkpoint to go on from."""

    folder: Path
    state: ControllerState
    status: CheckpointStatus
    notes: tuple[str, ...]
    """Why newer checkpoints were passed over, for people."""


@dataclass(frozen=True)
class PendingSave:
    """A save under way: its folder, and the controller's state at the moment of the copy."""

    folder: Path
    state: ControllerState


class Checkpointing:
    """Of one start of the trainer."""

    def __init__(self, spec: CheckpointSpec, root: Path, start_number: int, job_name: str) -> None:
        self.spec = spec
        self.root = root
        self.start_number = start_number
        self.job_name = job_name
        self.last_begun_step: int | None = None
        self.pending: PendingSave | None = None

    def find(self) -> ResumePoint | None:
        """Where this start begins, and announces it, so that former ones cannot write any more.

        Raises ConfigurationError when resuming is forbidden and there are checkpoints; CheckpointError when there are
        some and none is usable."""
        if self.spec.resume is Resume.NEVER:
            refuse_existing(self.root)
        found = find_newest_complete(self.root, self.start_number)
        announce_start(self.root, self.start_number, found.checkpoint if found else None)
        if found is None:
            return None
        state = state_of(found.manifest)
        if state.job_name != self.job_name:
            raise ConfigurationError(
                f"{self.root}: holds checkpoints of the job {state.job_name!r}, this one is {self.job_name!r}; choose "
                "another folder, or give the job its old name"
            )
        self.last_begun_step = state.step
        status = CheckpointStatus(
            step=state.step, uri=found.folder.resolve().as_uri(), digest=found.digest, saved_at=found.manifest.saved_at
        )
        notes = tuple(f"passed over damaged checkpoint {rejected}" for rejected in found.rejected)
        return ResumePoint(found.folder, state, status, notes)

    def load(self, point: ResumePoint, actor: ActorGroup, num_workers: int) -> None:
        """Puts the workers where they were. Random generators are only restored on as many workers as there were."""
        actor.load_checkpoint(point.folder, point.state.step)
        states = list(point.state.random_states)
        if len(states) == num_workers:
            actor.restore_random_state(states)

    def is_due(self, step: int, num_steps: int) -> bool:
        """Whether to save after `step` steps of `num_steps`."""
        return step != self.last_begun_step and (step == num_steps or step % self.spec.every_steps == 0)

    def begin(self, step: int, cursor: CursorState, is_evaluated: bool, actor: ActorGroup) -> None:
        """Begins to save the state after `step` steps; returns when it has been copied. No save may be under way.

        Raises CheckpointError; the checkpoints before stay as they are."""
        assert self.pending is None, "finish the former save first"
        folder = begin_save(self.root, step, self.start_number, sum(actor.num_checkpoint_bytes()))
        state = ControllerState(
            job_name=self.job_name,
            step=step,
            cursor=cursor,
            random_states=tuple(actor.random_state()),
            is_evaluated=is_evaluated,
        )
        actor.begin_checkpoint(folder)
        self.pending = PendingSave(folder, state)
        self.last_begun_step = step

    def finish(self, actor: ActorGroup, *, wait: bool) -> CommittedCheckpoint | None:
        """Makes the save under way a checkpoint when all workers have written, and removes old ones.

        None where no save is under way, or it is not written yet and `wait` is False. Raises CheckpointError; the
        checkpoints before stay as they are."""
        if self.pending is None or not (wait or all(actor.is_checkpoint_written())):
            return None
        pending, self.pending = self.pending, None
        try:
            records = actor.finish_checkpoint()
            extra = pending.state.model_dump(mode="json", by_alias=True)
            committed = commit(self.root, pending.folder, pending.state.step, self.start_number, records, extra)
        except CheckpointError:
            discard_save(pending.folder)
            raise
        prune(self.root, self.start_number, self.spec.keep)
        return committed
