"""Suspends, resumes, stops, retries and deletes an existing job.

`delete` deletes the job. The other functions change `spec.suspend` or an annotation of the job; this is a request that
the operator applies. If the job is already in the requested state, or the same request is pending,
nothing is sent, and the message says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from rljob.cluster import Cluster
from rljob.errors import JobFinishedError, RejectedError
from rljob.job_attempts import (
    attempt_state,
    attempt_under_way,
    is_to_be_retried,
    newest_attempt,
    resume_point,
    retry_asked_at,
    stop_asked_at,
    stop_is_pending,
    storage_uri,
)
from rljob.job_conditions import moment
from rljob.plain_text import age, duration_text, one_line, shortened, time_text
from rljob.stored_job import StoredJob
from rljob.waiting import Outcome, OutcomeOf, ended, finished_instead, runs, state_text
from rljob_api.conditions import Reason
from rljob_api.constants import ANNOTATION_RETRY, ANNOTATION_STOP
from rljob_api.v1alpha1.run_policy import Cleanup
from rljob_api.v1alpha1.status import AttemptState


@dataclass(frozen=True)
class Request:
    """A request to the operator, or the reason why none was needed."""

    job: StoredJob
    """The job after the request."""
    messages: tuple[str, ...]
    """What the request does, for users."""
    outcome_of: OutcomeOf | None
    """Says whether the job has the requested state; None if there is nothing to wait for."""


Steer = Callable[[Cluster, str, datetime], Request]
"""One of the functions below: cluster, name of the job, time now. They raise JobNotFoundError, JobChangedError and
other subclasses of ClusterError, and RejectedError if the request is not possible in the job's state."""


def suspend(cluster: Cluster, name: str, now: datetime) -> Request:
    """Asks the operator to save a checkpoint and delete the job's pods."""
    job, resume_it = _job(cluster, name), _command(cluster, "resume", name)
    end = job.ending
    if end is not None:
        raise RejectedError(f"{job.where}: has finished ({end.kind}, {end.reason}), so it cannot be suspended")
    if job.wants_suspend and job.status.suspended_at is not None:
        since = age(moment(job.status.suspended_at), now)
        return Request(job, (f"{job.where} is already suspended (for {since}); {resume_it} resumes it",), None)
    if job.wants_suspend:
        return Request(job, (f"{job.where} is already being suspended",), _suspended)
    job = cluster.change_spec(job, {"suspend": True})
    how = f"{job.where} will be suspended: {_how_the_attempt_ends(job)}"
    return Request(job, (how, f"{resume_it} resumes it from its newest checkpoint"), _suspended)


def resume(cluster: Cluster, name: str, now: datetime) -> Request:  # noqa: ARG001
    """Asks the operator to resume a suspended job."""
    job = _job(cluster, name)
    if not job.wants_suspend:
        return Request(job, (f"{job.where} is not suspended ({state_text(job)})",), None)
    job = cluster.change_spec(job, {"suspend": False})
    end = job.ending
    if end is not None:
        retry_it = _command(cluster, "retry", name)
        more = "" if end.is_complete else f"; {retry_it} resumes it from its newest checkpoint"
        text = f"{job.where} is no longer suspended, but it has finished ({end.kind}, {end.reason}){more}"
        return Request(job, (text,), None)
    # Until the operator has observed the change, the status is that of the suspended job.
    generation = job.metadata.generation
    return Request(
        job,
        (f"{job.where} will resume with a new attempt {resume_point(job)}",),
        lambda seen: runs(seen) if seen.status.observed_generation >= generation else None,
    )


def stop(cluster: Cluster, name: str, now: datetime) -> Request:
    """Asks the operator to stop the job with a checkpoint, so that it becomes Failed. Waiting ends also if the
    job finishes in another way."""
    job = _job(cluster, name)
    end, will_be_retried = job.ending, is_to_be_retried(job)
    if end is not None and not will_be_retried:
        return Request(job, (f"{job.where} has already finished ({end.kind}, {end.reason})",), None)
    asked_at, attempt = stop_asked_at(job), attempt_under_way(job)
    if asked_at is not None and stop_is_pending(job):
        messages: tuple[str, ...] = (f"{job.where} was already asked to stop, at {shortened(one_line(asked_at))}",)
    elif attempt is not None and attempt.stop is not None and attempt.stop.reason == Reason.STOPPED_BY_USER:
        messages = (f"{job.where} is already being stopped, since {attempt.stop.requested_at}",)
    else:
        job = cluster.annotate_job(job, ANNOTATION_STOP, _new_value(now))
        how = _how_the_attempt_ends(job, job.run_policy.cleanup)
        messages = (
            f"{job.where} will be stopped: {how}, and the job is Failed ({Reason.STOPPED_BY_USER})",
            f"{_command(cluster, 'retry', name)} resumes it from its newest checkpoint",
        )
    # Until the operator has applied the retry, the result in the status is the old one.
    return Request(job, messages, lambda seen: None if will_be_retried and is_to_be_retried(seen) else ended(seen))


def retry(cluster: Cluster, name: str, now: datetime) -> Request:
    """Asks the operator to start another attempt now."""
    job = _job(cluster, name)
    asked_at = retry_asked_at(job)
    # A later stop request replaces the retry request, so another retry request is needed.
    if asked_at is None or (is_to_be_retried(job) and stop_is_pending(job)):
        _check_that_retry_is_possible(cluster, job)
        job = cluster.annotate_job(job, ANNOTATION_RETRY, _new_value(now))
        message = f"{job.where}: {_what_a_retry_does(job)}"
    else:
        message = f"{job.where}: a retry was already requested at {shortened(one_line(asked_at))}"
    former = newest_attempt(job)

    def retried(seen: StoredJob) -> Outcome | None:
        newest = newest_attempt(seen)
        # Until the operator has applied the retry, the result in the status is the old one.
        if retry_asked_at(seen) is not None:
            return None
        if newest is not None and (former is None or newest.number > former.number):
            return runs(seen)
        return finished_instead(seen)

    return Request(job, (message,), retried)


def delete(cluster: Cluster, name: str) -> Request:
    """Deletes the job. `waiting.wait_until_deleted` waits for its pods.

    Raises:
        JobNotFoundError: there is no such job.
        JobChangedError: another job has its name now.
    """
    job = cluster.job(name)
    cluster.delete_job(job)
    messages = [f"{job.where} deleted; its pods stop within their grace period"]
    folder = storage_uri(job)
    if folder is not None:
        messages.append(f"checkpoints and results are kept in {folder}")
    return Request(job, tuple(messages), None)


def _check_that_retry_is_possible(cluster: Cluster, job: StoredJob) -> None:
    """Raises RejectedError if the operator would not retry the job in its state."""
    where, attempt, end = job.where, attempt_under_way(job), job.ending
    if end is not None and end.is_complete:
        raise RejectedError(f"{where}: is Complete, so there is nothing to retry; submit a new job to train further")
    if job.wants_suspend:
        raise RejectedError(f"{where}: is suspended; resume it with {_command(cluster, 'resume', job.name)}")
    if end is not None:
        return
    if stop_asked_at(job) is not None or (attempt is not None and attempt.stop is not None):
        raise RejectedError(
            f"{where}: is still stopping; retry when {_command(cluster, 'status', job.name)} shows that it has finished"
        )
    if attempt is not None:
        state = f"attempt {attempt.number} is {one_line(attempt_state(attempt))}"
        raise RejectedError(
            f"{where}: {state}, so there is nothing to retry; stop the job first with"
            f" {_command(cluster, 'stop', job.name)}"
        )
    if job.status.next_attempt is None:
        raise RejectedError(f"{where}: no attempt has failed, so there is nothing to retry ({state_text(job)}); wait")


def _job(cluster: Cluster, name: str) -> StoredJob:
    job = cluster.job(name)
    if job.metadata.deletion_timestamp is not None:
        raise RejectedError(
            f"{job.where}: is being deleted; afterwards `rljob submit{cluster.flags} FILE` can create it again"
        )
    return job


def _command(cluster: Cluster, command: str, name: str) -> str:
    return f"`rljob {command} {name}{cluster.flags}`"


def _suspended(job: StoredJob) -> Outcome | None:
    """The outcome once the job is suspended, was resumed again, or has finished; None before."""
    if not job.wants_suspend:
        text = f"{job.where} was resumed in the meantime"
        return Outcome(text, JobFinishedError(text))
    if job.status.suspended_at is not None:
        return Outcome(f"{job.where} is suspended, and its pods are deleted; it will resume {resume_point(job)}")
    return finished_instead(job)


def _how_the_attempt_ends(job: StoredJob, cleanup: Cleanup = Cleanup.DELETE_CLUSTER) -> str:
    """What happens to the trainer and its cluster after a request to suspend or stop the job."""
    attempt = attempt_under_way(job)
    if attempt is None:
        return "no attempt is running"
    is_deleted = cleanup is Cleanup.DELETE_CLUSTER
    rest = "its RayCluster is deleted" if is_deleted else "its RayCluster is kept (runPolicy.cleanup)"
    if attempt_state(attempt) == AttemptState.PROVISIONING:
        return f"its trainer has not started yet, and {rest}"
    if attempt_state(attempt) == AttemptState.STARTING:
        return f"its trainer is starting and exits without a new checkpoint, then {rest}"
    grace = duration_text(job.run_policy.grace_period_seconds)
    return f"its trainer saves a checkpoint within {grace} (runPolicy.gracePeriodSeconds), then {rest}"


def _what_a_retry_does(job: StoredJob) -> str:
    following, newest = job.status.next_attempt, newest_attempt(job)
    number = f"attempt {newest.number + 1}" if newest else "attempt 1"
    when = f"instead of at {time_text(moment(following.not_before))}, " if following is not None else ""
    return f"{number} starts now, {when}{resume_point(job)}; the retry budgets are reset"


def _new_value(now: datetime) -> str:
    """A value that no earlier request has: the operator applies each value once."""
    return now.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
