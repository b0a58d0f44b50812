"""Types for what a reconcile pass decides: the status to write, effects, events, and the time of the next pass."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar

from rljob_api.conditions import ConditionType, Reason
from rljob_api.v1alpha1.status import Condition, ConditionStatus, RLJobStatus
from rljob_operator.reconcile.observed import EffectKind

MAX_NOTE_BYTES = 1024
"""The API server's limit for an event's note."""
MAX_REASON_CHARACTERS = 128
"""The API server's limit for an event's reason."""

_QUIET = (
    *(Reason.VALID, Reason.PODS_PENDING, Reason.FEASIBLE, Reason.SUBMITTING, Reason.NO_CHECKPOINT_YET),
    *(Reason.ENDED, Reason.DELETING, Reason.RAY_NODES_MISSING, Reason.NEXT_ATTEMPT_STARTED, Reason.SUSPENDING),
)
"""Reasons without an event: the event for the reason before or after them says the same."""

_NORMAL = (
    *(Reason.CREATING, Reason.READY, Reason.SUBMITTED, Reason.STARTING, Reason.TRAINING, Reason.STOPPING),
    *(Reason.QUEUED, Reason.ADMITTED),
    *(Reason.SAVED, Reason.SUCCEEDED, Reason.REMOVED, Reason.KEPT, Reason.SUSPENDED, Reason.RESUMED, Reason.RESIZED),
    Reason.QUEUE_CHANGED,
    Reason.WAITING_FOR_NEXT_ATTEMPT,
)
"""Reasons whose events have the type Normal; other events are warnings."""
_KNOWN = frozenset(Reason)


@dataclass(frozen=True)
class CreateCluster:
    """Creates the Secret, the network policy and the RayCluster of an attempt. If the job already has the RayCluster,
    it stays unchanged, except that a RayCluster without token authentication is deleted. Nothing is created while the
    API server lists pods of another RayCluster with this name, for example the RayCluster of a deleted job."""

    kind: ClassVar[EffectKind] = EffectKind.CREATE_CLUSTER
    attempt: int
    """The number in the cluster's name; a label of its pods."""
    cluster: str
    """Name of the RayCluster."""


@dataclass(frozen=True)
class SubmitRayJob:
    """Submits the trainer as a Ray job. If Ray already has a Ray job with this id, the trainer counts as submitted."""

    kind: ClassVar[EffectKind] = EffectKind.SUBMIT_JOB
    submission_id: str
    attempt: int
    start_number: int
    """Number of this start of the trainer, for fencing; see `constants.ENV_START_NUMBER`."""
    nodes: tuple[tuple[str, int], ...] = ()
    """Node counts by pool name; empty if the attempt uses all nodes of the spec."""


@dataclass(frozen=True)
class StopRayJob:
    """Asks the trainer, a Ray job, to save a checkpoint and exit."""

    kind: ClassVar[EffectKind] = EffectKind.STOP_JOB
    submission_id: str


@dataclass(frozen=True)
class DumpStacks:
    """Submits the program that writes the stack traces of the trainer's processes into the folder of the trainer's
    logs, before the trainer is stopped. If Ray already has the program, nothing is done."""

    kind: ClassVar[EffectKind] = EffectKind.DUMP_STACKS
    submission_id: str
    """Submission id of the trainer."""
    attempt: int


@dataclass(frozen=True)
class ApplyNetworkPolicy:
    """Applies the network policy of a cluster again, so that this operator can reach the cluster's dashboard: an
    operator in another namespace may have created the cluster. Done at most once a minute."""

    kind: ClassVar[EffectKind] = EffectKind.APPLY_NETWORK_POLICY
    cluster: str


@dataclass(frozen=True)
class DeleteCluster:
    """Deletes the RayCluster with this name and UID; a RayCluster with another UID stays. If it is deleted and `event`
    is not empty, an event on the job has this message."""

    kind: ClassVar[EffectKind] = EffectKind.DELETE_CLUSTER
    name: str
    uid: str
    event: str = field(default="", compare=False)


@dataclass(frozen=True)
class DeleteJob:
    """Deletes the RLJob with this UID. Kubernetes then deletes everything that the RLJob owns. Before, an event on the
    job gets the message `event`; events stay when their job is deleted."""

    kind: ClassVar[EffectKind] = EffectKind.DELETE_JOB
    uid: str
    event: str = field(default="", compare=False)


Effect = CreateCluster | SubmitRayJob | StopRayJob | DumpStacks | ApplyNetworkPolicy | DeleteCluster | DeleteJob


class EventType(StrEnum):
    """The type of a Kubernetes event."""

    NORMAL = "Normal"
    WARNING = "Warning"


class EventReason(StrEnum):
    """Reasons of events that belong to no condition."""

    CLUSTER_DELETED = "ClusterDeleted"
    JOB_DELETED = "JobDeleted"
    STATUS_UNREADABLE = "StatusUnreadable"
    STATUS_NOT_WRITTEN = "StatusNotWritten"


@dataclass(frozen=True)
class EventRecord:
    """An event to post: one line in `kubectl describe`."""

    type: EventType
    reason: str
    """A `Reason`, an `EventReason`, or a reason that this operator does not know."""
    message: str


@dataclass(frozen=True)
class Decision:
    """The decision of a reconcile pass. It is carried out in this order: write `status` if it differs from the observed
    one, carry out the effects, post the events.

    The status records the intent of each effect, so an operator that reads it after a crash repeats the same effects.
    If the status cannot be written, nothing else is done."""

    status: RLJobStatus
    effects: tuple[Effect, ...] = ()
    events: tuple[EventRecord, ...] = ()
    requeue_after_seconds: float | None = None
    """Seconds until the next pass; None if only a watch event can change anything."""


def events_between(before: RLJobStatus, after: RLJobStatus) -> tuple[EventRecord, ...]:
    """One event for each condition whose status or reason changed, except for reasons in `_QUIET` and for
    TrainingHealthy: `trainer.new_alarms` has an event when an alarm is raised. If several changed conditions have the
    same reason, only the last of them gets an event. An event with a reason that this operator does not know is a
    warning if the condition is False."""
    known = {condition.type: (condition.status, condition.reason) for condition in before.conditions}
    changed = {
        condition.reason: condition
        for condition in after.conditions
        if known.get(condition.type) != (condition.status, condition.reason)
        and condition.type != ConditionType.TRAINING_HEALTHY
    }
    return tuple(
        EventRecord(
            type=EventType.WARNING if _is_warning(condition) else EventType.NORMAL,
            reason=reason[:MAX_REASON_CHARACTERS],
            message=bounded_note(condition.message or condition.type),
        )
        for reason, condition in changed.items()
        if reason not in _QUIET
    )


def _is_warning(condition: Condition) -> bool:
    if condition.reason in _KNOWN:
        return condition.reason not in _NORMAL
    return condition.status is ConditionStatus.FALSE


def bounded_note(text: str) -> str:
    """The start of the text, at most `MAX_NOTE_BYTES`."""
    return text.encode()[:MAX_NOTE_BYTES].decode(errors="ignore")
