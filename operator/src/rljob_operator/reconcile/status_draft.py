"""The status while a reconcile pass changes it: records, conditions, phase and reason; also time and text helpers.

Decisions never read conditions: what a later pass must know is in a record (`attempts`, `counters`, `result`, ...).
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

from rljob_api.conditions import NO_ROOM, ConditionType, Reason
from rljob_api.requests import as_recorded
from rljob_api.standard_streams import printable
from rljob_api.v1alpha1.status import (
    Attempt,
    AttemptOutcome,
    AttemptState,
    Condition,
    ConditionStatus,
    Counters,
    HandledRequests,
    RLJobStatus,
)
from rljob_operator.reconcile.observed import ObservedJob

MAX_CONDITION_MESSAGE = 1024
"""Maximum length of a condition's message, as in its schema."""
MAX_ATTEMPT_MESSAGE = 512
"""Maximum length of an attempt's message, as in its schema."""
MAX_URI_LENGTH = 4096
MAX_ATTEMPTS_LISTED = 10
_CUT = "... "
TRUE, FALSE, UNKNOWN = ConditionStatus.TRUE, ConditionStatus.FALSE, ConditionStatus.UNKNOWN

_CONDITIONS_BEFORE_TRAINING = (
    ConditionType.SPEC_VALID,
    ConditionType.QUOTA_RESERVED,
    ConditionType.CLUSTER_READY,
    ConditionType.PLACEMENT_FEASIBLE,
    ConditionType.JOB_SUBMITTED,
)

_PHASES_BETWEEN_ATTEMPTS: Mapping[str, str] = {
    Reason.EVICTED.value: AttemptState.QUEUED.value,
    Reason.QUEUE_CHANGED.value: AttemptState.QUEUED.value,
    **{reason.value: "Pending" for reason in NO_ROOM},
}
"""The phase between two attempts, by the reason of the first one, if the phase is not Retrying."""


class StatusDraft:
    """A copy of the observed status, which a pass changes. What the pass does not set stays as observed."""

    def __init__(self, job: ObservedJob, now: datetime) -> None:
        status = job.status
        self.now = now
        self.attempts = list(status.attempts)
        self.counters = status.counters or Counters()
        self.next_attempt = status.next_attempt
        self.waiting_since = status.waiting_since
        self.suspended_at = status.suspended_at
        self.result = status.result
        self.handled = status.handled_requests or HandledRequests()
        self.pools = status.pools
        self.pods = status.pods
        self.gpus = status.gpus
        self.progress = status.progress
        self.checkpoint = status.checkpoint
        self.alarms = status.alarms
        self.export_uri = status.export_uri
        self._stop_request = None if job.stop_request is None else as_recorded(job.stop_request)
        self._generation = job.generation
        self._conditions = {condition.type: condition for condition in status.conditions}

    @property
    def attempt(self) -> Attempt:
        """The newest attempt. Only for jobs that have an attempt."""
        return self.attempts[-1]

    @property
    def counts_since(self) -> str | None:
        """Since when the newest attempt counts toward the job's active seconds; None while it waits in a queue or for
        capacity."""
        is_waiting = self.waiting_since is not None and self.attempt.running_since is None
        return None if is_waiting else self.attempt.counted_since

    @property
    def is_under_way(self) -> bool:
        """Whether an attempt has started and not ended."""
        return bool(self.attempts) and self.attempt.ended is None

    @property
    def has_stop_request(self) -> bool:
        """Whether a user has asked to stop the job and the operator has not applied it yet."""
        return self._stop_request is not None and self._stop_request != self.handled.stop

    def record_stop_applied(self) -> None:
        """Records that the stop request was applied."""
        self.handled = self.handled.model_copy(update={"stop": self._stop_request})

    def change_attempt(self, **changes: object) -> None:
        """Replaces fields of the newest attempt's record."""
        self.attempts[-1] = self.attempt.model_copy(update=changes)

    def change_counters(self, **changes: int | None) -> None:
        """Replaces the given counters."""
        self.counters = self.counters.model_copy(update=changes)

    def add_attempt(self, attempt: Attempt) -> None:
        """Adds the record of a new attempt and drops the oldest ones beyond `MAX_ATTEMPTS_LISTED`."""
        self.attempts = [*self.attempts, attempt][-MAX_ATTEMPTS_LISTED:]

    def set(self, kind: ConditionType, status: ConditionStatus, reason: Reason, message: str) -> None:
        """Sets a condition. Its last transition time changes only if `status` changes."""
        before = self._conditions.get(kind)
        since = before.last_transition_time if before is not None and before.status is status else None
        self._conditions[kind] = Condition(
            type=kind.value,
            status=status,
            reason=reason.value,
            message=beginning_of(message),
            observed_generation=self._generation,
            last_transition_time=timestamp(self.now) if since is None else since,
        )

    def has(self, kind: ConditionType) -> bool:
        """Whether the status has the condition."""
        return kind in self._conditions

    def set_if_present(self, kind: ConditionType, status: ConditionStatus, reason: Reason, message: str) -> None:
        """Like `set`, but only if the status already has the condition. For conditions that most jobs never have, such
        as Retrying."""
        if self.has(kind):
            self.set(kind, status, reason, message)

    def begin_waiting(self) -> None:
        """Records that the job waits for quota or for nodes with room, if this is not recorded yet."""
        self.waiting_since = self.waiting_since or timestamp(self.now)

    def drop(self, kind: ConditionType) -> None:
        """Removes the condition from the status."""
        self._conditions.pop(kind, None)

    def status(self) -> RLJobStatus:
        """The status to write. Conditions are in the order of `ConditionType`; conditions that this version does not
        know come last. A checkpoint or export with a URI that is too long is left out."""
        order = {kind.value: index for index, kind in enumerate(ConditionType)}
        conditions = tuple(
            sorted(self._conditions.values(), key=lambda condition: order.get(condition.type, len(order)))
        )
        checkpoint = self.checkpoint
        status = RLJobStatus(
            observed_generation=self._generation,
            conditions=conditions,
            progress=self.progress,
            checkpoint=checkpoint if checkpoint is not None and _fits(checkpoint.uri) else None,
            alarms=self.alarms,
            attempts=tuple(self.attempts),
            counters=self.counters,
            next_attempt=self.next_attempt,
            waiting_since=self.waiting_since,
            suspended_at=self.suspended_at,
            result=self.result,
            handled_requests=None if self.handled == HandledRequests() else self.handled,
            pools=self.pools,
            pods=self.pods,
            gpus=self.gpus,
            export_uri=self.export_uri if self.export_uri is not None and _fits(self.export_uri) else None,
        )
        return status.model_copy(update={"phase": _phase_of(status), "reason": _reason_of(status)})


def timestamp(moment: datetime) -> str:
    """A time as a string in UTC, such as `2026-03-01T12:00:00Z`; `moment` must have a time zone."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def moment(text: str) -> datetime:
    """The time in a string that `timestamp` or a trainer wrote."""
    return datetime.fromisoformat(text)


def seconds_since(start: str, now: datetime) -> float:
    """Seconds from `start`, a time as a string, to `now`; negative if `start` is in the future."""
    return (now - moment(start)) / timedelta(seconds=1)


def beginning_of(text: str, limit: int = MAX_CONDITION_MESSAGE) -> str:
    """The start of the text in at most `limit` printable characters."""
    text = printable(text).strip()
    return text if len(text) <= limit else text[: limit - len(_CUT)].rstrip() + _CUT.rstrip()


def both_ends_of(text: str, limit: int) -> str:
    """The start of the text, which names the subject, and its end, which gives the cause, in at most `limit` printable
    characters."""
    text = printable(text).strip()
    if len(text) <= limit:
        return text
    start = limit // 3
    return text[:start].rstrip() + " ... " + text[-(limit - start - 5) :].lstrip()


def end_of(text: str, limit: int = MAX_CONDITION_MESSAGE) -> str:
    """The end of the text in at most `limit` printable characters, from the start of a line if possible: the end of a
    log has the error."""
    text = printable(text).strip()
    if len(text) <= limit:
        return text
    kept = text[-(limit - len(_CUT)) :]
    _, newline, whole_lines = kept.partition("\n")
    return _CUT + (whole_lines if newline and whole_lines else kept).lstrip()


def _fits(uri: str) -> bool:
    """Whether the API server accepts the URI: one string that is too long would make the whole status invalid."""
    return len(uri) <= MAX_URI_LENGTH


def _phase_of(status: RLJobStatus) -> str:
    """The job's phase (`status.phase`), such as `Running`."""
    if status.result is not None:
        return "Complete" if status.result.outcome == AttemptOutcome.SUCCEEDED else "Failed"
    if status.suspended_at is not None:
        return "Suspended"
    if status.next_attempt is not None:
        return _PHASES_BETWEEN_ATTEMPTS.get(status.next_attempt.reason, "Retrying")
    if not status.attempts:
        return "Pending"
    attempt = status.attempts[-1]
    if attempt.ended is not None:
        # Neither a result nor a next attempt is recorded: the job is being suspended, or it was resumed, or a user
        # requested a retry after it failed, and it waits until the pods of this attempt have terminated.
        return AttemptState.STOPPING.value
    return attempt.state


def _reason_of(status: RLJobStatus) -> str | None:
    """The reason for the phase: the reason of the result, else of the next attempt, else `Suspended` for a suspended
    job. Else it is the reason of the first condition in `_CONDITIONS_BEFORE_TRAINING` that is present and not True, and
    if there is none, the reason of Progressing."""
    if status.result is not None:
        return status.result.reason
    if status.next_attempt is not None:
        return status.next_attempt.reason
    conditions = {condition.type: condition for condition in status.conditions}
    if status.suspended_at is not None:
        return "Suspended"
    for kind in _CONDITIONS_BEFORE_TRAINING:
        found = conditions.get(kind)
        if found is not None and found.status is not ConditionStatus.TRUE:
            return found.reason
    progressing = conditions.get(ConditionType.PROGRESSING)
    return progressing.reason if progressing is not None else None
