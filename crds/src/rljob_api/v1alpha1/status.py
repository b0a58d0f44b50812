"""The status of a job, which the operator writes: conditions, progress, checkpoints, attempts and the result."""

from __future__ import annotations

import re
from datetime import datetime
from enum import StrEnum
from typing import Annotated

from pydantic import AfterValidator, Field

from rljob_api.base import WireModel
from rljob_api.scalars import Count, FiniteNumber, Integer, LongText, PositiveCount, ShortText

FIRST_YEAR, LAST_YEAR = 1970, 2999
"""Valid years of a timestamp. No correct clock shows other years, and adding a deadline to such a time cannot
overflow."""


def _valid_timestamp(text: str) -> str:
    """Checks a timestamp. The API server rejects a status with an invalid timestamp, so the timestamps in a run state
    are checked when the operator reads it."""
    if not re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,9})?(Z|[+-]\d\d:\d\d)", text, re.ASCII):
        raise ValueError("must be a time such as 2026-01-31T12:00:00Z")
    if not FIRST_YEAR <= datetime.fromisoformat(text).year <= LAST_YEAR:
        raise ValueError(f"must be a time in the years {FIRST_YEAR} to {LAST_YEAR}")
    return text


Timestamp = Annotated[str, AfterValidator(_valid_timestamp), Field(json_schema_extra={"format": "date-time"})]
"""A time in the format of RFC 3339, for example `2026-01-31T12:00:00Z`."""

StartNumber = Annotated[Integer, Field(ge=0)]
"""A number that grows with every start of a trainer: about seconds since the epoch, so it may exceed 2^31."""


class ConditionStatus(StrEnum):
    """Status of the condition: True, False, or Unknown."""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class Condition(WireModel):
    """One observation about the job, in the form of Kubernetes conditions."""

    type: ShortText
    """Name of the condition, for example Progressing."""
    status: ConditionStatus
    reason: ShortText
    """Why the condition has this status, in one word, for example Training; see docs/troubleshooting.md."""
    message: Annotated[str, Field(max_length=1024)] = ""
    """Details for people."""
    observed_generation: Count = 0
    """metadata.generation of the job that the condition is based on."""
    last_transition_time: Timestamp
    """When `status` of this condition last changed."""


class Progress(WireModel):
    """Progress of the training, up to 15 seconds behind the trainer, or 35 with 1,000 running jobs."""

    step: Count
    """Number of completed steps."""
    total_steps: Count
    """Number of steps of the job."""
    reward_mean: FiniteNumber | None = None
    """Mean reward of the responses of the last step. In the status of a job, `rewardMean`, `evalScore` and
    `tokensPerSecond` are rounded to four significant digits."""
    eval_score: FiniteNumber | None = None
    """Greedy score of the newest evaluation, the first of training.evaluations; without greedy responses, the mean
    score of the sampled ones."""
    tokens_per_second: FiniteNumber | None = None
    """Throughput of the last step in tokens per second."""
    updated_at: Timestamp
    """When the trainer wrote these numbers."""
    eta_seconds: Count | None = None
    """Estimated seconds until the last step is completed."""


class CheckpointStatus(WireModel):
    """The newest complete checkpoint."""

    step: Count
    """Step after which the checkpoint was saved."""
    uri: LongText
    """Location, for example `pvc://claim/folder/checkpoints/step-00000020.start-0001`."""
    digest: ShortText
    """Hash of the checkpoint's manifest."""
    saved_at: Timestamp
    """When the checkpoint was completed."""


class AttemptOutcome(StrEnum):
    """Outcome of an attempt; Running until it ends."""

    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    STOPPED = "Stopped"


class AttemptState(StrEnum):
    """State of an attempt."""

    QUEUED = "Queued"
    """Its cluster is suspended until a queue (Kueue) admits it."""
    PROVISIONING = "Provisioning"
    """Its cluster is being created or is starting, and its trainer is not yet submitted to Ray."""
    STARTING = "Starting"
    """Its trainer loads the model and creates its workers."""
    RUNNING = "Running"
    """Its trainer executes steps."""
    STOPPING = "Stopping"
    """Its trainer was asked to save a checkpoint and exit."""
    ENDED = "Ended"


class FailureClass(StrEnum):
    """Cause of the end of an attempt, which determines what comes next."""

    CONFIGURATION = "Configuration"
    """The job cannot work as written: no retry."""
    APPLICATION = "Application"
    """The training or user code failed: retry, limited by `runPolicy.maxAppRetries`."""
    INFRASTRUCTURE = "Infrastructure"
    """A pod, node, GPU, memory or the network failed: retry, limited by `runPolicy.maxInfraRetries`."""
    RESUMABLE = "Resumable"
    """Stopped on purpose, or Kubernetes had no free nodes or removed pods: resumed later, uses no retry."""
    FINAL = "Final"
    """Stopped on purpose by a deadline or a user: no retry."""


class StopRequest(WireModel):
    """Request to stop an attempt."""

    reason: ShortText
    """Why the attempt is stopped, in one word."""
    message: Annotated[str, Field(max_length=512)] | None = None
    """Details for people."""
    requested_at: Timestamp
    """When the operator decided to stop the attempt."""
    sent_at: Timestamp | None = None
    """When the operator asked Ray to stop the trainer; unset until then. For a stalled trainer: when its time to write
    stack traces began."""


class PoolNodes(WireModel):
    """Number of worker pods of a pool that an attempt uses."""

    name: ShortText
    """Name of the pool."""
    nodes: Count
    """Number of worker pods."""


class Attempt(WireModel):
    """One try to complete the job: its RayCluster, new or reused, and at most one start of the trainer on it.

    All times, except `runStateAt`, are those at which the operator observed the event."""

    number: PositiveCount
    """Number of the attempt, from 1."""
    cluster: ShortText
    """Name of the RayCluster."""
    cluster_uid: ShortText | None = None
    """UID of the RayCluster, set once it was observed. If the cluster is missing later, somebody deleted it."""
    state: ShortText = AttemptState.PROVISIONING.value
    """One of Queued, Provisioning, Starting, Running, Stopping, Ended."""
    submissions: Count = 0
    """Number of submissions of the trainer to Ray: 0 or 1.

    It is set to 1 just before the submission, so that an operator that is restarted does not submit the trainer
    twice."""
    start_number: StartNumber | None = None
    """Fencing number of the trainer. It grows with every start; checkpoints that an older start saves later are not
    used."""
    started: Timestamp
    """When the attempt started."""
    name_taken_since: Timestamp | None = None
    """When the operator first saw that a RayCluster of another owner has the name of this attempt's cluster; unset if
    none has."""
    active_since: Timestamp | None = None
    """Start of the time that counts for both deadlines: when its RayCluster was first observed without being suspended;
    for a reused cluster, when the attempt started or the queue (Kueue) admitted the cluster. After a wait for nodes,
    both count from `scheduledAt` instead. If the cluster cannot be created, the provisioning deadline counts from
    `started`."""
    scheduled_at: Timestamp | None = None
    """`activeSince`, later by the time that the attempt has waited for free nodes or quota; unset if it has not
    waited. After the first wait, this is when all pods had nodes."""
    ready_at: Timestamp | None = None
    """When all pods were ready and had joined Ray for the first time."""
    head_pod_uid: ShortText | None = None
    """UID of the head pod at `readyAt`."""
    running_since: Timestamp | None = None
    """When Ray first listed the trainer."""
    progressed_at: Timestamp | None = None
    """When the trainer last made progress. While it makes progress, this time is updated about once a minute."""
    run_state_at: Timestamp | None = None
    """Time in the trainer's run state at `progressedAt`, by the clock of the trainer's node. The operator only checks
    whether this time has changed."""
    state_unknown_since: Timestamp | None = None
    """Since when the trainer's state is unknown; unset while it is known."""
    end_reported_at: Timestamp | None = None
    """When the trainer or Ray first reported that the trainer has ended.

    The operator then waits up to 30 seconds, or twice the grace period for a process that does not exit, for the
    details."""
    trainer_may_run: bool = False
    """Whether the attempt ended before its trainer was seen to end. Then its cluster is deleted, even with
    `runPolicy.cleanup: KeepCluster`."""
    stop: StopRequest | None = None
    """Request to stop the attempt; unset if there is none."""
    ended: Timestamp | None = None
    """When the attempt ended; unset until then."""
    outcome: ShortText = AttemptOutcome.RUNNING.value
    """One of Running, Succeeded, Failed, Stopped."""
    reason: ShortText | None = None
    """Why the attempt ended, in one word, for example OutOfMemory."""
    message: Annotated[str, Field(max_length=512)] | None = None
    """Why the attempt ended: details for people."""
    failure_class: ShortText | None = None
    """One of Configuration, Application, Infrastructure, Resumable, Final; unset if it succeeded or has not ended."""
    failure_cause: ShortText | None = None
    """What the trainer or a pod had too little of: DeviceMemory (a GPU) or HostMemory (a machine or container); unset
    for all other causes."""
    failed_pod: ShortText | None = None
    """Pod in which the failure began, for example `my-job-1-main-worker-abcde`; unset if unknown."""
    nodes: Annotated[tuple[PoolNodes, ...], Field(max_length=8)] = ()
    """Worker pods of each pool, if the attempt runs on fewer than the job requests (`runPolicy.elastic`); else empty.
    """
    all_nodes_since: Timestamp | None = None
    """Since when all requested worker pods are ready, if the attempt runs on fewer."""
    resumed_from_step: Count | None = None
    """Step of the checkpoint from which the attempt resumed; unset if the attempt started at step 0."""
    checkpoint_step: Count | None = None
    """Step of the newest checkpoint that the attempt saved."""

    @property
    def counted_since(self) -> str | None:
        """Since when it counts toward both deadlines; None before its RayCluster is active."""
        return self.scheduled_at or self.active_since


class Counters(WireModel):
    """Counters over the whole life of the job, also of attempts that are no longer listed."""

    attempts: Count = 0
    """Number of the newest attempt."""
    start_number: StartNumber = 0
    """Fencing number of the newest start of a trainer."""
    application_retries: Count = 0
    """Retries used of `runPolicy.maxAppRetries`. Reset to 0 at a failure if the newest checkpoint is later than at
    every earlier failure, and by `rljob retry`."""
    infrastructure_retries: Count = 0
    """Retries used of `runPolicy.maxInfraRetries`; reset together with `applicationRetries`."""
    failed_attempts: Count = 0
    """Number of all failed attempts; never reset."""
    active_seconds: Count = 0
    """Total seconds of the attempts that have ended, each from `activeSince` to `ended`; after a wait for nodes, from
    `scheduledAt`."""
    evicted_seconds: Count = 0
    """How long the newest attempts in a row, all evicted before their trainer ran, have counted toward
    `runPolicy.provisioningDeadlineSeconds`."""
    checkpoint_step: Count | None = None
    """Step of the newest checkpoint when the retry counters were last reset after progress."""
    uncounted_restarts: Count = 0
    """Attempts that ended because of a disruption, or because nodes or ResourceQuota were missing, since
    `applicationRetries` was last reset. Each makes the next backoff longer."""
    short_growths: Count = 0
    """How many times in a row an elastic job resumed on all worker pods, and failed or was disrupted before its next
    checkpoint."""


class NextAttempt(WireModel):
    """The next attempt, and why the previous one ended."""

    reason: ShortText
    """Why the previous attempt ended, in one word."""
    message: Annotated[str, Field(max_length=512)] = ""
    """Why the previous attempt ended: details for people."""
    failure_class: ShortText
    """Failure class of the previous attempt, for example Infrastructure."""
    not_before: Timestamp
    """Earliest start of the next attempt (backoff)."""
    same_cluster: bool = False
    """Whether the next attempt reuses the cluster of the previous one, if that cluster is still healthy."""


class JobResult(WireModel):
    """The result of a finished job."""

    outcome: ShortText
    """Succeeded or Failed."""
    reason: ShortText
    """Why the job has this outcome, in one word, for example OutOfMemory."""
    message: Annotated[str, Field(max_length=1024)] = ""
    """Why the job has this outcome: details for people."""
    at: Timestamp
    """When the job finished."""
    cleaned_up_at: Timestamp | None = None
    """When the deletion of the job's clusters was complete; with `runPolicy.cleanup: KeepCluster`, when only the kept
    cluster was left."""


class HandledRequests(WireModel):
    """Values of the request annotations that the operator has already handled; the SHA-256 of a value that is empty or
    has more than 253 characters."""

    stop: ShortText | None = None
    """Newest handled value of the annotation `rljob.dev/stop-requested-at`."""
    retry: ShortText | None = None
    """Newest handled value of the annotation `rljob.dev/retry-requested-at`."""


class JobPods(WireModel):
    """Image and user of the pods."""

    image: Annotated[str, Field(max_length=1024)]
    image_pull_policy: ShortText
    # Unset if the cluster chooses the user. No description and no limits: the CRD is close to its limit of bytes.
    run_as_user: Integer | None = None


class PoolStatus(WireModel):
    """Number of worker pods of one pool."""

    name: ShortText
    """Name of the pool."""
    desired: Count
    """Number of requested pods."""
    ready: Count
    """Number of ready pods."""


class RLJobStatus(WireModel):
    """State of the job, written by the operator only. docs/spec-reference.md describes all fields."""

    observed_generation: Count = 0
    """metadata.generation of the job that this status is based on."""
    phase: ShortText | None = None
    """Summary in one word, for people; unset until an operator has processed the job. Programs should read the
    conditions."""
    reason: ShortText | None = None
    """Why the job is in this phase, for people: the reason of the most important condition."""
    gpus: Count | None = None
    """Number of GPUs that the job uses or waits for."""
    conditions: Annotated[tuple[Condition, ...], Field(max_length=16)] = ()
    """Observations about the job; docs/troubleshooting.md explains each reason."""
    progress: Progress | None = None
    checkpoint: CheckpointStatus | None = None
    alarms: Annotated[tuple[ShortText, ...], Field(max_length=16)] = ()
    """Alarms of the training by reason, most serious first."""
    attempts: Annotated[tuple[Attempt, ...], Field(max_length=64)] = ()
    """The newest attempts, oldest first."""
    counters: Counters | None = None
    """Counters over the whole life of the job; unset until the operator has seen the job."""
    next_attempt: NextAttempt | None = None
    """The next attempt, while the job is between two attempts."""
    waiting_since: Timestamp | None = None
    """Since when the job waits in a queue, for nodes or for ResourceQuota; unset while it does not."""
    suspended_at: Timestamp | None = None
    """When the job was suspended and its pods were deleted; unset while it is not suspended."""
    result: JobResult | None = None
    """The result; unset until the job finishes."""
    handled_requests: HandledRequests | None = None
    pools: Annotated[tuple[PoolStatus, ...], Field(max_length=8)] = ()
    """Number of worker pods of each pool of the current attempt."""
    pods: JobPods | None = None
    export_uri: LongText | None = None
    """Location of the trained model as a Hugging Face folder, for example `pvc://claim/folder/run/export`."""
