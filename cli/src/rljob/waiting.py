"""Waits until a job has a state: one of its conditions, `Running`, or `Deleted`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from rljob.cluster import Cluster
from rljob.errors import (
    ClusterUnreachableError,
    JobFinishedError,
    JobNotFoundError,
    RejectedError,
    RLJobError,
    WaitTimeoutError,
    deleted_meanwhile,
)
from rljob.job_attempts import attempt_state, attempt_under_way, is_over, is_running
from rljob.job_conditions import condition
from rljob.plain_text import duration_text, one_line, shortened
from rljob.polling import MAX_UNREACHABLE_SECONDS, POLL_SECONDS, Clock, poll_job
from rljob.stored_job import StoredJob
from rljob_api.conditions import ConditionType
from rljob_api.names import similar_names
from rljob_api.v1alpha1.status import ConditionStatus

RUNNING, DELETED = "Running", "Deleted"
STATES = (*ConditionType, RUNNING, DELETED)
"""What can be waited for: that a condition is True, that the trainer runs, or that the job is deleted."""
_ENDS = (ConditionType.FINISHED, ConditionType.COMPLETE, ConditionType.FAILED)


@dataclass(frozen=True)
class Outcome:
    """How waiting ended: a message, and the error if the state was not reached."""

    text: str
    error: RLJobError | None = None


class _TimeIsUp(Exception):
    """The time limit has passed. It is raised in the pause between two polls, also while the server is unreachable."""


OutcomeOf = Callable[[StoredJob], Outcome | None]
"""Returns the outcome of waiting from the job as it is now; None to continue waiting."""
Report = Callable[[str], None]
"""Is called with each new message about what is waited for."""


def state_named(text: str) -> str:
    """The state of `STATES` with this name, in any case of its letters. Raises RejectedError."""
    found = next((str(state) for state in STATES if state.lower() == text.lower()), None)
    if found is None:
        near = similar_names(text, map(str, STATES))
        advice = f"did you mean {near[0]}?" if near else f"use one of {', '.join(STATES)}"
        raise RejectedError(f"cannot wait for {text!r}: unknown state; {advice}")
    return found


def wait_for_state(
    cluster: Cluster, name: str, state: str, clock: Clock, report: Report, timeout_seconds: float | None = None
) -> tuple[StoredJob | None, Outcome]:
    """Waits until the job has the state. Returns the job as it was seen last (None if it did not exist) and the
    outcome.

    Raises:
        JobNotFoundError: there is no such job. When waiting for `Deleted`, this is the outcome instead.
        ClusterUnreachableError: the API server was unreachable for ten minutes, or at the start.
    """
    try:
        job = cluster.job(name)
    except JobNotFoundError:
        if state != DELETED:
            raise
        return None, Outcome(f"RLJob {cluster.namespace}/{name} does not exist")
    seen, outcome = wait(cluster, job, lambda each: _outcome_of_state(each, state), clock, report, timeout_seconds)
    if state == DELETED and isinstance(outcome.error, JobNotFoundError):
        outcome = Outcome(outcome.text)
    return seen, outcome


def wait(
    cluster: Cluster,
    job: StoredJob,
    outcome_of: OutcomeOf,
    clock: Clock,
    report: Report,
    timeout_seconds: float | None = None,
) -> tuple[StoredJob, Outcome]:
    """Waits until `outcome_of` returns an outcome, the job is deleted, or the time has passed. Returns the job as it
    was seen last, and the outcome."""
    seen, began, reported = job, clock.now(), ""

    def report_once(text: str) -> None:
        nonlocal reported
        if text != reported:
            reported = text
            report(text)

    def sleep(seconds: float) -> None:
        left = seconds if timeout_seconds is None else timeout_seconds - (clock.now() - began).total_seconds()
        if left <= 0:
            raise _TimeIsUp
        clock.sleep(min(seconds, left))

    try:
        for each in poll_job(cluster, job.name, Clock(clock.now, sleep), lambda text, _: report_once(text)):
            if each.metadata.uid != job.metadata.uid:
                break
            seen, outcome = each, outcome_of(each)
            if outcome is not None:
                return seen, outcome
            report_once(f"waiting: {state_text(seen)}")
    except _TimeIsUp:
        waited = duration_text(timeout_seconds or 0)
        text = f"{job.where}: waited for {waited} ({state_text(seen)}); wait longer with --timeout"
        return seen, Outcome(text, WaitTimeoutError(text))
    error = deleted_meanwhile(job.where)
    return seen, Outcome(str(error), error)


def wait_until_deleted(
    cluster: Cluster, job: StoredJob, clock: Clock, report: Report, timeout_seconds: float | None = None
) -> None:
    """Waits until the job and all its pods are deleted.

    Raises:
        WaitTimeoutError: the time has passed.
        ClusterUnreachableError: the API server was unreachable for ten minutes.
    """
    reported, began = "", clock.now()
    unreachable_since: datetime | None = None
    while True:
        now = clock.now()
        try:
            left = [pod.metadata.name for pod in cluster.pods(job)]
            if not left and _is_deleted(cluster, job):
                return
            what, unreachable_since = ", ".join(left) or "the job", None
        except ClusterUnreachableError as error:
            what, unreachable_since = f"the API server ({error.reason})", unreachable_since or now
            if (now - unreachable_since).total_seconds() > MAX_UNREACHABLE_SECONDS:
                raise
        if timeout_seconds is not None and (now - began).total_seconds() >= timeout_seconds:
            raise WaitTimeoutError(f"{job.where}: waited for {duration_text(timeout_seconds)} for {what}")
        if what != reported:
            reported = what
            report(f"waiting for {what}")
        clock.sleep(POLL_SECONDS)


def _is_deleted(cluster: Cluster, job: StoredJob) -> bool:
    """Whether the job no longer exists. A new job with the same name does not count."""
    try:
        return cluster.job(job.name).metadata.uid != job.metadata.uid
    except JobNotFoundError:
        return True


def _outcome_of_state(job: StoredJob, state: str) -> Outcome | None:
    """The outcome of waiting for a state of `STATES`."""
    end = job.ending
    if state == RUNNING:
        return runs(job)
    if state in _ENDS:
        is_reached = end is not None and is_over(job) and state in (ConditionType.FINISHED, end.kind)
        return ended(job) if is_reached else finished_instead(job)
    found = condition(job.status, ConditionType(state)) if state != DELETED else None
    if found is not None and found.status is ConditionStatus.TRUE:
        message = f": {shortened(one_line(found.message))}" if found.message else ""
        return Outcome(f"{job.where}: {state} is True, {found.reason}{message}")
    # A finished job may still be deleted.
    return None if state == DELETED else finished_instead(job)


def runs(job: StoredJob) -> Outcome | None:
    """The outcome once the trainer runs or the job has finished; None before."""
    attempt = attempt_under_way(job)
    if attempt is not None and is_running(attempt):
        return Outcome(f"{job.where}: attempt {attempt.number} is running")
    return finished_instead(job)


def ended(job: StoredJob) -> Outcome | None:
    """The outcome once the job has finished; None before."""
    end = job.ending
    if end is None:
        return None
    return Outcome(f"{job.where} has finished: {end.kind}, {end.reason}: {shortened(one_line(end.message))}")


def finished_instead(job: StoredJob) -> Outcome | None:
    """The outcome, with an error, once the job has finished without the state that is waited for; None before, and if a
    retry was requested."""
    outcome = ended(job) if is_over(job) else None
    return outcome and Outcome(outcome.text, JobFinishedError(outcome.text))


def state_text(job: StoredJob) -> str:
    """The state of the job on one line."""
    attempt = attempt_under_way(job)
    parts = [job.phase, job.reason, f"attempt {attempt.number} {attempt_state(attempt)}" if attempt else ""]
    return one_line(", ".join(dict.fromkeys(part for part in parts if part)))
