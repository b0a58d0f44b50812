"""The status while a pass works on it: conditions with their times, and the phase that follows from them."""

from __future__ import annotations

from datetime import datetime

from rljob_api.conditions import ConditionType, Reason
from rljob_api.v1alpha1.status import Attempt, Condition, ConditionStatus, RLJobStatus
from rljob_operator.reconcile.messages import beginning_of
from rljob_operator.reconcile.observed import ObservedJob
from rljob_operator.reconcile.timestamps import timestamp

MAX_URI_LENGTH = 4096
TRUE, FALSE, UNKNOWN = ConditionStatus.TRUE, ConditionStatus.FALSE, ConditionStatus.UNKNOWN


class StatusDraft:
    """Begins as the status observed; what a pass does not touch stays."""

    def __init__(self, job: ObservedJob, now: datetime) -> None:
        self.now = now
        self.attempts = list(job.status.attempts)
        self.pools = job.status.pools
        self.progress = job.status.progress
        self.checkpoint = job.status.checkpoint
        self.export_uri = job.status.export_uri
        self._generation = job.generation
        self._conditions = {condition.type: condition for condition in job.status.conditions}

    @property
    def attempt(self) -> Attempt:
        """The newest; there must be one."""
        return self.attempts[-1]

    def change_attempt(self, attempt: Attempt) -> None:
        """Replaces the newest."""
        self.attempts[-1] = attempt

    def condition(self, kind: ConditionType) -> Condition | None:
        """None where nothing was said yet."""
        return self._conditions.get(kind)

    def is_true(self, kind: ConditionType) -> bool:
        """Whether the condition holds; not, where nothing was said yet."""
        condition = self.condition(kind)
        return condition is not None and condition.status is TRUE

    def has_reason(self, kind: ConditionType, *reasons: Reason) -> bool:
        """Whether the condition gives one of these reasons."""
        condition = self.condition(kind)
        return condition is not None and condition.reason in reasons

    @property
    def ended(self) -> bool:
        """Complete or Failed, for good."""
        return self.is_true(ConditionType.COMPLETE) or self.is_true(ConditionType.FAILED)

    def set(self, kind: ConditionType, status: ConditionStatus, reason: Reason, message: str) -> None:
        """The time of the last transition moves only with `status`."""
        before = self.condition(kind)
        since = before.last_transition_time if before is not None and before.status is status else None
        self._conditions[kind] = Condition(
            type=kind.value,
            status=status,
            reason=reason.value,
            message=beginning_of(message),
            observed_generation=self._generation,
            last_transition_time=timestamp(self.now) if since is None else since,
        )

    def status(self) -> RLJobStatus:
        """What is to be written. Conditions come in the order of `ConditionType`; those of other versions, last."""
        order = {kind.value: place for place, kind in enumerate(ConditionType)}
        conditions = sorted(self._conditions.values(), key=lambda condition: order.get(condition.type, len(order)))
        checkpoint = self.checkpoint
        return RLJobStatus(
            observed_generation=self._generation,
            phase=self._phase(),
            conditions=tuple(conditions),
            progress=self.progress,
            checkpoint=checkpoint if checkpoint is not None and _fits(checkpoint.uri) else None,
            attempts=tuple(self.attempts),
            pools=self.pools,
            export_uri=self.export_uri if self.export_uri is not None and _fits(self.export_uri) else None,
        )

    def _phase(self) -> str:
        """One word for people."""
        if self.is_true(ConditionType.COMPLETE):
            return "Complete"
        if self.is_true(ConditionType.FAILED):
            return "Failed"
        if not self.attempts:
            return "Pending"
        if self.has_reason(ConditionType.PROGRESSING, Reason.STOPPING):
            return "Stopping"
        if self.has_reason(ConditionType.PROGRESSING, Reason.STARTING):
            return "Starting"
        if self.condition(ConditionType.PROGRESSING) is not None:
            return "Running"
        submitting = self.condition(ConditionType.JOB_SUBMITTED) is not None
        return "Starting" if submitting or self.is_true(ConditionType.CLUSTER_READY) else "Provisioning"


def _fits(uri: str) -> bool:
    """Whether the API server takes it: one text that is too long would keep the whole status from being written."""
    return len(uri) <= MAX_URI_LENGTH
