"""A status of the operator before records: conditions said what happened then. Here they become records, once.

Only here are conditions read back.
"""

from __future__ import annotations

from datetime import datetime

from rljob_api.conditions import ConditionType, Reason
from rljob_api.v1alpha1.status import (
    Attempt,
    AttemptOutcome,
    AttemptState,
    Condition,
    ConditionStatus,
    Counters,
    JobResult,
    RLJobStatus,
    StopRequest,
)

MAX_ATTEMPT_MESSAGE = 512
MAX_RESULT_MESSAGE = 1024


def is_without_records(status: RLJobStatus) -> bool:
    """Whether an operator wrote it that kept no records."""
    return status.counters is None and bool(status.attempts or status.conditions)


def with_records(status: RLJobStatus, created: datetime) -> RLJobStatus:
    """The same status with the records that today's operator would have kept. `created`: of the job; start numbers
    were counted from then."""
    attempts = tuple(_attempt(attempt, status, created) for attempt in status.attempts)
    ended = [attempt for attempt in attempts if attempt.ended is not None]
    num_starts = sum(attempt.submissions for attempt in attempts)
    counters = Counters(
        attempts=attempts[-1].number if attempts else 0,
        start_number=int(created.timestamp()) + num_starts if num_starts else 0,
        failed_attempts=sum(attempt.outcome == AttemptOutcome.FAILED for attempt in attempts),
        active_seconds=sum(map(_active_seconds, ended)),
    )
    return status.model_copy(update={"attempts": attempts, "counters": counters, "result": _result(status)})


def _result(status: RLJobStatus) -> JobResult | None:
    last = _true(status, ConditionType.COMPLETE) or _true(status, ConditionType.FAILED)
    if last is None:
        return None
    return JobResult(
        outcome="Succeeded" if last.type == ConditionType.COMPLETE else "Failed",
        reason=last.reason,
        message=last.message[:MAX_RESULT_MESSAGE],
        at=last.last_transition_time,
        cleaned_up_at=_cleaned_up_at(status, last),
    )


def _cleaned_up_at(status: RLJobStatus, last: Condition) -> str | None:
    """When nothing was left, or what is left was to be kept; None where that was not said."""
    if not status.attempts:
        return last.last_transition_time
    cluster = _condition(status, ConditionType.CLUSTER_READY)
    if cluster is None or cluster.reason not in (Reason.REMOVED, Reason.KEPT):
        return None
    return max(cluster.last_transition_time, last.last_transition_time)


def _attempt(attempt: Attempt, status: RLJobStatus, created: datetime) -> Attempt:
    """With state and times. There was one attempt only, so all conditions speak of it."""
    ready = _true(status, ConditionType.CLUSTER_READY)
    ready_at = None if ready is None else ready.last_transition_time
    known: dict[str, object] = {"start_number": _start_number(attempt, created)}
    if attempt.cluster_uid is not None or attempt.submissions:
        known |= {"admitted_at": attempt.started, "ready_at": ready_at}
    submitted = _true(status, ConditionType.JOB_SUBMITTED)
    if submitted is not None:
        since = ready_at or attempt.started
        known |= {"admitted_at": since, "ready_at": since, "running_since": submitted.last_transition_time}
    if attempt.ended is not None:
        failed = _true(status, ConditionType.FAILED)
        message = None if failed is None else failed.message[:MAX_ATTEMPT_MESSAGE] or None
        return attempt.model_copy(update=known | {"state": AttemptState.ENDED.value, "message": message})
    state = AttemptState.PROVISIONING if submitted is None else AttemptState.RUNNING
    if attempt.reason is not None:
        state = AttemptState.STOPPING
        known |= {"stop": _stop_request(attempt.reason, attempt, status), "reason": None}
    return attempt.model_copy(update=known | {"state": state.value})


def _stop_request(reason: str, attempt: Attempt, status: RLJobStatus) -> StopRequest:
    """Ray is asked again: nobody wrote down whether it was."""
    progressing = _condition(status, ConditionType.PROGRESSING)
    is_told = progressing is not None and progressing.reason == Reason.STOPPING
    at = progressing.last_transition_time if progressing is not None and is_told else attempt.started
    return StopRequest(reason=reason, requested_at=at)


def _start_number(attempt: Attempt, created: datetime) -> int | None:
    return int(created.timestamp()) + attempt.submissions if attempt.submissions else None


def _active_seconds(attempt: Attempt) -> int:
    if attempt.ended is None:
        return 0
    began = datetime.fromisoformat(attempt.admitted_at or attempt.started)
    return max(0, int((datetime.fromisoformat(attempt.ended) - began).total_seconds()))


def _condition(status: RLJobStatus, kind: ConditionType) -> Condition | None:
    return next((condition for condition in status.conditions if condition.type == kind), None)


def _true(status: RLJobStatus, kind: ConditionType) -> Condition | None:
    found = _condition(status, kind)
    return found if found is not None and found.status is ConditionStatus.TRUE else None
