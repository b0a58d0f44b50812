"""The state that a trainer reports while it runs: one JSON file, replaced atomically."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from rljob_api.base import WireModel
from rljob_api.constants import CONTRACT_VERSION
from rljob_api.scalars import Count, FiniteNumber, LongText, PositiveCount, ShortText
from rljob_api.v1alpha1.status import CheckpointStatus, Progress, Timestamp


class RunPhase(StrEnum):
    """Phase of the trainer."""

    STARTING = "Starting"
    RUNNING = "Running"
    STOPPING = "Stopping"
    COMPLETE = "Complete"
    FAILED = "Failed"
    STOPPED = "Stopped"


class RunError(WireModel):
    """Why the trainer failed."""

    kind: Annotated[str, Field(max_length=64)]
    """Name of the exception class, such as `WorkerDiedError`."""
    message: Annotated[str, Field(max_length=4096)]
    cause: ShortText | None = None
    """One of `constants.ErrorCause`; unset for all other causes. A newer trainer may report a cause that is not in
    it."""
    role: ShortText | None = None
    """Role of the worker that failed first, such as `actor`. This field and the following ones are unset if the error
    comes from no worker."""
    rank: Count | None = None
    """Rank of that worker within its role."""
    pod: ShortText | None = None
    """Pod of that worker; unset outside Kubernetes."""
    node: ShortText | None = None
    """Kubernetes node of that worker; unset outside Kubernetes."""


class Alarm(WireModel):
    """An observation in the metrics of the last steps which suggests that the training does not work as intended. The
    training continues."""

    reason: Annotated[str, Field(max_length=64, pattern=r"^[A-Z][A-Za-z0-9]*$")]
    """One of `conditions.ALARMS`. A newer trainer may report a reason that is not in it."""
    value: FiniteNumber | None = None
    """The observed number, such as 0.4 for 40 % of the responses; unset if it was not finite."""
    message: Annotated[str, Field(max_length=512)]
    """For people: the number, what is usual, and what to do."""
    since_step: Count | None = None
    """Step, from 1, after which the alarm was raised. Trainers set this field and the next one; they are unset in a
    state that was made from the status of a job."""
    step: Count | None = None
    """Newest step in which the number was outside its usual range."""

    @property
    def steps(self) -> str:
        """Both steps for people, such as `since step 3, last in step 9`; empty if they are unset."""
        if self.since_step is None or self.step is None:
            return ""
        last = f", last in step {self.step}" if self.step > self.since_step else ""
        return f"since step {self.since_step}{last}"


class BestCheckpoint(WireModel):
    """A checkpoint and its value of the metric in `spec.checkpoint.keepBest`."""

    step: Count
    value: FiniteNumber


class RunState(WireModel):
    """The newest state of the trainer of one attempt."""

    contract_version: PositiveCount = CONTRACT_VERSION
    job_name: str
    attempt: PositiveCount
    """Number of the attempt, from 1."""
    phase: RunPhase
    progress: Progress
    activity: Annotated[str, Field(max_length=256)] | None = None
    """The newest long activity within or between steps, for people, such as `evaluates`; unset before the first one."""
    checkpoint: CheckpointStatus | None = None
    """The newest complete checkpoint; unset if there is none."""
    best: BestCheckpoint | None = None
    """The complete checkpoint with the best value; unset without `checkpoint.keepBest`, or if there is none yet."""
    resumed_from_step: Count | None = None
    """Step of the checkpoint from which the attempt resumed; unset if the attempt started at step 0."""
    export_uri: LongText | None = None
    """Location of the exported model; unset until the model is exported. The best checkpoint's is in `export-best`
    beside it, if that is not the last one."""
    alarms: Annotated[tuple[Alarm, ...], Field(max_length=16)] | None = None
    """The alarms that are raised, most serious first; unset until the training starts or resumes, and for trainers that
    report no alarms."""
    error: RunError | None = None
    """Why the trainer failed; set in phase Failed."""
    written_at: Timestamp
