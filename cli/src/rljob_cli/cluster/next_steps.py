"""The last part of the output of `rljob explain`: what happens next, what the user can do, which deadlines apply."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta

from rljob.job_attempts import (
    application_retries_left,
    attempt_under_way,
    infrastructure_retries_left,
    missing_capacity,
    newest_attempt,
    resume_point,
    retry_asked_at,
    storage_uri,
)
from rljob.job_conditions import Ending, condition, moment, waits_for
from rljob.plain_text import duration_text, in_time, time_text
from rljob.stored_job import StoredJob
from rljob_api.conditions import NO_ROOM, ConditionType, Reason
from rljob_api.constants import STACKS_SECONDS
from rljob_api.v1alpha1.checkpoint import ExportHuggingFace
from rljob_api.v1alpha1.pools import QUEUE_LABEL
from rljob_api.v1alpha1.run_policy import Cleanup, RunPolicy
from rljob_api.v1alpha1.status import Attempt, AttemptState, FailureClass, NextAttempt, StopRequest

_NEXT_BY_CONDITION = {
    ConditionType.SPEC_VALID: "the operator creates its RayCluster",
    ConditionType.QUOTA_RESERVED: "KubeRay creates the pods",
    ConditionType.CLUSTER_READY: "the operator compares Ray's nodes with the pools, then submits the trainer",
    ConditionType.PLACEMENT_FEASIBLE: "the operator submits the trainer",
    ConditionType.JOB_SUBMITTED: "the trainer loads the model and starts its workers",
    ConditionType.PROGRESSING: "the trainer runs training steps",
}
"""What happens when a condition becomes True."""
_SAVES_AND_EXITS = "saves a checkpoint, if training has started, and exits"
_NEEDS_ANOTHER_JOB = (Reason.INVALID_SPEC, Reason.STORAGE_MISSING)
"""Reasons for which the job must be created again with a corrected spec."""
_MAY_START_LATER = (Reason.CREATING, Reason.PODS_PENDING, Reason.INFRASTRUCTURE_ERROR)
"""Reasons of ClusterReady for which a job is retried that has never run (reconcile/stops.py): slow or failing nodes."""
_AFTER_A_STOP = {
    Reason.SUSPENDING: "its RayCluster is deleted, and the job is suspended",
    Reason.SUSPENDED: "its RayCluster is deleted, and the job is suspended",
    Reason.STOPPED_BY_USER: "the job is Failed (StoppedByUser); `rljob retry {name}` resumes it",
    Reason.ACTIVE_DEADLINE_EXCEEDED: "the job is Failed (ActiveDeadlineExceeded)",
}
"""What follows when the trainer has exited, by the reason of the stop request. For other reasons it is open."""


def what_is_next(job: StoredJob, now: datetime, flags: str = "") -> Iterator[str]:
    """The lines of the last part. `flags`: options that suggested commands need for the same cluster and namespace."""
    name = f"{job.metadata.name}{flags}"
    end, attempt = job.ending, attempt_under_way(job)
    if job.metadata.deletion_timestamp is not None:
        yield "the job is being deleted; its pods stop within their grace period"
    elif end is not None:
        yield from _after_the_end(job, end, now, flags)
    elif attempt is not None and attempt.stop is not None:
        yield from _after_a_stop(job, attempt, attempt.stop, now, name)
    elif job.wants_suspend:
        yield from _when_suspended(job, name)
    elif job.status.next_attempt is not None:
        yield from _before_next_attempt(job, job.status.next_attempt, now, name)
    else:
        yield _next_step(job, attempt)
        yield from _deadlines(job, attempt, now)
        if job.status.counters is not None:
            left = _retries_left(job)
            yield f"if an attempt fails, the next one resumes from the newest checkpoint; retries left: {left}"


def _next_step(job: StoredJob, attempt: Attempt | None) -> str:
    if not job.status.conditions and job.other_controller is not None:
        return "only that controller can start the job; to run it with the operator, create it without spec.managedBy"
    if not job.status.conditions:
        return "the operator validates the job and creates its RayCluster"
    waits = waits_for(job.status)
    if waits is None:
        where = "" if job.export is ExportHuggingFace.NEVER else ", with the exported model at status.exportUri"
        return f"the job is Complete after the last step{where}"
    if waits.reason == Reason.STOPPING:
        grace_seconds = job.run_policy.grace_period_seconds
        limit = f"{duration_text(grace_seconds)} (runPolicy.gracePeriodSeconds)"
        return f"the trainer {_SAVES_AND_EXITS} within {limit}"
    if attempt is not None and attempt.running_since is not None:
        ends = "otherwise the job becomes Retrying or Failed"
        return f"the trainer was already started: if the trainer still runs, it continues; {ends}"
    return f"when {waits.type} is True: {_NEXT_BY_CONDITION[ConditionType(waits.type)]}"


def _after_a_stop(job: StoredJob, attempt: Attempt, stop: StopRequest, now: datetime, name: str) -> Iterator[str]:
    grace_seconds = job.run_policy.grace_period_seconds
    what = _SAVES_AND_EXITS
    if stop.reason == Reason.STALLED:
        grace_seconds += STACKS_SECONDS
        what = "writes its stack traces, is asked to stop, and exits"
    end = moment(stop.sent_at or stop.requested_at) + timedelta(seconds=grace_seconds)
    yield (
        f"attempt {attempt.number}: its trainer {what}; at {time_text(end)} ({in_time(end, now)};"
        " runPolicy.gracePeriodSeconds) the operator stops waiting for it"
    )
    known = _AFTER_A_STOP.get(Reason(stop.reason)) if stop.reason in list(Reason) else None
    if known is not None:
        yield f"then {known.format(name=name)}"


def _when_suspended(job: StoredJob, name: str) -> Iterator[str]:
    if job.status.suspended_at is None:
        grace = duration_text(job.run_policy.grace_period_seconds)
        yield f"a running trainer {_SAVES_AND_EXITS} within {grace} (runPolicy.gracePeriodSeconds)"
        yield "then its RayCluster is deleted"
    yield f"`rljob resume {name}` resumes the job {resume_point(job)}"
    yield from _paused_deadline(job, "until the next attempt")


def _before_next_attempt(job: StoredJob, following: NextAttempt, now: datetime, name: str) -> Iterator[str]:
    newest = newest_attempt(job)
    number, begins = newest.number + 1 if newest is not None else 1, moment(following.not_before)
    where = "on the same cluster, if that is still healthy" if following.same_cluster else "on a new cluster"
    if following.reason == Reason.EVICTED:
        yield (
            f"attempt {number} starts when the pods of attempt {number - 1} are deleted; then it waits in the queue,"
            f" and trains {resume_point(job)}"
        )
    else:
        yield f"attempt {number} starts at {time_text(begins)} ({in_time(begins, now)}), {where}, {resume_point(job)}"
        if begins <= now and not following.same_cluster:
            yield "the new attempt waits until all pods of the previous attempt are deleted"
    yield f"retries left: {_retries_left(job)}"
    what = "ends this pause and resets" if begins > now else "resets"
    yield f"`rljob retry {name}` {what} the retry budgets"
    yield from _paused_deadline(job, "until the next attempt")


def _after_the_end(job: StoredJob, end: Ending, now: datetime, flags: str) -> Iterator[str]:
    name, status, policy = f"{job.metadata.name}{flags}", job.status, job.run_policy
    if end.is_complete:
        yield (
            f"exported model: {status.export_uri}"
            if status.export_uri
            else "no model was exported (checkpoint.exportHuggingFace)"
        )
    elif retry_asked_at(job) is not None:
        yield f"a retry was requested: the operator starts another attempt {resume_point(job)}"
    else:
        yield from _after_a_failure(job, end, flags)
    folder = storage_uri(job)
    if folder is not None:
        yield f"results, logs and checkpoints: {folder}"
    if policy.cleanup is Cleanup.KEEP_CLUSTER:
        yield from _kept_cluster(job, end, now, name)
    if policy.ttl_seconds_after_finished is not None:
        deleted = end.at + timedelta(seconds=policy.ttl_seconds_after_finished)
        yield (
            f"the job is deleted at {time_text(deleted)} ({in_time(deleted, now)}; runPolicy.ttlSecondsAfterFinished);"
            " its files are kept"
        )


def _kept_cluster(job: StoredJob, end: Ending, now: datetime, name: str) -> Iterator[str]:
    """What happens to the cluster of a finished job with `runPolicy.cleanup: KeepCluster`."""
    newest, found = newest_attempt(job), condition(job.status, ConditionType.CLUSTER_READY)
    reason = found.reason if found is not None else ""
    if newest is None or reason in (Reason.REMOVED, Reason.CLUSTER_LOST):
        # A user deleted the cluster, or it was never created.
        return
    if newest.trainer_may_run:
        yield "the cluster is not kept despite runPolicy.cleanup, because the trainer might still be running"
    elif job.metadata.labels.get(QUEUE_LABEL):
        yield "the cluster is not kept despite runPolicy.cleanup, because it would hold the quota of its queue"
    elif reason == Reason.DELETING:
        yield "its RayCluster is being deleted"
    else:
        policy = job.run_policy
        field, seconds = "keepClusterSeconds", policy.keep_cluster_seconds
        if policy.ttl_seconds_after_finished is not None and policy.ttl_seconds_after_finished < seconds:
            field, seconds = "ttlSecondsAfterFinished", policy.ttl_seconds_after_finished
        until = end.at + timedelta(seconds=seconds)
        yield (
            f"its RayCluster is kept until {time_text(until)} ({in_time(until, now)}; runPolicy.{field}) and holds its"
            f" GPUs until then; `rljob delete {name}` frees them"
        )


def _after_a_failure(job: StoredJob, end: Ending, flags: str) -> Iterator[str]:
    name = f"{job.metadata.name}{flags}"
    again = f"`rljob delete {name}` and `rljob submit{flags}` with the corrected file"
    if end.reason in _NEEDS_ANOTHER_JOB:
        yield f"fix the job: {again}"
        return
    if job.wants_suspend:
        yield f"`rljob resume {name}` first, because the job is suspended"
    yield f"fix the cause, then `rljob retry {name}`: it resumes {resume_point(job)} and resets the retry budgets"
    if end.reason == Reason.CONFIGURATION_ERROR:
        yield f"if the cause is in the job itself: {again}"


def _deadlines(job: StoredJob, attempt: Attempt | None, now: datetime) -> Iterator[str]:
    """The deadlines that may end the attempt or the job."""
    policy = job.run_policy
    if attempt is None:
        return
    if attempt.state == AttemptState.QUEUED:
        yield "no deadline passes while the job waits in its queue"
        yield from _paused_deadline(job, "until the queue admits the job")
        return
    if attempt.running_since is None:
        yield _provisioning_deadline(job, attempt, now)
    yield from _stall_deadline(attempt, policy, now)
    yield from _active_deadline(job, attempt, now)


def _provisioning_deadline(job: StoredJob, attempt: Attempt, now: datetime) -> str:
    """What happens at the end of `runPolicy.provisioningDeadlineSeconds` if the attempt then still waits for what it
    waits for now (`stops._reason_at_deadline` of the operator)."""
    waits, number = waits_for(job.status), attempt.number
    reason = waits.reason if waits is not None and waits.type == ConditionType.CLUSTER_READY else ""
    since, waiting_since = attempt.counted_since or attempt.started, job.status.waiting_since
    if reason in NO_ROOM and waiting_since is not None:
        since = max(waiting_since, attempt.active_since or attempt.started)
    end = moment(since) + timedelta(seconds=job.run_policy.provisioning_deadline_seconds)
    at = f"{time_text(end)} ({in_time(end, now)})"
    not_started = f"the trainer of attempt {number} has not started"
    if reason in NO_ROOM:
        return (
            f"if the job still waits for {missing_capacity(job)} at {at}, the operator deletes its RayCluster, and the"
            " job tries again later, as often as needed and without using a retry"
        )
    if reason == Reason.DISRUPTED:
        return f"if {not_started} by {at}, the attempt ends; the next one uses no retry"
    if reason == Reason.NAME_CONFLICT:
        return (
            "the job ends as Failed, without a retry, if the other RayCluster exists a minute after it was first seen"
        )
    if waits is not None and waits.type == ConditionType.SPEC_VALID:
        return f"if {not_started} by {at}, the attempt ends; the next one waits for an operator that can parse the spec"
    has_run = job.status.checkpoint is not None or any(each.running_since for each in job.status.attempts)
    if has_run or reason in _MAY_START_LATER:
        budget = f"a retry ({FailureClass.INFRASTRUCTURE})"
        return (
            f"if {not_started} by {at}, the attempt ends; the next one uses {budget}, or the job fails if none is left"
        )
    return _failed_if(f"{not_started} for the same reason", end, now)


def _stall_deadline(attempt: Attempt, policy: RunPolicy, now: datetime) -> Iterator[str]:
    since, cause = attempt.state_unknown_since, "the operator cannot observe its trainer"
    if since is None:
        since, cause = attempt.progressed_at, "its trainer makes no progress"
    if since is not None:
        end = moment(since) + timedelta(seconds=policy.stall_deadline_seconds)
        when = f"{time_text(end)} ({in_time(end, now)}; runPolicy.stallDeadlineSeconds)"
        yield f"attempt {attempt.number} ends if {cause} until {when}"


def _active_deadline(job: StoredJob, attempt: Attempt, now: datetime) -> Iterator[str]:
    """When `runPolicy.activeDeadlineSeconds` ends, if nothing pauses it until then, or what pauses it now."""
    limit_seconds, counters = job.run_policy.active_deadline_seconds, job.status.counters
    if limit_seconds is None:
        return
    if job.status.waiting_since is not None:
        yield from _paused_deadline(job, f"while the job waits for {missing_capacity(job)}")
    elif attempt.active_since is None and attempt.running_since is None:
        yield from _paused_deadline(job, "until the RayCluster exists")
    else:
        left = timedelta(seconds=limit_seconds - (counters.active_seconds if counters is not None else 0))
        yield _failed_if("the job has not finished", moment(attempt.counted_since or attempt.started) + left, now)


def _paused_deadline(job: StoredJob, until: str) -> Iterator[str]:
    limit_seconds, counters = job.run_policy.active_deadline_seconds, job.status.counters
    if limit_seconds is not None and counters is not None:
        left = max(limit_seconds - counters.active_seconds, 0)
        remaining = f"{duration_text(left)} of runPolicy.activeDeadlineSeconds are left"
        yield f"{remaining}; the deadline is paused {until}"


def _failed_if(cause: str, end: datetime, now: datetime) -> str:
    return f"the job ends as Failed, without a retry, if {cause} by {time_text(end)} ({in_time(end, now)})"


def _retries_left(job: StoredJob) -> str:
    policy = job.run_policy
    application = f"{application_retries_left(job)} of {policy.max_app_retries} ({FailureClass.APPLICATION})"
    infrastructure = f"{infrastructure_retries_left(job)} of {policy.max_infra_retries}"
    return f"{application}, {infrastructure} ({FailureClass.INFRASTRUCTURE})"
