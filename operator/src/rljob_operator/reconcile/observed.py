"""What the operator sees of one job at one moment: `controller/observe` fills these values, `reconcile` reads them.

Everything that matters is on the API server or in Ray. Nothing here outlives a pass, so an operator that was restarted
sees the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from rljob_api.conditions import Reason
from rljob_api.run_state import RunState
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_api.v1alpha1.status import RLJobStatus


@dataclass(frozen=True)
class ObservedJob:
    """The resource itself."""

    namespace: str
    name: str
    uid: str
    generation: int
    created: datetime
    """In UTC."""
    deleting: bool
    spec: RLJobSpec | None
    """None where it cannot be read; then `spec_error` says why."""
    spec_error: str | None
    status: RLJobStatus


@dataclass(frozen=True)
class ObservedCluster:
    """The RayCluster that has the name of the job's newest attempt, whoever owns it."""

    name: str
    uid: str
    owner_uid: str | None
    """UID of the controlling owner."""
    deleting: bool
    pod_creation_error: str | None
    """KubeRay's words when it could not create a pod."""
    provisioned: bool = False
    """All its pods have been ready at one time; from then on KubeRay makes no new head."""


@dataclass(frozen=True)
class PodProblem:
    """Why a pod does not start, or how it ended."""

    reason: Reason
    message: str


@dataclass(frozen=True)
class ObservedPod:
    """A pod of the newest attempt's cluster."""

    name: str
    group: str
    """Name of the pool, or `constants.HEAD_GROUP`."""
    ready: bool
    deleting: bool
    ended: bool
    """Succeeded or failed: none of its containers will run again."""
    problem: PodProblem | None
    overdue: bool = False
    """It should have been gone a minute ago: nobody on its node carries the deletion out."""


class Reachability(StrEnum):
    """What became of asking Ray's dashboard."""

    NOT_ASKED = "NotAsked"
    """There was no ready head pod, or no reason to ask."""
    OK = "Ok"
    UNREACHABLE = "Unreachable"
    REJECTED = "Rejected"
    """The token was not accepted (401 or 403)."""


class RayJobStatus(StrEnum):
    """As Ray's Jobs API says it."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    STOPPED = "STOPPED"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"


@dataclass(frozen=True)
class ObservedRayJob:
    """The newest submission."""

    submission_id: str
    status: RayJobStatus
    message: str
    error_type: str | None
    exit_code: int | None
    """Of the driver; negative for a signal, None where Ray does not know."""


@dataclass(frozen=True)
class ObservedRayNode:
    """One Ray node that is alive."""

    is_head: bool
    num_gpus: int


@dataclass(frozen=True)
class ObservedRay:
    """What the dashboard says. The fields after `error` mean something only where `reachability` is OK."""

    reachability: Reachability
    error: str | None = None
    """Why it was unreachable or rejected."""
    nodes: tuple[ObservedRayNode, ...] = ()
    job: ObservedRayJob | None = None
    """None where Ray knows no job with the id of the newest submission."""
    run_state: RunState | None = None
    """Of the newest submission, read after `job`, so that of a job that has ended it is the last. None before the
    trainer has written it, and for one that is damaged or of another version; where the request for it failed, the
    dashboard counts as unreachable."""
    infeasible_groups: tuple[str, ...] = ()
    """Placement groups that no set of nodes can hold, with what they ask for."""
    log_tail: str = ""
    """Last lines of the driver's log; only read when the job has ended without success."""


class EffectKind(StrEnum):
    """What the operator may do to the outside."""

    CREATE_CLUSTER = "CreateCluster"
    SUBMIT_JOB = "SubmitJob"
    STOP_JOB = "StopJob"
    DELETE_CLUSTER = "DeleteCluster"


@dataclass(frozen=True)
class EffectFailure:
    """The newest effect for this job failed. Known to this process only; after a restart the effect is tried again."""

    kind: EffectKind
    reason: Reason
    message: str


@dataclass(frozen=True)
class Observed:
    """Everything that `reconcile` knows."""

    job: ObservedJob
    kuberay_installed: bool
    cluster: ObservedCluster | None
    pods: tuple[ObservedPod, ...]
    """Pods with the label of the newest attempt's cluster, those that are going included. Where there is no cluster,
    they are of a former one of its name."""
    ray: ObservedRay
    failure: EffectFailure | None = None
