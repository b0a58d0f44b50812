"""What the operator reports."""

from __future__ import annotations

import re
from datetime import datetime
from enum import StrEnum
from typing import Annotated

from pydantic import AfterValidator, Field

from rljob_api.base import WireModel
from rljob_api.scalars import Count, LongText, Number, PositiveCount, ShortText


def _moment(text: str) -> str:
    """An API server refuses a status with any other text, so a trainer's is checked where it is read."""
    if not re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,9})?(Z|[+-]\d\d:\d\d)", text, re.ASCII):
        raise ValueError("must be a time such as 2026-01-31T12:00:00Z")
    datetime.fromisoformat(text)
    return text


Timestamp = Annotated[str, AfterValidator(_moment), Field(json_schema_extra={"format": "date-time"})]
"""RFC 3339 in UTC, for example `2026-01-31T12:00:00Z`."""


class ConditionStatus(StrEnum):
    """As in every Kubernetes condition."""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class Condition(WireModel):
    """One observation about the job."""

    type: ShortText
    status: ConditionStatus
    reason: ShortText
    message: Annotated[str, Field(max_length=1024)] = ""
    observed_generation: Count = 0
    last_transition_time: Timestamp


class Progress(WireModel):
    """Where the training is; follows the trainer by some 5 to 15 seconds while it runs."""

    step: Count
    total_steps: Count
    reward_mean: Number | None = None
    eval_score: Number | None = None
    """Greedy score of the newest evaluation."""
    tokens_per_second: Number | None = None
    updated_at: Timestamp
    eta_seconds: Count | None = None


class CheckpointStatus(WireModel):
    """The newest complete checkpoint."""

    step: Count
    uri: LongText
    digest: ShortText
    saved_at: Timestamp


class AttemptOutcome(StrEnum):
    """How an attempt ended, or that it has not."""

    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    STOPPED = "Stopped"


class Attempt(WireModel):
    """One cluster and the runs on it."""

    number: PositiveCount
    cluster: ShortText
    """Name of the RayCluster."""
    cluster_uid: ShortText | None = None
    """Set once the RayCluster has been seen; if it is gone then, somebody has removed it."""
    submissions: Count = 0
    """How often a trainer was submitted to this cluster, the one under way included."""
    started: Timestamp
    ended: Timestamp | None = None
    outcome: AttemptOutcome = AttemptOutcome.RUNNING
    reason: ShortText | None = None
    resumed_from_step: Count | None = None


class PoolStatus(WireModel):
    """Nodes of one pool."""

    name: ShortText
    desired: Count
    ready: Count


class RLJobStatus(WireModel):
    """Written by the operator only."""

    observed_generation: Count = 0
    phase: ShortText | None = None
    """Derived from the conditions, for people; programs read the conditions."""
    conditions: Annotated[tuple[Condition, ...], Field(max_length=16)] = ()
    progress: Progress | None = None
    checkpoint: CheckpointStatus | None = None
    attempts: Annotated[tuple[Attempt, ...], Field(max_length=64)] = ()
    pools: Annotated[tuple[PoolStatus, ...], Field(max_length=8)] = ()
    export_uri: LongText | None = None
    """The trained model as a Hugging Face folder, for example `pvc://claim/folder/run/export`."""
