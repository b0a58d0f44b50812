"""Types for what a reconcile pass decides: the status to write, effects, events, and the time of the next pass."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from rljob_api.conditions import Reason
from rljob_api.v1alpha1.status import RLJobStatus
from rljob_operator.reconcile.observed import EffectKind

MAX_NOTE_BYTES = 1024
"""The API server's limit for an event's note."""

_QUIET = (
    *(Reason.VALID, Reason.PODS_PENDING, Reason.FEASIBLE, Reason.SUBMITTING, Reason.NO_CHECKPOINT_YET),
    *(Reason.ENDED, Reason.DELETING, Reason.RAY_NODES_MISSING, Reason.NEXT_ATTEMPT_STARTED, Reason.SUSPENDING),
)
"""Reasons that get no event of their own, because the event before or after them says the same."""

_GOOD = (
    *(Reason.CREATING, Reason.READY, Reason.SUBMITTED, Reason.STARTING, Reason.TRAINING, Reason.STOPPING),
    *(Reason.SAVED, Reason.SUCCEEDED, Reason.REMOVED, Reason.KEPT, Reason.SUSPENDED, Reason.RESUMED, Reason.RESIZED),
    Reason.WAITING_FOR_NEXT_ATTEMPT,
)


@dataclass(frozen=True)
class CreateCluster:
    """Creates Secret, network policy and RayCluster of an attempt; an existing cluster stays as it is. The API server
    is asked first: nothing is created while pods of a deleted job's cluster with this name are left."""

    kind: ClassVar[EffectKind] = EffectKind.CREATE_CLUSTER
    attempt: int
    cluster: str
    """Name of the RayCluster."""


@dataclass(frozen=True)
class SubmitJob:
    """Starts the trainer. If Ray already has a job with this id, it counts as submitted."""

    kind: ClassVar[EffectKind] = EffectKind.SUBMIT_JOB
    submission_id: str
    attempt: int
    start_number: int
    """See `constants.ENV_START_NUMBER`."""
    nodes: tuple[tuple[str, int], ...] = ()
    """Node counts by pool name; only if they are lower than in the spec."""


@dataclass(frozen=True)
class StopJob:
    """Asks the trainer to save a checkpoint and exit."""

    kind: ClassVar[EffectKind] = EffectKind.STOP_JOB
    submission_id: str


@dataclass(frozen=True)
class DumpStacks:
    """Writes the stacks of a trainer's processes beside its logs, before the trainer is stopped. Done once."""

    kind: ClassVar[EffectKind] = EffectKind.DUMP_STACKS
    submission_id: str
    """Submission id of the trainer."""
    attempt: int


@dataclass(frozen=True)
class ApplyNetworkPolicy:
    """Gives this operator access to the dashboard of a cluster that an operator in another namespace created. Repeated
    once a minute at most."""

    kind: ClassVar[EffectKind] = EffectKind.APPLY_NETWORK_POLICY
    cluster: str


@dataclass(frozen=True)
class DeleteCluster:
    """Deletes the RayCluster of this UID; one of another UID is left alone."""

    kind: ClassVar[EffectKind] = EffectKind.DELETE_CLUSTER
    name: str
    uid: str


@dataclass(frozen=True)
class DeleteJob:
    """Deletes the RLJob of this UID and everything that it owns."""

    kind: ClassVar[EffectKind] = EffectKind.DELETE_JOB
    uid: str


Effect = CreateCluster | SubmitJob | StopJob | DumpStacks | ApplyNetworkPolicy | DeleteCluster | DeleteJob


class EventType(StrEnum):
    """The type of a Kubernetes event."""

    NORMAL = "Normal"
    WARNING = "Warning"


@dataclass(frozen=True)
class EventRecord:
    """An event to post: one line in `kubectl describe`."""

    type: EventType
    reason: Reason
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
    """One event for each condition that changed, in the order of the conditions. If two conditions have the same
    reason, only the later one gets an event."""
    known = {condition.type: (condition.status, condition.reason) for condition in before.conditions}
    changed = {
        condition.reason: condition
        for condition in after.conditions
        if known.get(condition.type) != (condition.status, condition.reason)
    }
    return tuple(
        EventRecord(
            type=EventType.NORMAL if reason in _GOOD else EventType.WARNING,
            reason=Reason(reason),
            message=_bounded(condition.message or condition.type),
        )
        for reason, condition in changed.items()
        if reason not in _QUIET
    )


def _bounded(text: str) -> str:
    return text.encode()[:MAX_NOTE_BYTES].decode(errors="ignore")
