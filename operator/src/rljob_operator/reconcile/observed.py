"""What the operator sees of one job at one moment: `controller/observe` fills these values, `reconcile` reads them.

Everything that matters is on the API server or in Ray. Nothing here outlives a pass, so an operator that was restarted
sees the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from rljob_api.conditions import Reason
from rljob_api.run_state import RunState
from rljob_api.v1alpha1.run_policy import RunPolicy
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
    unknown_fields: tuple[str, ...] = ()
    """Places in the spec of fields that a newer version has and this one does not know; they are ignored."""
    stop_request: str | None = None
    """Value of `constants.ANNOTATION_STOP`."""
    retry_request: str | None = None
    """Value of `constants.ANNOTATION_RETRY`."""
    memory_shortage: str = ""
    """That its models do not fit into the memory of its GPUs, by an estimate, where enough is known for one."""
    readable_policy: RunPolicy = field(default_factory=RunPolicy)
    """Of a spec that cannot be read: what can be read of its `runPolicy`, with defaults for the rest."""

    @property
    def is_suspended(self) -> bool:
        """Whether the job says so; not, where its spec cannot be read."""
        return self.spec is not None and self.spec.suspend


@dataclass(frozen=True)
class ObservedCluster:
    """A RayCluster that carries the job's UID."""

    name: str
    uid: str
    deleting: bool
    pod_creation_error: str | None
    """KubeRay's words when it could not create a pod."""
    provisioned: bool = False
    """All its pods have been ready at one time; from then on KubeRay makes no new head."""
    authenticated: bool = True
    """Whether its spec still holds what makes Ray ask for a token: a KubeRay that is too old drops it."""


@dataclass(frozen=True)
class PodProblem:
    """Why a pod does not start, or how it ended."""

    reason: Reason
    message: str


@dataclass(frozen=True)
class ObservedPod:
    """A pod that carries the job's UID, or that of a RayCluster of the job."""

    name: str
    cluster: str
    """Name of its RayCluster."""
    group: str
    """Name of the pool, or `constants.HEAD_GROUP`."""
    ready: bool
    deleting: bool
    ended: bool
    """Succeeded or failed: none of its containers will run again."""
    problem: PodProblem | None
    overdue: bool = False
    """It should have been gone a minute ago: nobody on its node carries the deletion out."""
    node: str = ""
    """Name of its node; empty before it has one."""
    node_silent_seconds: float = 0.0
    """How long its node has not been heard of: since it is NotReady, or since its kubelet was last seen to renew its
    lease, where that was looked at."""


class Reachability(StrEnum):
    """What became of asking Ray's dashboard."""

    NOT_ASKED = "NotAsked"
    """There was no ready head pod, or no reason to ask."""
    OK = "Ok"
    UNREACHABLE = "Unreachable"
    REJECTED = "Rejected"
    """The token was not accepted (401 or 403)."""
    OPEN = "Open"
    """It answers without a token: anybody who reaches it may run what they like."""


class RayJobStatus(StrEnum):
    """As Ray's Jobs API says it."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    STOPPED = "STOPPED"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"

    @property
    def has_ended(self) -> bool:
        """Whether the driver runs no more."""
        return self not in (RayJobStatus.PENDING, RayJobStatus.RUNNING)


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
    silent_seconds: float = 0.0
    """How long this process has asked in vain, where it is not OK; a single slow answer is not worth a word."""
    nodes: tuple[ObservedRayNode, ...] = ()
    job: ObservedRayJob | None = None
    """None where Ray knows no job with the id of the newest submission."""
    run_state: RunState | None = None
    """Of the newest submission, read after `job`, so that of a job that has ended it is the last. None before the
    trainer has written it, and for one that cannot be read; where the request for it failed, the dashboard counts as
    unreachable."""
    run_state_error: str | None = None
    """Why there is a run state that cannot be read."""
    infeasible_groups: tuple[str, ...] = ()
    """Placement groups that no set of nodes can hold, with what they ask for."""
    stacks_missing: bool = False
    """Ray knows of no program that writes the stacks of the newest submission, and was asked for it."""
    log_tail: str = ""
    """Last lines of the driver's log; only read when the job has ended without success."""


class EffectKind(StrEnum):
    """What the operator may do to the outside."""

    CREATE_CLUSTER = "CreateCluster"
    SUBMIT_JOB = "SubmitJob"
    STOP_JOB = "StopJob"
    DUMP_STACKS = "DumpStacks"
    APPLY_NETWORK_POLICY = "ApplyNetworkPolicy"
    DELETE_CLUSTER = "DeleteCluster"
    DELETE_JOB = "DeleteJob"


@dataclass(frozen=True)
class EffectFailure:
    """The newest effect for this job failed. Known to this process only; after a restart the effect is tried again."""

    kind: EffectKind
    reason: Reason
    message: str


@dataclass(frozen=True)
class Observed:
    """Everything that `reconcile` knows. Clusters and pods are all those that carry the job's UID, whichever attempt
    they belong to, those that are going included."""

    job: ObservedJob
    kuberay_installed: bool
    clusters: tuple[ObservedCluster, ...]
    pods: tuple[ObservedPod, ...]
    ray: ObservedRay
    """Of the cluster of the attempt under way."""
    failure: EffectFailure | None = None
    forbidden: str | None = None
    """What the operator may not read, in the API server's words; what is above is then older, or empty."""

    def cluster(self, name: str) -> ObservedCluster | None:
        """The cluster of this name; None where there is none."""
        return next((cluster for cluster in self.clusters if cluster.name == name), None)

    def pods_of(self, name: str) -> tuple[ObservedPod, ...]:
        """The pods of the cluster of this name."""
        return tuple(pod for pod in self.pods if pod.cluster == name)
