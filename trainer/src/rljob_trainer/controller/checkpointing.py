"""Saving and resuming: the controller's side of `checkpoints`.

Order of a save: space check and folder (controller), shards (all workers), manifest (controller), then old ones go.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from rljob_api.v1alpha1.checkpoint import Checkpoint as CheckpointSpec
from rljob_api.v1alpha1.checkpoint import Resume
from rljob_trainer.checkpoints.attempts import start_attempt
from rljob_trainer.checkpoints.load import find_newest_complete, refuse_existing
from rljob_trainer.checkpoints.retention import prune
from rljob_trainer.checkpoints.save import CommittedCheckpoint, begin_save, commit, discard_save
from rljob_trainer.controller.state import ControllerState, state_of
from rljob_trainer.data.cursor import CursorState
from rljob_trainer.errors import TrainerError
from rljob_trainer.workers.protocols import ActorGroup

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ResumePoint:
    """A checkpoint to go on from."""

    folder: Path
    state: ControllerState
    notes: tuple[str, ...]
    """Why newer checkpoints were passed over, for people."""


class Checkpointing:
    """Of one attempt."""

    def __init__(self, spec: CheckpointSpec, root: Path, attempt: int, job_name: str) -> None:
        self.spec = spec
        self.root = root
        self.attempt = attempt
        self.job_name = job_name
        self.last_saved_step: int | None = None

    def find(self) -> ResumePoint | None:
        """Where this attempt begins, and announces it, so that former attempts cannot write any more.

        Raises ConfigurationError when resuming is forbidden and there are checkpoints; CheckpointError when there are
        some and none is usable."""
        if self.spec.resume is Resume.NEVER:
            refuse_existing(self.root)
        found = find_newest_complete(self.root, self.attempt)
        start_attempt(self.root, self.attempt, found.checkpoint if found else None)
        if found is None:
            return None
        self.last_saved_step = found.manifest.step
        notes = tuple(f"passed over damaged checkpoint {rejected}" for rejected in found.rejected)
        return ResumePoint(found.folder, state_of(found.manifest), notes)

    def load(self, point: ResumePoint, actor: ActorGroup) -> None:
        """Puts the workers where they were."""
        actor.load_checkpoint(point.folder, point.state.step)
        states = list(point.state.random_states)
        if len(states) == len(actor.num_checkpoint_bytes()):
            actor.restore_random_state(states)

    def is_due(self, step: int, num_steps: int) -> bool:
        """Whether to save after `step` steps of `num_steps`."""
        return step != self.last_saved_step and (step == num_steps or step % self.spec.every_steps == 0)

    def save(self, step: int, cursor: CursorState, actor: ActorGroup) -> CommittedCheckpoint:
        """Saves the state after `step` steps. Raises CheckpointError; the checkpoints before stay as they are."""
        folder = begin_save(self.root, step, self.attempt, sum(actor.num_checkpoint_bytes()))
        try:
            records = actor.save_checkpoint(folder)
            state = ControllerState(
                job_name=self.job_name, step=step, cursor=cursor, random_states=tuple(actor.random_state())
            )
            committed = commit(
                self.root, folder, step, self.attempt, records, state.model_dump(mode="json", by_alias=True)
            )
        except TrainerError:
            discard_save(folder)
            raise
        self.last_saved_step = step
        prune(self.root, self.attempt, self.spec.keep)
        return committed
