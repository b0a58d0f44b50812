"""Interprets a job's status: how the job finished, what it waits for, which requests are pending, how many retries are
left, where its results are.

The result comes from the operator's record `status.result`, and only without it from the conditions.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from rljob_api.conditions import ConditionType, Reason
from rljob_api.constants import ANNOTATION_RETRY, ANNOTATION_STOP, PHASE_BEFORE_STATUS
from rljob_api.requests import as_recorded, is_later
from rljob_api.v1alpha1.checkpoint import Resume
from rljob_api.v1alpha1.status import Attempt, AttemptOutcome, AttemptState, Condition, ConditionStatus, RLJobStatus
from rljob_cli.cluster.stored_job import StoredJob

UNREADABLE = "?"
"""Shown instead of a value that this version cannot parse."""

_MUST_BE_TRUE = (
    ConditionType.SPEC_VALID,
    ConditionType.QUOTA_RESERVED,
    ConditionType.CLUSTER_READY,
    ConditionType.PLACEMENT_FEASIBLE,
    ConditionType.JOB_SUBMITTED,
    ConditionType.PROGRESSING,
)
"""Conditions that a training job needs, in the order in which they become True."""


@dataclass(frozen=True)
class Ending:
    """How a job finished."""

    kind: str
    """`Complete` or `Failed`; a newer operator may have others."""
    reason: str
    message: str
    at: datetime
    cleaned_up_at: str | None = None
    """The time when the job's RayClusters had been deleted (with `runPolicy.cleanup: KeepCluster`, all except the kept
    one). None before, and if `status.result` cannot be parsed."""

    @property
    def is_complete(self) -> bool:
        """Whether the job succeeded."""
        return self.kind == ConditionType.COMPLETE


def moment(timestamp: str) -> datetime:
    """The time of a timestamp in a status."""
    return datetime.fromisoformat(timestamp)


def condition(status: RLJobStatus, kind: ConditionType) -> Condition | None:
    """The condition of this type; None if the operator has not set it yet."""
    return next((found for found in status.conditions if found.type == kind), None)


def is_true(status: RLJobStatus, kind: ConditionType) -> bool:
    """Whether a condition is True; False if it is not set yet."""
    found = condition(status, kind)
    return found is not None and found.status is ConditionStatus.TRUE


def ending(status: RLJobStatus) -> Ending | None:
    """How the job finished; None if it has not finished."""
    result = status.result
    if result is not None:
        kind = ConditionType.COMPLETE.value if result.outcome == AttemptOutcome.SUCCEEDED else result.outcome
        return Ending(kind, result.reason, result.message, moment(result.at), result.cleaned_up_at)
    for end in (ConditionType.COMPLETE, ConditionType.FAILED):
        found = condition(status, end)
        if found is not None and found.status is ConditionStatus.TRUE:
            return Ending(end.value, found.reason, found.message, moment(found.last_transition_time))
    return None


def waits_for(status: RLJobStatus) -> Condition | None:
    """The first condition that is not True and blocks an unfinished job from training; None if there is none."""
    for kind in _MUST_BE_TRUE:
        found = condition(status, kind)
        if found is not None and found.status is not ConditionStatus.TRUE:
            return found
    return None


def waits_in_queue(job: StoredJob) -> bool:
    """Whether an unfinished job waits in a queue of Kueue, for the first time or after an eviction."""
    return _reason_of_waiting(job) in (Reason.QUEUED, Reason.EVICTED, Reason.QUEUE_CHANGED)


def missing_capacity(job: StoredJob) -> str:
    """What a job with `status.waitingSince` waits for, as in "waits for quota of its queue"."""
    if waits_in_queue(job):
        return "quota of its queue"
    is_about_quota = _reason_of_waiting(job) == Reason.QUOTA_EXCEEDED
    return "quota of a ResourceQuota" if is_about_quota else "quota or free capacity"


def _reason_of_waiting(job: StoredJob) -> str:
    following, found = job.status.next_attempt, waits_for(job.status)
    return following.reason if following is not None else found.reason if found is not None else ""


def phase(job: StoredJob) -> str:
    """The phase for users: `Deleting` while the job is being deleted, `?` if the phase cannot be parsed, `New` before
    an operator has processed the job; else the phase in the status."""
    if job.metadata.deletion_timestamp is not None:
        return "Deleting"
    if job.status.phase is None and is_unparsed(job, "phase"):
        return UNREADABLE
    return job.status.phase or PHASE_BEFORE_STATUS


def reason(job: StoredJob) -> str:
    """The reason for the job's phase, such as `Unschedulable`; empty if there is none."""
    if job.status.reason is not None:
        return job.status.reason
    found = ending(job.status) or waits_for(job.status)
    return "" if found is None else found.reason


def is_unparsed(job: StoredJob, field: str) -> bool:
    """Whether this status field, a part of it, or the whole status cannot be parsed by this version."""
    return any(
        path.startswith(("status (", *(f"status.{field}{end}" for end in " .["))) for path in job.unparsed_fields
    )


def newest_attempt(job: StoredJob) -> Attempt | None:
    """The attempt with the highest number; None before the first."""
    return job.status.attempts[-1] if job.status.attempts else None


def attempt_under_way(job: StoredJob) -> Attempt | None:
    """The newest attempt, if it has not ended."""
    newest = newest_attempt(job)
    return newest if newest is not None and newest.ended is None else None


def attempt_state(attempt: Attempt) -> str:
    """The outcome of an attempt that has ended, else its state. Values that only a newer operator knows are returned
    unchanged."""
    if attempt.ended is not None or attempt.outcome != AttemptOutcome.RUNNING:
        return attempt.outcome
    return attempt.state


def is_running(attempt: Attempt) -> bool:
    """Whether the attempt's trainer is running and was not asked to stop."""
    return attempt_state(attempt) == AttemptState.RUNNING and attempt.stop is None


def stop_asked_at(job: StoredJob) -> str | None:
    """The value of the stop request that the operator has not applied yet, usually a time; None if there is none."""
    return _pending_request(job, ANNOTATION_STOP)


def retry_asked_at(job: StoredJob) -> str | None:
    """The value of the retry request that the operator has not applied yet, usually a time; None if there is none."""
    return _pending_request(job, ANNOTATION_RETRY)


def is_to_be_retried(job: StoredJob) -> bool:
    """Whether a failed job has a retry request that the operator has not applied yet."""
    end = ending(job.status)
    return end is not None and not end.is_complete and retry_asked_at(job) is not None


def stop_is_pending(job: StoredJob) -> bool:
    """Whether there is a stop request that the operator has not applied yet, but will apply. A later retry request of a
    failed job replaces the stop request."""
    asked, retry = stop_asked_at(job), retry_asked_at(job)
    return asked is not None and (not is_to_be_retried(job) or is_later(asked, than=retry))


def application_retries_used(job: StoredJob) -> int:
    """Retries used after application failures; 0 if the job has made progress since its previous failure."""
    counters = job.status.counters
    return counters.application_retries if counters is not None and not _has_made_progress(job) else 0


def infrastructure_retries_used(job: StoredJob) -> int:
    """Retries used after infrastructure failures; 0 if the job has made progress since its previous failure."""
    counters = job.status.counters
    return counters.infrastructure_retries if counters is not None and not _has_made_progress(job) else 0


def application_retries_left(job: StoredJob) -> int:
    """Retries left for application failures."""
    return max(job.run_policy.max_app_retries - application_retries_used(job), 0)


def infrastructure_retries_left(job: StoredJob) -> int:
    """Retries left for infrastructure failures."""
    return max(job.run_policy.max_infra_retries - infrastructure_retries_used(job), 0)


def _has_made_progress(job: StoredJob) -> bool:
    """Whether an attempt is under way and the job has a later checkpoint than at its previous failure. If the attempt
    fails, the operator resets both retry budgets."""
    checkpoint, counters = job.status.checkpoint, job.status.counters
    if checkpoint is None or counters is None or attempt_under_way(job) is None:
        return False
    return counters.checkpoint_step is None or checkpoint.step > counters.checkpoint_step


def resume_point(job: StoredJob) -> str:
    """The step from which another attempt would start, such as `from step 40`."""
    checkpoint = job.status.checkpoint
    if checkpoint is None:
        return "from step 0 (there is no checkpoint)"
    if job.resume is Resume.NEVER:
        return f"from step 0 (and fails: checkpoint.resume is Never, but step {checkpoint.step} has a checkpoint)"
    return f"from step {checkpoint.step}"


def storage_uri(job: StoredJob) -> str | None:
    """The job's folder in its claim, such as `pvc://claim/folder`; None without a claim."""
    storage = job.storage
    if storage is None:
        return None
    return f"pvc://{storage.persistent_volume_claim}/{storage.sub_path or job.metadata.name}"


def _pending_request(job: StoredJob, annotation: str) -> str | None:
    asked = job.metadata.annotations.get(annotation)
    handled = job.status.handled_requests
    seen = None if handled is None else handled.stop if annotation == ANNOTATION_STOP else handled.retry
    return asked if asked is not None and as_recorded(asked) != seen else None
