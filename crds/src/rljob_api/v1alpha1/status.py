"""What the operator reports."""

from __future__ import annotations

import re
from datetime import datetime
from enum import StrEnum
from typing import Annotated

from pydantic import AfterValidator, Field

from rljob_api.base import WireModel
from rljob_api.scalars import Count, FiniteNumber, Integer, LongText, PositiveCount, ShortText

FIRST_YEAR, LAST_YEAR = 1970, 2999
"""No clock shows other years, and deadlines are added to times, so there must be room around them."""


def _moment(text: str) -> str:
    """An API server refuses a status with any other text, so a trainer's is checked where it is read."""
    if not re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,9})?(Z|[+-]\d\d:\d\d)", text, re.ASCII):
        raise ValueError("must be a time such as 2026-01-31T12:00:00Z")
    if not FIRST_YEAR <= datetime.fromisoformat(text).year <= LAST_YEAR:
        raise ValueError(f"must be a time of the years {FIRST_YEAR} to {LAST_YEAR}")
    return text


Timestamp = Annotated[str, AfterValidator(_moment), Field(json_schema_extra={"format": "date-time"})]
"""RFC 3339 in UTC, for example `2026-01-31T12:00:00Z`."""

StartNumber = Annotated[Integer, Field(ge=0)]
"""Seconds since the epoch and a little more, so it has no bound as counts have."""


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
    reward_mean: FiniteNumber | None = None
    eval_score: FiniteNumber | None = None
    """Greedy score of the newest evaluation."""
    tokens_per_second: FiniteNumber | None = None
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


class AttemptState(StrEnum):
    """How far an attempt is."""

    PROVISIONING = "Provisioning"
    """Its cluster is made, or made ready, and Ray does not know its trainer yet."""
    STARTING = "Starting"
    """Its trainer loads the model and builds its workers."""
    RUNNING = "Running"
    """Its trainer does steps."""
    STOPPING = "Stopping"
    """Its trainer is to save and end."""
    ENDED = "Ended"


class FailureClass(StrEnum):
    """Whose fault the end of an attempt is, and so what follows from it."""

    CONFIGURATION = "Configuration"
    """The job cannot work as written: no other try."""
    APPLICATION = "Application"
    """The training or the user's code failed: `runPolicy.maxAppRetries`."""
    INFRASTRUCTURE = "Infrastructure"
    """A pod, a node, memory or the network: `runPolicy.maxInfraRetries`."""
    FREE = "Free"
    """Ended on purpose, to go on later; counts against no budget."""
    FINAL = "Final"
    """Ended on purpose, and for good: a deadline, or somebody who stopped it."""


class StopRequest(WireModel):
    """That an attempt is to end, and why."""

    reason: ShortText
    message: Annotated[str, Field(max_length=512)] | None = None
    """More of why, where there is more to say."""
    requested_at: Timestamp
    told_at: Timestamp | None = None
    """When Ray could be asked to stop the trainer."""


class PoolNodes(WireModel):
    """How many nodes of a pool an attempt uses."""

    name: ShortText
    nodes: Count


class Attempt(WireModel):
    """One start of the trainer, on a cluster of its own or on that of the attempt before it.

    All times are moments at which the operator saw something."""

    number: PositiveCount
    cluster: ShortText
    """Name of the RayCluster."""
    cluster_uid: ShortText | None = None
    """Set once the RayCluster has been seen; if it is gone then, somebody has removed it."""
    state: ShortText = AttemptState.PROVISIONING.value
    submissions: Count = 0
    """1 from when the trainer is about to be submitted."""
    start_number: StartNumber | None = None
    """What the trainer is given to fence earlier starts; grows with every start of the job."""
    started: Timestamp
    name_taken_since: Timestamp | None = None
    """Since when a RayCluster of another owner has had the name."""
    admitted_at: Timestamp | None = None
    """When its cluster was there; what was waited for before does not count against deadlines."""
    ready_at: Timestamp | None = None
    """When all pods were ready and in Ray for the first time."""
    running_since: Timestamp | None = None
    """When Ray was first seen to know the trainer."""
    progressed_at: Timestamp | None = None
    """When the trainer was last seen to have got further, to a minute."""
    run_state_at: Timestamp | None = None
    """What the trainer's clock said then; only compared for equality."""
    silent_since: Timestamp | None = None
    """Since when nothing could be learned of the trainer; unset while it can."""
    ending_seen_at: Timestamp | None = None
    """When the trainer, or Ray, first told that it has ended; what is missing is waited for a little."""
    trainer_may_run: bool = False
    """Whether it ended before its trainer was seen to end; then its cluster is not kept."""
    stop: StopRequest | None = None
    ended: Timestamp | None = None
    outcome: ShortText = AttemptOutcome.RUNNING.value
    """One of Running, Succeeded, Failed, Stopped."""
    reason: ShortText | None = None
    """Why it ended."""
    message: Annotated[str, Field(max_length=512)] | None = None
    """Why it ended, in words."""
    failure_class: ShortText | None = None
    """One of Configuration, Application, Infrastructure, Free, Final; unset where it succeeded or has not ended."""
    nodes: Annotated[tuple[PoolNodes, ...], Field(max_length=8)] = ()
    """Where the attempt runs on fewer nodes than the job asks for; else empty."""
    whole_since: Timestamp | None = None
    """Since when there have been nodes for the whole of the job, where it runs on fewer."""
    resumed_from_step: Count | None = None
    checkpoint_step: Count | None = None
    """Step of the newest checkpoint that it has saved."""


class Counters(WireModel):
    """What is counted over the whole life of the job, whatever of its history is still listed."""

    attempts: Count = 0
    """Number of the newest attempt."""
    start_number: StartNumber = 0
    """Of the newest start of a trainer."""
    application_retries: Count = 0
    """Used of `runPolicy.maxAppRetries`; 0 again once a later checkpoint than ever before has been saved."""
    infrastructure_retries: Count = 0
    """Used of `runPolicy.maxInfraRetries`; 0 again likewise."""
    failed_attempts: Count = 0
    """All that failed, whether or not their tries were given back."""
    active_seconds: Count = 0
    """Of the attempts that have ended: from when their clusters were there to their end."""
    checkpoint_step: Count | None = None
    """Step of the newest checkpoint when a retry was last counted."""


class NextAttempt(WireModel):
    """That another attempt follows, and why the last one did not do."""

    reason: ShortText
    message: Annotated[str, Field(max_length=512)] = ""
    failure_class: ShortText
    not_before: Timestamp
    same_cluster: bool = False
    """Whether the cluster of the attempt before is kept for it, if it is still well by then."""


class JobResult(WireModel):
    """How the job ended."""

    outcome: ShortText
    """Succeeded or Failed."""
    reason: ShortText
    message: Annotated[str, Field(max_length=1024)] = ""
    at: Timestamp
    cleaned_up_at: Timestamp | None = None
    """When nothing was left of its clusters, or what is left was to be kept."""


class HandledRequests(WireModel):
    """Requests by annotation that the operator has seen to, each with the annotation's value."""

    stop: ShortText | None = None
    retry: ShortText | None = None


class PoolStatus(WireModel):
    """Nodes of one pool."""

    name: ShortText
    desired: Count
    ready: Count


class RLJobStatus(WireModel):
    """Written by the operator only."""

    observed_generation: Count = 0
    phase: ShortText | None = None
    """In one word, for people; programs read the conditions."""
    reason: ShortText | None = None
    """Why the job is in this phase, for people: the reason of the condition that matters most."""
    gpus: Count | None = None
    """GPUs that the job holds now, or waits for."""
    conditions: Annotated[tuple[Condition, ...], Field(max_length=16)] = ()
    progress: Progress | None = None
    checkpoint: CheckpointStatus | None = None
    attempts: Annotated[tuple[Attempt, ...], Field(max_length=64)] = ()
    """The newest ones, oldest first."""
    counters: Counters | None = None
    """Unset before the operator has looked at the job."""
    next_attempt: NextAttempt | None = None
    """Set between two attempts."""
    suspended_at: Timestamp | None = None
    """Set while the job is suspended and nothing of it runs any more."""
    result: JobResult | None = None
    """Set once the job has ended."""
    handled_requests: HandledRequests | None = None
    pools: Annotated[tuple[PoolStatus, ...], Field(max_length=8)] = ()
    export_uri: LongText | None = None
    """The trained model as a Hugging Face folder, for example `pvc://claim/folder/run/export`."""
