"""Saving and resuming: the controller's side of `checkpoints`.

Order of a save: space check and folder (controller), copy (all workers; training goes on after it), shards (all
workers, in the background), manifest (controller), then old ones go.

Order of a resume: the newest checkpoint by its manifest and the sizes of its files (controller), announcement of this
start (controller), the tensors (all workers; each compares what it reads), what this start accepts (controller).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue, ValidationError

from rljob_api.base import WireModel
from rljob_api.scalars import Count, Flag, NonNegativeNumber
from rljob_api.tolerant_reading import CHECKPOINT, read_document
from rljob_api.v1alpha1.checkpoint import Checkpoint as CheckpointSpec
from rljob_api.v1alpha1.checkpoint import Resume
from rljob_api.v1alpha1.status import CheckpointStatus
from rljob_trainer.checkpoints.errors import CheckpointError, DamagedError
from rljob_trainer.checkpoints.fencing import accept_up_to, announce_start
from rljob_trainer.checkpoints.layout import CheckpointFolder, Manifest, status_of, tell_unknown
from rljob_trainer.checkpoints.load import Found, find_newest_complete, refuse_existing
from rljob_trainer.checkpoints.retention import prune
from rljob_trainer.checkpoints.save import begin_save, commit, discard_save
from rljob_trainer.controller.auto_settings import AutoSettings
from rljob_trainer.datasets.cursor import CursorState
from rljob_trainer.errors import ConfigurationError
from rljob_trainer.workers.protocols import TrainedGroup

log = logging.getLogger(__name__)


class ControllerState(WireModel):
    """After `step` training steps."""

    job_name: str
    step: Count
    """Also the policy version."""
    cursor: CursorState
    random_states: tuple[JsonValue, ...]
    """One per worker; used where the number of workers is the same. All sampling is seeded by step anyway."""
    is_evaluated: Flag
    """Whether the evaluation that may be due after this step is done; a stop can come before it."""
    kl_coefficient: NonNegativeNumber | None = None
    """Of the next step, where a controller changes it; else the job's is."""
    choices: AutoSettings
    """What the job's `Auto` stood for."""


def state_of(manifest: Manifest) -> ControllerState:
    """The controller's part of a checkpoint, which another version may have written. Raises CheckpointError when it is
    not there or not readable."""
    try:
        reading = read_document(ControllerState, manifest.extra, CHECKPOINT)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        raise CheckpointError(
            f"checkpoint of step {manifest.step}: its state cannot be read ({problem['loc']}: {problem['msg']}); "
            "it was written by another program or version"
        ) from error
    tell_unknown("the checkpoint's state", reading.unknown_fields)
    return reading.value


@dataclass(frozen=True)
class ResumePoint:
    """A checkpoint to go on from."""

    checkpoint: CheckpointFolder
    state: ControllerState
    status: CheckpointStatus
    notes: tuple[str, ...]
    """Why newer checkpoints were passed over, for people."""

    @property
    def folder(self) -> Path:
        """Of the checkpoint."""
        return self.checkpoint.path


@dataclass(frozen=True)
class PendingSave:
    """A save under way: its folder, and the controller's state at the moment of the copy, before the evaluation that
    may be due after the step."""

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
        self.newest: Path | None = None
        """The newest checkpoint that this start has committed or resumed from."""
        self.choices: AutoSettings | None = None
        """What `Auto` in the job stands for in this run; noted in every checkpoint. None until it is decided, which the
        checkpoint that is resumed has a part in."""

    def find(self) -> ResumePoint | None:
        """Where this start begins, and announces it, so that former ones cannot write any more.

        Raises ConfigurationError when resuming is forbidden and there are checkpoints; CheckpointError when there are
        some and none is usable."""
        if self.spec.resume is Resume.NEVER:
            refuse_existing(self.root)
        found = find_newest_complete(self.root, self.start_number, digests=False)
        point = self._point(found) if found else None
        announce_start(self.root, self.start_number)
        if point is None:
            accept_up_to(self.root, self.start_number, None)
        return point

    def load(self, point: ResumePoint, groups: Sequence[TrainedGroup], num_workers: int) -> ResumePoint:
        """Puts the workers where they were. Random generators are only restored on as many workers as there were: of
        the first group, `num_workers` in number.

        Returns `point`, or an older checkpoint where the workers have found that one damaged. Raises CheckpointError
        when none is usable."""
        try:
            _load(groups, point)
        except DamagedError as error:
            point = self._point_before(point, error)
            _load(groups, point)
        accept_up_to(self.root, self.start_number, point.checkpoint)
        self.last_begun_step = point.state.step
        self.newest = point.folder
        states = list(point.state.random_states)
        if len(states) == num_workers:
            groups[0].restore_random_state(states)
        return point

    def is_due(self, step: int, num_steps: int) -> bool:
        """Whether to save after `step` steps of `num_steps`."""
        return step != self.last_begun_step and (step == num_steps or step % self.spec.every_steps == 0)

    def begin(
        self, step: int, cursor: CursorState, groups: Sequence[TrainedGroup], kl_coefficient: float | None = None
    ) -> None:
        """Begins to save the state after `step` steps; returns when it has been copied. No save may be under way. For
        `kl_coefficient` see ControllerState.

        Raises CheckpointError; the checkpoints before stay as they are."""
        assert self.pending is None, "finish the former save first"
        assert self.choices is not None, "decide what `Auto` stands for first"
        sizes = [group.num_checkpoint_bytes() for group in groups]
        folder = begin_save(self.root, step, self.start_number, sum(map(sum, sizes)))
        state = ControllerState(
            job_name=self.job_name,
            step=step,
            cursor=cursor,
            random_states=tuple(groups[0].random_state()),
            is_evaluated=False,
            kl_coefficient=kl_coefficient,
            choices=self.choices,
        )
        first_writer = 0
        for group, each in zip(groups, sizes, strict=True):
            group.begin_checkpoint(folder, first_writer)
            first_writer += len(each)
        self.pending = PendingSave(folder, state)
        self.last_begun_step = step

    def finish(self, groups: Sequence[TrainedGroup], *, wait: bool, is_evaluated: bool) -> CheckpointStatus | None:
        """Makes the save under way a checkpoint when all workers have written, and removes old ones.

        `is_evaluated` tells whether the evaluation that may be due after the step of the save has been done. None where
        no save is under way, or it is not written yet and `wait` is False. Raises CheckpointError; the checkpoints
        before stay as they are."""
        if self.pending is None or not (wait or all(all(group.is_checkpoint_written()) for group in groups)):
            return None
        pending, self.pending = self.pending, None
        try:
            records = [record for group in groups for record in group.finish_checkpoint()]
            state = pending.state.model_copy(update={"is_evaluated": is_evaluated})
            extra = state.model_dump(mode="json", by_alias=True)
            committed = commit(self.root, pending.folder, pending.state.step, self.start_number, records, extra)
        except CheckpointError:
            discard_save(pending.folder)
            raise
        self.newest = pending.folder
        prune(self.root, self.start_number, self.spec.keep)
        return committed

    def _point(self, found: Found) -> ResumePoint:
        state = state_of(found.manifest)
        if state.job_name != self.job_name:
            raise ConfigurationError(
                f"{self.root}: holds checkpoints of the job {state.job_name!r}, this one is {self.job_name!r}; choose "
                "another folder, or give the job its old name"
            )
        status = status_of(found.folder, found.manifest, found.digest)
        notes = tuple(f"passed over damaged checkpoint {rejected}" for rejected in found.rejected)
        return ResumePoint(found.checkpoint, state, status, notes)

    def _point_before(self, point: ResumePoint, error: DamagedError) -> ResumePoint:
        """The newest checkpoint that is sound by every byte. A worker's finding alone gives up no checkpoint: the cause
        can lie in its own machine."""
        found = find_newest_complete(self.root, self.start_number)
        assert found is not None, "there is a committed checkpoint"
        if found.folder == point.folder:
            raise CheckpointError(
                f"{point.folder}: a worker has read it as damaged ({error}), the controller as it was written; check "
                "storage and memory of the workers' nodes"
            ) from error
        return self._point(found)


def _load(groups: Sequence[TrainedGroup], point: ResumePoint) -> None:
    for group in groups:
        group.load_checkpoint(point.folder, point.state.step)
