"""Interprets a job: its attempts, what it waits for, which requests are pending, how many retries are left, where its
results are.

See also: `stored_job` parses the job, `job_conditions` reads its conditions.
"""

from __future__ import annotations

from rljob.job_conditions import waits_for
from rljob.plain_text import one_line
from rljob.stored_job import StoredJob
from rljob_api.conditions import Reason
from rljob_api.constants import ANNOTATION_RETRY, ANNOTATION_STOP
from rljob_api.requests import as_recorded, is_later
from rljob_api.v1alpha1.checkpoint import Resume
from rljob_api.v1alpha1.status import Attempt, AttemptOutcome, AttemptState
from rljob_bucket.paths import job_folder


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


def attempt_text(attempt: Attempt) -> str:
    """The state of an attempt, its reason and the step it resumed from; without times."""
    return one_line(", ".join([attempt_state(attempt), *attempt_reason(attempt), *attempt_resumed_from(attempt)]))


def attempt_reason(attempt: Attempt) -> list[str]:
    """Why the attempt ended or is being stopped; empty if there is no reason or if the state already says it."""
    if attempt.ended is None and attempt.stop is not None:
        return [f"stopping: {attempt.stop.reason}"]
    if attempt.reason in (None, attempt_state(attempt)):
        return []
    return [with_failure_class(str(attempt.reason), attempt.failure_class)]


def attempt_resumed_from(attempt: Attempt) -> list[str]:
    """The step from which the attempt resumed, as text; empty if it began at step 0."""
    return [] if attempt.resumed_from_step is None else [f"resumed from step {attempt.resumed_from_step}"]


def with_failure_class(reason_word: str, failure_class: str | None) -> str:
    """The reason, and its failure class if it has one: `HeadLost (Infrastructure)`."""
    return f"{reason_word} ({failure_class})" if failure_class else reason_word


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
    end = job.ending
    return end is not None and not end.is_complete and retry_asked_at(job) is not None


def is_over(job: StoredJob) -> bool:
    """Whether the job has finished and no retry was requested, so that it will have no other attempt."""
    return job.ending is not None and not is_to_be_retried(job)


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
    """The job's folder in its claim or bucket, such as `pvc://claim/folder` or `s3://bucket/folder`; None without
    storage."""
    storage = job.storage
    if storage is None:
        return None
    if storage.s3 is not None:
        return job_folder(storage.s3, job.metadata.namespace, job.metadata.name).as_uri()
    return f"pvc://{storage.persistent_volume_claim}/{storage.sub_path or job.metadata.name}"


def _pending_request(job: StoredJob, annotation: str) -> str | None:
    asked = job.metadata.annotations.get(annotation)
    handled = job.status.handled_requests
    seen = None if handled is None else handled.stop if annotation == ANNOTATION_STOP else handled.retry
    return asked if asked is not None and as_recorded(asked) != seen else None
