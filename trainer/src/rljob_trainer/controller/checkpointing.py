"""Saving and resuming: the controller's side of `checkpoints`.

Steps of a save: check disk space and create the folder (controller), copy the state (all workers; training continues
afterwards), write the shards (all workers, in the background), write the manifest (controller), remove old checkpoints.

Steps of a resume: find the newest checkpoint by its manifest and the sizes of its files (controller), announce this
start (controller), load the tensors (all workers; each verifies what it reads), record the accepted checkpoint
(controller).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue, ValidationError

from rljob_api.base import WireModel
from rljob_api.scalars import Count, Flag, NonNegativeNumber
from rljob_api.tolerant_reading import CHECKPOINT, read_document
from rljob_api.v1alpha1.checkpoint import Checkpoint as CheckpointSpec
from rljob_api.v1alpha1.checkpoint import Resume
from rljob_api.v1alpha1.status import CheckpointStatus
from rljob_api.yaml_text import wire_path
from rljob_trainer.checkpoints.errors import CheckpointError, DamagedError
from rljob_trainer.checkpoints.fencing import accept_up_to, announce_start, visible_checkpoints
from rljob_trainer.checkpoints.layout import (
    CheckpointFolder,
    Manifest,
    ShardRecord,
    is_committed,
    list_checkpoint_folders,
    status_of,
    warn_of_unknown_fields,
)
from rljob_trainer.checkpoints.load import (
    CheckpointReader,
    Found,
    find_newest_complete,
    open_checkpoint,
    open_known_checkpoint,
    refuse_existing,
)
from rljob_trainer.checkpoints.retention import prune
from rljob_trainer.checkpoints.save import begin_save, commit, discard_save
from rljob_trainer.checkpoints.storage import Location
from rljob_trainer.controller.auto_settings import AutoSettings
from rljob_trainer.controller.evaluations.best_checkpoints import BestCheckpoints, BestState
from rljob_trainer.datasets.cursor import CursorState
from rljob_trainer.datasets.mixture import MixtureState
from rljob_trainer.errors import ConfigurationError
from rljob_trainer.workers.protocols import TrainedGroup

log = logging.getLogger(__name__)


class StateParts(WireModel):
    """The states of the controller's objects that a resumed run continues. Each object has a `state` and a `restore`
    method, which only `Controller.part_states` and `Controller.restore` call. So a new part is a field here and one
    line in each of these two; what saves and loads checkpoints does not change.

    The parts are fields, and not entries of a mapping that the objects read themselves, because a checkpoint is read
    before these objects exist: a checkpoint of another version is refused at once, not after all workers have started.
    A part that some jobs do not have is None by default; its `restore` decides what that means."""

    cursor: CursorState
    """With `training.datasets`: that of the first one."""
    mixture: MixtureState | None = None
    """The positions in all of `training.datasets`."""
    kl_coefficient: NonNegativeNumber | None = None
    """See `KlCoefficient.state`."""


class ControllerState(WireModel):
    """The controller's state after `step` training steps, as stored in a checkpoint."""

    job_name: str
    step: Count
    """Number of completed steps, and the version of the policy's weights."""
    parts: StateParts
    random_states: tuple[JsonValue, ...]
    """One per worker; restored only if the number of workers is the same. Sampling does not need them, because its
    seeds depend on the step."""
    is_evaluated: Flag
    """False if an evaluation is due after this step, but was not done yet, for example because of a stop."""
    choices: AutoSettings
    """The resolved `Auto` settings."""
    best: BestState | None = None
    """The best checkpoints up to this one; None without `keepBest`."""


def state_of(manifest: Manifest) -> ControllerState:
    """Reads the controller's state of a checkpoint, which another version may have written. Raises CheckpointError if
    it is missing or invalid."""
    try:
        reading = read_document(ControllerState, manifest.extra, CHECKPOINT)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        raise CheckpointError(
            f"checkpoint of step {manifest.step}: its controller state is invalid ({wire_path(problem['loc'])}: "
            f"{problem['msg']}); it was written by another program or version of rljob"
        ) from error
    warn_of_unknown_fields("the checkpoint's state", reading.unknown_fields)
    return reading.value


@dataclass(frozen=True)
class ResumePoint:
    """A checkpoint to resume from."""

    checkpoint: CheckpointFolder
    state: ControllerState
    status: CheckpointStatus
    notes: tuple[str, ...]
    """Messages about newer checkpoints that were skipped, and why."""

    @property
    def folder(self) -> Location:
        """The folder of the checkpoint."""
        return self.checkpoint.path


@dataclass(frozen=True)
class PendingSave:
    """A save in progress: its folder, and the controller's state when the workers' state was copied. If an evaluation
    follows the same step, the copy is made before the evaluation."""

    folder: Location
    state: ControllerState


class Checkpointing:
    """Saves and loads the checkpoints of one start of the trainer."""

    def __init__(
        self,
        spec: CheckpointSpec,
        root: Location,
        start_number: int,
        job_name: str,
        best: BestCheckpoints | None = None,
    ) -> None:
        self.spec = spec
        self.root = root
        self.start_number = start_number
        self.job_name = job_name
        self.last_begun_step: int | None = None
        """The number of completed steps at the latest save that was begun, or in the checkpoint that was loaded."""
        self.pending: PendingSave | None = None
        self._committing: Future[CheckpointStatus] | None = None
        """The commit of the save in progress, once it has begun."""
        self.newest: Location | None = None
        """The newest checkpoint that this start has committed or resumed from."""
        self._resumed_from: CheckpointFolder | None = None
        self.best = best
        self.before_commit: Callable[[], None] = lambda: None
        """Called before each commit. Raises nothing."""
        self.choices: AutoSettings | None = None
        """The resolved `Auto` settings, which every checkpoint stores. None until they are resolved; this needs the
        checkpoint to resume from."""

    @property
    def newest_name(self) -> str:
        """The folder name of `newest`; empty if there is none."""
        return self.newest.name if self.newest else ""

    def find(self) -> ResumePoint | None:
        """Finds the checkpoint to resume from (None: start from step 0), and announces this start, which fences earlier
        starts: they can no longer commit checkpoints.

        Raises ConfigurationError if `resume: Never` is set and checkpoints exist, or if the checkpoints belong to
        another job; CheckpointError if checkpoints exist and none is usable."""
        if self.spec.resume is Resume.NEVER:
            refuse_existing(self.root)
        found = find_newest_complete(self.root, self.start_number, digests=False)
        point = self._point(found) if found else None
        announce_start(self.root, self.start_number)
        if point is None:
            accept_up_to(self.root, self.start_number, None)
            self._warn_of_unused()
        return point

    def _warn_of_unused(self) -> None:
        """Logs the checkpoint folders of a run that begins at step 0: it must not lose its progress silently."""
        folders = list_checkpoint_folders(self.root)
        incomplete = [folder.name for folder in folders if not is_committed(folder.path)]
        if folders:
            reason = "it has no manifest" if folders[0].name in incomplete else "a later start did not accept it"
            log.warning(
                f"the run begins at step 0, because none of the {len(folders)} checkpoints in {self.root} can be used "
                f"(newest: {folders[0].name}, {reason}; {len(incomplete)} without a manifest are incomplete)"
            )

    def load(self, point: ResumePoint, groups: Sequence[TrainedGroup], num_workers: int) -> ResumePoint:
        """Loads the checkpoint on all workers. Random states are restored only if the number of workers of the first
        group (`num_workers`) is the same as when the checkpoint was saved.

        Returns `point`, or an older checkpoint if a worker and the controller have found `point` damaged. Raises
        CheckpointError if no checkpoint is usable, or if only a worker finds `point` damaged."""
        try:
            _load(groups, point)
        except DamagedError as error:
            point = self._verified_point(point, error)
            _load(groups, point)
        accept_up_to(self.root, self.start_number, point.checkpoint)
        self.last_begun_step = point.state.step
        self.newest = point.folder
        self._resumed_from = point.checkpoint
        if self.best is not None:
            existing = visible_checkpoints(self.root, self.start_number)
            self.best.restore(point.state.best, {each.step for each in existing})
        states = list(point.state.random_states)
        if len(states) == num_workers:
            groups[0].restore_random_state(states)
        return point

    def is_due(self, step: int, num_steps: int) -> bool:
        """Whether to save after `step` steps of `num_steps`."""
        return step != self.last_begun_step and (step == num_steps or step % self.spec.every_steps == 0)

    def begin(self, step: int, parts: StateParts, groups: Sequence[TrainedGroup]) -> None:
        """Starts a save of the state after `step` steps; returns when the state is copied. No other save may be in
        progress.

        Raises CheckpointError; existing checkpoints stay unchanged."""
        assert self.pending is None, "finish the previous save first"
        assert self.choices is not None, "resolve the `Auto` settings first"
        sizes = [group.num_checkpoint_bytes() for group in groups]
        folder = begin_save(self.root, step, self.start_number, sum(map(sum, sizes)))
        state = ControllerState(
            job_name=self.job_name,
            step=step,
            parts=parts,
            random_states=tuple(groups[0].random_state()),
            is_evaluated=False,
            choices=self.choices,
        )
        first_writer = 0
        for group, each in zip(groups, sizes, strict=True):
            group.begin_checkpoint(folder, first_writer)
            first_writer += len(each)
        self.pending = PendingSave(folder, state)
        self.last_begun_step = step

    def finish(self, groups: Sequence[TrainedGroup], *, wait: bool, is_evaluated: bool) -> CheckpointStatus | None:
        """Commits the save in progress after all workers have written their shards, and removes old checkpoints.

        `is_evaluated`: whether an evaluation that is due after the save's step was done. Returns None if no save is in
        progress, or if it is not written and committed yet and `wait` is False. Raises CheckpointError; existing
        checkpoints stay unchanged."""
        if self.pending is None:
            return None
        if self._committing is None:
            if not (wait or all(all(group.is_checkpoint_written()) for group in groups)):
                return None
            self._committing = self._begin_commit(self.pending, groups, is_evaluated)
        if not (wait or self._committing.done()):
            return None
        pending, committing, self.pending, self._committing = self.pending, self._committing, None, None
        committed = committing.result()
        self.newest = pending.folder
        if self.best is not None:
            self.best.saved(pending.state.step)
        return committed

    def _begin_commit(
        self, pending: PendingSave, groups: Sequence[TrainedGroup], is_evaluated: bool
    ) -> Future[CheckpointStatus]:
        """Commits: in a folder before this returns, in a bucket in a thread, because it takes some ten requests."""
        try:
            records = [record for group in groups for record in group.finish_checkpoint()]
        except CheckpointError:
            self.pending = None
            discard_save(pending.folder)
            raise
        best = self.best.state(pending.state.step) if self.best is not None else None
        state = pending.state.model_copy(update={"is_evaluated": is_evaluated, "best": best})
        if isinstance(self.root, Path):
            committing = Future[CheckpointStatus]()
            try:
                committing.set_result(self._commit(pending.folder, records, state))
            except Exception as error:
                committing.set_exception(error)
            return committing
        pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-commit")
        try:
            return pool.submit(self._commit, pending.folder, records, state)
        finally:
            pool.shutdown(wait=False)

    def _commit(self, folder: Location, records: Sequence[ShardRecord], state: ControllerState) -> CheckpointStatus:
        extra = state.model_dump(mode="json", by_alias=True)
        try:
            self.before_commit()
            committed = commit(self.root, folder, state.step, self.start_number, records, extra)
        except CheckpointError:
            discard_save(folder)
            raise
        best_steps = [each.step for each in state.best.checkpoints] if state.best is not None else []
        prune(self.root, self.start_number, self.spec.keep, best_steps)
        return committed

    def best_checkpoint(self) -> CheckpointFolder | None:
        """The complete checkpoint with the best value; None if there is none."""
        if self.best is None or self.last_begun_step is None:
            return None
        best = self.best.up_to(self.last_begun_step)[:1]
        folders = visible_checkpoints(self.root, self.start_number)
        found = next((folder for folder in folders for each in best if folder.step == each.step), None)
        if found is None:
            seen = f"that of step {best[0].step} no longer exists" if best else "no evaluation had a value that counts"
            log.warning("spec.checkpoint.keepBest: there is no best checkpoint: %s", seen)
        return found

    def opened(self, folder: CheckpointFolder) -> CheckpointReader:
        """Opens a complete checkpoint. Verifies each tensor that is read, unless this start has written the checkpoint
        or resumed from it, and so has hashed its bytes already. Raises DamagedError."""
        is_known = folder.start_number == self.start_number or folder == self._resumed_from
        return open_known_checkpoint(folder.path) if is_known else open_checkpoint(folder.path)

    def _point(self, found: Found) -> ResumePoint:
        """Reads the state of a found checkpoint. Raises ConfigurationError if the checkpoint belongs to another job,
        CheckpointError if its state is invalid."""
        state = state_of(found.manifest)
        if state.job_name != self.job_name:
            raise ConfigurationError(
                f"{self.root}: contains checkpoints of job {state.job_name!r}, but this job is {self.job_name!r}; use "
                "another folder, or rename the job"
            )
        status = status_of(found.folder, found.manifest, found.digest)
        notes = tuple(f"skipped damaged checkpoint {rejected}" for rejected in found.rejected)
        return ResumePoint(found.checkpoint, state, status, notes)

    def _verified_point(self, rejected: ResumePoint, error: DamagedError) -> ResumePoint:
        """Finds the checkpoint to resume from after a worker has rejected one. The controller verifies every byte here.
        A worker's error alone does not prove damage, because the worker's own machine can be the cause."""
        found = find_newest_complete(self.root, self.start_number)
        assert found is not None, "a committed checkpoint exists"
        if found.folder == rejected.folder:
            raise CheckpointError(
                f"{rejected.folder}: a worker reads this checkpoint as damaged ({error}), but the controller reads it "
                "correctly; check the storage and the memory of the workers' nodes"
            ) from error
        return self._point(found)


def _load(groups: Sequence[TrainedGroup], point: ResumePoint) -> None:
    for group in groups:
        group.load_checkpoint(point.folder, point.state.step)
