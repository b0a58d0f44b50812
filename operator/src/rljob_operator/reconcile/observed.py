"""Types for what the operator sees of one job at one moment: `controller/observe` fills them, `reconcile` reads them.

The facts come from the API server and from Ray, so a restarted operator sees the same. Only two kinds of facts are lost
with the process, which remembers them: the failure of an effect, and since when something does not respond.
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
from rljob_operator.manifests.ownership import JobIdentity


@dataclass(frozen=True)
class ObservedJob:
    """The RLJob itself."""

    namespace: str
    name: str
    uid: str
    generation: int
    created: datetime
    """In UTC."""
    deleting: bool
    spec: RLJobSpec | None
    """None if it cannot be parsed; then `spec_error` says why."""
    spec_error: str | None
    status: RLJobStatus
    unknown_fields: tuple[str, ...] = ()
    """Paths of spec fields that this operator does not know and ignores; a newer version added them."""
    stop_request: str | None = None
    """Value of the annotation `constants.ANNOTATION_STOP`."""
    retry_request: str | None = None
    """Value of the annotation `constants.ANNOTATION_RETRY`."""
    memory_shortage: str = ""
    """A warning that the models are estimated not to fit into GPU memory; empty if they fit or no estimate exists."""
    readable_policy: RunPolicy = field(default_factory=RunPolicy)
    """If the spec cannot be parsed: the readable part of its `runPolicy`, with defaults for the rest."""

    @property
    def identity(self) -> JobIdentity:
        """The identity of the job, for its manifests."""
        return JobIdentity(self.namespace, self.name, self.uid)

    @property
    def is_suspended(self) -> bool:
        """Whether `spec.suspend` is true; False if the spec cannot be parsed."""
        return self.spec is not None and self.spec.suspend


@dataclass(frozen=True)
class ObservedCluster:
    """A RayCluster that the job owns."""

    name: str
    uid: str
    deleting: bool
    pod_creation_error: str | None
    """KubeRay's message when it could not create a pod."""
    provisioned: bool = False
    """Whether all its pods have once been ready at the same time; from then on KubeRay creates no new head."""
    asks_for_token: bool = True
    """Whether its spec still turns on Ray's token authentication: a KubeRay that is too old drops `authOptions`."""


@dataclass(frozen=True)
class PodProblem:
    """Why a pod does not start, or how it ended."""

    reason: Reason
    message: str


@dataclass(frozen=True)
class ObservedPod:
    """A pod of the job: it carries the job's UID as a label."""

    name: str
    cluster: str
    """Name of its RayCluster."""
    group: str
    """Name of the pool, or `constants.HEAD_GROUP`."""
    ready: bool
    deleting: bool
    ended: bool
    """Whether its phase is Succeeded or Failed: none of its containers will run again."""
    problem: PodProblem | None
    overdue: bool = False
    """Whether its deletion is more than a minute late: no kubelet carries it out."""
    node: str = ""
    """Name of its Kubernetes node; empty before the pod is scheduled."""
    node_silent_seconds: float = 0.0
    """How long its node has been unreachable: since the node became NotReady, or since the kubelet's lease was last
    renewed, if the operator has read the lease."""


class Reachability(StrEnum):
    """The result of a request to Ray's dashboard."""

    NOT_ASKED = "NotAsked"
    """No request was sent: there is no ready head pod, or no reason to ask."""
    OK = "Ok"
    UNREACHABLE = "Unreachable"
    REJECTED = "Rejected"
    """The token was not accepted (401 or 403)."""
    OPEN = "Open"
    """It accepts requests without a token: anybody who reaches it can run any program."""


class RayJobStatus(StrEnum):
    """The status of a Ray job in Ray's Jobs API."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    STOPPED = "STOPPED"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"

    @property
    def has_ended(self) -> bool:
        """Whether the driver process has ended."""
        return self not in (RayJobStatus.PENDING, RayJobStatus.RUNNING)


@dataclass(frozen=True)
class ObservedRayJob:
    """What Ray reports about the newest submission."""

    submission_id: str
    status: RayJobStatus
    message: str
    error_type: str | None
    exit_code: int | None
    """Exit code of the driver; negative for a signal, None if Ray does not know it."""


@dataclass(frozen=True)
class ObservedRayNode:
    """One Ray node that is alive."""

    is_head: bool
    num_gpus: int


@dataclass(frozen=True)
class ObservedRay:
    """What the dashboard reports. Except for `silent_seconds`, the fields after `error` are only set if `reachability`
    is OK."""

    reachability: Reachability
    error: str | None = None
    """Why it is not OK."""
    silent_seconds: float = 0.0
    """If it is not OK: how long all polls of this process have failed. A short time may only mean one slow response."""
    nodes: tuple[ObservedRayNode, ...] = ()
    job: ObservedRayJob | None = None
    """None if nothing was submitted, or Ray knows no Ray job with the id of the newest submission."""
    run_state: RunState | None = None
    """The run state of the newest submission. It is read after `job`: if the Ray job has ended, it is the final run
    state. None if the trainer has not written it yet, or if it cannot be parsed. (If the request fails, `reachability`
    is Unreachable.)"""
    run_state_error: str | None = None
    """Why the run state cannot be parsed; None if it can, or there is none."""
    infeasible_groups: tuple[str, ...] = ()
    """Placement groups that no set of nodes can hold, with the resources that they request."""
    stacks_missing: bool = False
    """Whether Ray was asked for the program that writes the trainer's stack traces, and did not know it."""
    log_tail: str = ""
    """Last lines of the driver's log; read only if the Ray job has ended without success."""


class EffectKind(StrEnum):
    """The kinds of changes that the operator makes in Kubernetes and Ray."""

    CREATE_CLUSTER = "CreateCluster"
    SUBMIT_JOB = "SubmitJob"
    STOP_JOB = "StopJob"
    DUMP_STACKS = "DumpStacks"
    APPLY_NETWORK_POLICY = "ApplyNetworkPolicy"
    DELETE_CLUSTER = "DeleteCluster"
    DELETE_JOB = "DeleteJob"


@dataclass(frozen=True)
class EffectFailure:
    """Why the newest effect for this job failed. Only this process knows it; after a restart the effect is retried."""

    kind: EffectKind
    reason: Reason
    message: str


@dataclass(frozen=True)
class Observed:
    """The input of `reconcile`. It has all clusters that the job owns, and all pods that carry the job's UID as a
    label: those of every attempt, and also those that are being deleted."""

    job: ObservedJob
    kuberay_installed: bool
    clusters: tuple[ObservedCluster, ...]
    pods: tuple[ObservedPod, ...]
    ray: ObservedRay
    """What the dashboard of the running attempt's cluster reports."""
    failure: EffectFailure | None = None
    forbidden: str | None = None
    """The API server's message if the operator may not read clusters or pods; `clusters` and `pods` may then be stale
    or empty."""

    def cluster(self, name: str) -> ObservedCluster | None:
        """The cluster of this name; None if there is none."""
        return next((cluster for cluster in self.clusters if cluster.name == name), None)

    def pods_of(self, name: str) -> tuple[ObservedPod, ...]:
        """The pods of the cluster of this name."""
        return tuple(pod for pod in self.pods if pod.cluster == name)
