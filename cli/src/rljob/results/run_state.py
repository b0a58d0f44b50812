"""Makes the run state of a job on a cluster from its status.

On a cluster the trainer's own run state is a file of the head pod, which is deleted with the pod. The status has what a
reader needs of it, and more: also how the job ended if the trainer was killed.
"""

from __future__ import annotations

import re

from rljob.job_state import newest_attempt
from rljob.job_status import moment, waits_for
from rljob.kubernetes_models import Json
from rljob.polling import utc_now
from rljob.stored_job import StoredJob
from rljob_api.constants import CONTRACT_VERSION
from rljob_api.run_state import RunPhase
from rljob_api.v1alpha1.status import Attempt, AttemptState, ConditionStatus

_STOPPED = ("StoppedByUser", "StoppedThroughRay", "Suspended")
"""Reasons of an end that is not a failure."""
_PHASES = {
    AttemptState.RUNNING.value: RunPhase.RUNNING,
    AttemptState.STOPPING.value: RunPhase.STOPPING,
}
_MAX_ERROR_CHARACTERS = 4096
_MAX_ACTIVITY_CHARACTERS = 256
_ALARM_STEPS = re.compile(r" \(since step (\d+), last in step (\d+)\)")
"""What the operator appends to the message of an alarm."""


def run_state(job: StoredJob) -> Json | None:
    """The run state as a JSON object; None before the trainer has reported any progress."""
    status, attempt = job.status, newest_attempt(job)
    if status.progress is None or attempt is None:
        return None
    phase, error = _phase(job)
    optional: Json = {
        "checkpoint": None if status.checkpoint is None else status.checkpoint.to_wire(),
        "resumedFromStep": attempt.resumed_from_step,
        "exportUri": status.export_uri,
        "error": error,
        "activity": _waiting(job) if phase is RunPhase.STARTING else None,
        "alarms": _alarms(job, status.progress.step),
    }
    return {
        "contractVersion": CONTRACT_VERSION,
        "jobName": job.metadata.name,
        "attempt": attempt.number,
        "phase": phase.value,
        "progress": status.progress.to_wire(),
        # Nobody writes while the job waits for its pods; then the status itself is the newest.
        "writtenAt": _now() if phase is RunPhase.STARTING else _written_at(attempt, status.progress.updated_at),
        **{name: value for name, value in optional.items() if value is not None},
    }


def _now() -> str:
    return f"{utc_now():%Y-%m-%dT%H:%M:%SZ}"


def _written_at(attempt: Attempt, progressed_at: str) -> str:
    """When the trainer last reported something. The progress may be that of the attempt before, which is no reason to
    call a trainer silent that has just started."""
    times = (progressed_at, attempt.running_since, attempt.run_state_at)
    return max((time for time in times if time is not None), key=moment)


def _phase(job: StoredJob) -> tuple[RunPhase, Json | None]:
    """The phase, and why the run has failed."""
    end, following, newest = job.ending, job.status.next_attempt, newest_attempt(job)
    if end is not None:
        if end.is_complete:
            return RunPhase.COMPLETE, None
        return _ended(end.reason, end.message)
    if job.status.suspended_at is not None:
        return RunPhase.STOPPED, None
    if following is not None:
        return RunPhase.STARTING, None
    return _PHASES.get(newest.state if newest is not None else "", RunPhase.STARTING), None


def _waiting(job: StoredJob) -> str | None:
    """What the job waits for; None if the status does not say it."""
    following, found = job.status.next_attempt, waits_for(job.status)
    if following is not None:
        what, message = f"waits for its next attempt ({following.reason})", following.message
    elif found is not None:
        what, message = f"waits ({found.reason})", found.message
    else:
        return None
    return (f"{what}: {message}" if message else what)[:_MAX_ACTIVITY_CHARACTERS]


def _ended(reason: str, message: str) -> tuple[RunPhase, Json | None]:
    if reason in _STOPPED:
        return RunPhase.STOPPED, None
    return RunPhase.FAILED, {"kind": reason[:64], "message": message[:_MAX_ERROR_CHARACTERS]}


def _alarms(job: StoredJob, step: int) -> list[Json] | None:
    """The most serious alarm, with the names of the others in its message: the status has only the names of these. None
    if the trainer reports no alarms."""
    found = next((each for each in job.status.conditions if each.type == "TrainingHealthy"), None)
    if found is None or found.status is ConditionStatus.UNKNOWN:
        return None
    if found.status is ConditionStatus.TRUE:
        return []
    steps = _ALARM_STEPS.search(found.message)
    since, newest = (int(steps[1]), int(steps[2])) if steps else (step, step)
    message = _ALARM_STEPS.sub("", found.message, count=1)
    return [{"reason": found.reason, "message": message[:512], "sinceStep": since, "step": newest}]
