"""What the trainer tells about itself while it runs: one JSON file, replaced atomically."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from rljob_api.base import WireModel
from rljob_api.constants import CONTRACT_VERSION
from rljob_api.scalars import Count, LongText, PositiveCount, ShortText
from rljob_api.v1alpha1.status import CheckpointStatus, Progress, Timestamp


class RunPhase(StrEnum):
    """What the trainer is doing."""

    STARTING = "Starting"
    RUNNING = "Running"
    STOPPING = "Stopping"
    COMPLETE = "Complete"
    FAILED = "Failed"
    STOPPED = "Stopped"


class RunError(WireModel):
    """Why the trainer failed."""

    kind: Annotated[str, Field(max_length=64)]
    """Name of the error class."""
    message: Annotated[str, Field(max_length=4096)]
    role: ShortText | None = None
    """Of the worker that failed first; this and what follows is unset where it was the controller."""
    rank: Count | None = None
    pod: ShortText | None = None
    """This and the node are unset outside of Kubernetes."""
    node: ShortText | None = None


class RunState(WireModel):
    """The newest state of one attempt."""

    contract_version: PositiveCount = CONTRACT_VERSION
    job_name: str
    attempt: PositiveCount
    phase: RunPhase
    progress: Progress
    activity: Annotated[str, Field(max_length=256)] | None = None
    """What is being done and takes long, for people, such as `evaluates`; unset between two such things."""
    checkpoint: CheckpointStatus | None = None
    resumed_from_step: Count | None = None
    export_uri: LongText | None = None
    error: RunError | None = None
    written_at: Timestamp
