"""The status while a pass works on it: the records that decisions are made by, and the conditions that tell of them.

Conditions are written and never read: what a later pass must know stands in a record.
"""

from __future__ import annotations

from datetime import datetime

from rljob_api.conditions import ConditionType, Reason
from rljob_api.v1alpha1.status import (
    Attempt,
    Condition,
    ConditionStatus,
    Counters,
    HandledRequests,
    RLJobStatus,
)
from rljob_operator.reconcile.messages import beginning_of
from rljob_operator.reconcile.observed import ObservedJob
from rljob_operator.reconcile.phase import phase_of, reason_of
from rljob_operator.reconcile.timestamps import timestamp

MAX_URI_LENGTH = 4096
MAX_ATTEMPTS_LISTED = 10
TRUE, FALSE, UNKNOWN = ConditionStatus.TRUE, ConditionStatus.FALSE, ConditionStatus.UNKNOWN


class StatusDraft:
    """Begins as the status observed; what a pass does not touch stays."""

    def __init__(self, job: ObservedJob, now: datetime) -> None:
        status = job.status
        self.now = now
        self.attempts = list(status.attempts)
        self.counters = status.counters or Counters()
        self.next_attempt = status.next_attempt
        self.suspended_at = status.suspended_at
        self.result = status.result
        self.handled = status.handled_requests or HandledRequests()
        self.pools = status.pools
        self.gpus = status.gpus
        self.progress = status.progress
        self.checkpoint = status.checkpoint
        self.export_uri = status.export_uri
        self._generation = job.generation
        self._conditions = {condition.type: condition for condition in status.conditions}

    @property
    def attempt(self) -> Attempt:
        """The newest; there must be one."""
        return self.attempts[-1]

    @property
    def is_under_way(self) -> bool:
        """Whether an attempt has begun and not ended."""
        return bool(self.attempts) and self.attempt.ended is None

    def change_attempt(self, **changes: object) -> None:
        """Replaces fields of the newest attempt's record."""
        self.attempts[-1] = self.attempt.model_copy(update=changes)

    def change_counters(self, **changes: int | None) -> None:
        """Replaces some of the counters."""
        self.counters = self.counters.model_copy(update=changes)

    def add_attempt(self, attempt: Attempt) -> None:
        """Adds the record of a new attempt; the oldest ones are listed no longer."""
        self.attempts = [*self.attempts, attempt][-MAX_ATTEMPTS_LISTED:]

    def set(self, kind: ConditionType, status: ConditionStatus, reason: Reason, message: str) -> None:
        """The time of the last transition moves only with `status`."""
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

    def set_if_told(self, kind: ConditionType, status: ConditionStatus, reason: Reason, message: str) -> None:
        """As `set`, but only where the condition has been told before: of most jobs nobody need ever read it."""
        if kind in self._conditions:
            self.set(kind, status, reason, message)

    def drop(self, kind: ConditionType) -> None:
        """The condition is not told any more."""
        self._conditions.pop(kind, None)

    def status(self) -> RLJobStatus:
        """What is to be written. Conditions come in the order of `ConditionType`; those of other versions, last."""
        order = {kind.value: place for place, kind in enumerate(ConditionType)}
        conditions = tuple(
            sorted(self._conditions.values(), key=lambda condition: order.get(condition.type, len(order)))
        )
        checkpoint = self.checkpoint
        status = RLJobStatus(
            observed_generation=self._generation,
            conditions=conditions,
            progress=self.progress,
            checkpoint=checkpoint if checkpoint is not None and _fits(checkpoint.uri) else None,
            attempts=tuple(self.attempts),
            counters=self.counters,
            next_attempt=self.next_attempt,
            suspended_at=self.suspended_at,
            result=self.result,
            handled_requests=None if self.handled == HandledRequests() else self.handled,
            pools=self.pools,
            gpus=self.gpus,
            export_uri=self.export_uri if self.export_uri is not None and _fits(self.export_uri) else None,
        )
        return status.model_copy(update={"phase": phase_of(status), "reason": reason_of(status)})


def _fits(uri: str) -> bool:
    """Whether the API server takes it: one text that is too long would keep the whole status from being written."""
    return len(uri) <= MAX_URI_LENGTH
