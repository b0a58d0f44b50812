"""Makes the run state of a job on a cluster from its status.

On a cluster the trainer's own run state is a file of the head pod, which is deleted with the pod. The status has what a
reader needs of it, and more: also how the job ended if the trainer was killed.
"""

from __future__ import annotations

from rljob.job_attempts import is_to_be_retried, newest_attempt
from rljob.job_conditions import moment, waits_for
from rljob.kubernetes_models import Json
from rljob.polling import utc_now
from rljob.stored_job import StoredJob
from rljob_api.conditions import ALARMS, ConditionType
from rljob_api.constants import CONTRACT_VERSION
from rljob_api.explanations import EXPLANATIONS
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
_MAX_ALARM_CHARACTERS = 512


def run_state_of_status(job: StoredJob) -> Json | None:
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
        "alarms": _alarms(job),
    }
    return {
        "contractVersion": CONTRACT_VERSION,
        "jobName": job.metadata.name,
        "attempt": attempt.number,
        "phase": phase.value,
        "progress": status.progress.to_wire(),
        # While the job waits for its pods, no trainer writes; that is no reason to call it silent.
        "writtenAt": _now() if phase is RunPhase.STARTING else _written_at(attempt, status.progress.updated_at),
        **{name: value for name, value in optional.items() if value is not None},
    }


def _now() -> str:
    return f"{utc_now():%Y-%m-%dT%H:%M:%SZ}"


def _written_at(attempt: Attempt, progressed_at: str) -> str:
    """When the trainer last reported something. The progress may be that of the attempt before; then
    the start of the new trainer counts."""
    times = (progressed_at, attempt.running_since, attempt.run_state_at)
    return max((time for time in times if time is not None), key=moment)


def _phase(job: StoredJob) -> tuple[RunPhase, Json | None]:
    """The phase, and why the run has failed."""
    end, following, newest = job.ending, job.status.next_attempt, newest_attempt(job)
    if end is not None and not is_to_be_retried(job):
        if end.is_complete:
            return RunPhase.COMPLETE, None
        return _ended(end.reason, end.message)
    if job.status.suspended_at is not None:
        return RunPhase.STARTING, None
    if following is not None:
        return RunPhase.STARTING, None
    return _PHASES.get(newest.state if newest is not None else "", RunPhase.STARTING), None


def _waiting(job: StoredJob) -> str | None:
    """What the job waits for; None if the status does not say it."""
    following, found = job.status.next_attempt, waits_for(job.status)
    if is_to_be_retried(job):
        return "waits for its next attempt (a retry was requested)"
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


def _alarms(job: StoredJob) -> list[Json] | None:
    """The alarms, without their steps. Of the most serious one, the status has the message, which also has its steps;
    of the others it has only the names. None if the trainer reports no alarms."""
    found = next((each for each in job.status.conditions if each.type == ConditionType.TRAINING_HEALTHY), None)
    if found is None or found.status is ConditionStatus.UNKNOWN:
        return None
    if found.status is ConditionStatus.TRUE:
        return []
    first, *others = job.status.alarms or (found.reason,)
    messages = {first: found.message, **{name: _explanation(name) for name in others}}
    return [{"reason": name, "message": text[:_MAX_ALARM_CHARACTERS]} for name, text in messages.items()]


def _explanation(alarm: str) -> str:
    known = next((each for each in ALARMS if each == alarm), None)
    if known is None:
        return "An alarm that this version of rljob does not know; the trainer's log explains it."
    return f"{EXPLANATIONS[known].means} {EXPLANATIONS[known].advice}".replace("`", "")
