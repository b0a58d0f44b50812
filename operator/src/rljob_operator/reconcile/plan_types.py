"""What is to be done about a job: a status to write, then effects, then events to post, and when to look again."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from rljob_api.conditions import Reason
from rljob_api.v1alpha1.status import RLJobStatus
from rljob_operator.reconcile.observed import EffectKind

MAX_BYTES = 1024
"""Of an event's note, as the API server counts it."""

_QUIET = (
    *(Reason.VALID, Reason.PODS_PENDING, Reason.FEASIBLE, Reason.SUBMITTING, Reason.NO_CHECKPOINT_YET),
    *(Reason.ENDED, Reason.RAY_NODES_MISSING, Reason.NEXT_ATTEMPT_STARTED, Reason.SUSPENDING),
)
"""Said by the event before or after."""

_GOOD = (
    *(Reason.CREATING, Reason.READY, Reason.SUBMITTED, Reason.STARTING, Reason.TRAINING, Reason.STOPPING),
    *(Reason.SAVED, Reason.SUCCEEDED, Reason.REMOVED, Reason.KEPT, Reason.SUSPENDED, Reason.RESUMED, Reason.RESIZED),
    Reason.WAITING_FOR_NEXT_ATTEMPT,
)


@dataclass(frozen=True)
class CreateCluster:
    """Secret, network policy and RayCluster of an attempt; those that exist already are left as they are. Only where
    nothing is left of any other cluster of the job, nor of another one of this name: that is looked at on the API
    server itself before it is done."""

    kind: ClassVar[EffectKind] = EffectKind.CREATE_CLUSTER
    attempt: int
    cluster: str
    """Its name."""
    lost_pods: tuple[str, ...] = ()
    """Names of pods that are still listed though their nodes are lost; they are not waited for."""


@dataclass(frozen=True)
class SubmitJob:
    """Starts the trainer. A job with this id that exists already counts as submitted."""

    kind: ClassVar[EffectKind] = EffectKind.SUBMIT_JOB
    submission_id: str
    attempt: int
    start_number: int
    """See `constants.ENV_START_NUMBER`."""
    nodes: tuple[tuple[str, int], ...] = ()
    """Names of pools and their numbers of nodes, where these are fewer than the job asks for."""


@dataclass(frozen=True)
class StopJob:
    """Asks the trainer to stop: it saves a checkpoint and ends."""

    kind: ClassVar[EffectKind] = EffectKind.STOP_JOB
    submission_id: str


@dataclass(frozen=True)
class DumpStacks:
    """Has the stacks of a trainer's processes written beside its logs, before anything of it is stopped. Once is
    enough."""

    kind: ClassVar[EffectKind] = EffectKind.DUMP_STACKS
    submission_id: str
    """Of the trainer."""
    attempt: int


@dataclass(frozen=True)
class ApplyNetworkPolicy:
    """Lets this operator in to the dashboard of a cluster that was made by one of another namespace. Done again after
    a minute at the earliest."""

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
    """Deletes the RLJob of this UID, and with it everything that it owns."""

    kind: ClassVar[EffectKind] = EffectKind.DELETE_JOB
    uid: str


Effect = CreateCluster | SubmitJob | StopJob | DumpStacks | ApplyNetworkPolicy | DeleteCluster | DeleteJob


class EventType(StrEnum):
    """As Kubernetes events have it."""

    NORMAL = "Normal"
    WARNING = "Warning"


@dataclass(frozen=True)
class EventRecord:
    """One line under `kubectl describe`."""

    type: EventType
    reason: Reason
    message: str


@dataclass(frozen=True)
class Plan:
    """In this order: write `status` if it differs from the observed one, do the effects, post the events.

    The status holds the intent of each effect, so whoever reads it after a crash does the same again. If the status
    cannot be written, nothing else is done."""

    status: RLJobStatus
    effects: tuple[Effect, ...] = ()
    events: tuple[EventRecord, ...] = ()
    requeue_after_seconds: float | None = None
    """None where only a change of the outside can matter."""


def events_between(before: RLJobStatus, after: RLJobStatus) -> tuple[EventRecord, ...]:
    """In the order of the conditions. A reason that two conditions give is told once, by the later of them."""
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
    return text.encode()[:MAX_BYTES].decode(errors="ignore")
