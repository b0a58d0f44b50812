"""Types for what the operator sees of one job at one moment: `controller/observe` fills them, `reconcile` reads them.

The facts come from the API server and from Ray, so a restarted operator sees the same. Two kinds of facts come from the
memory of the operator's process and are lost when it restarts: the failure of an effect, and since when something does
not respond.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from rljob_api.conditions import Reason
from rljob_api.run_state import RunState
from rljob_api.v1alpha1.pools import PRIORITY_CLASS_LABEL, QUEUE_LABEL
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
    labels: Mapping[str, str] = field(default_factory=dict)
    is_managed: bool = True
    """Whether this operator runs the job; False if `spec.managedBy` names another controller."""
    memory_shortage: str = ""
    """A warning that the models are estimated not to fit into GPU memory; empty if they fit or no estimate exists."""
    readable_policy: RunPolicy = field(default_factory=RunPolicy)
    """If the spec cannot be parsed: the readable part of its `runPolicy`, with defaults for the rest."""

    @property
    def identity(self) -> JobIdentity:
        """The identity of the job, for its manifests."""
        return JobIdentity(self.namespace, self.name, self.uid)

    @property
    def should_be_suspended(self) -> bool:
        """Whether `spec.suspend` is true; False if the spec cannot be parsed."""
        return self.spec is not None and self.spec.suspend

    @property
    def queue_labels(self) -> Mapping[str, str]:
        """The job's labels for Kueue, which its RayCluster gets; empty if the job is in no queue."""
        if not self.labels.get(QUEUE_LABEL):
            return {}
        return {key: self.labels[key] for key in (QUEUE_LABEL, PRIORITY_CLASS_LABEL) if key in self.labels}


@dataclass(frozen=True)
class ObservedWorkload:
    """What Kueue reports about a RayCluster, in its Workload object."""

    waits_for: str = ""
    """Why no quota is reserved now; empty if Kueue has not said so."""
    evicted_because: str = ""
    """Why the cluster was evicted; empty if it was not, or if it was admitted again since then."""


@dataclass(frozen=True)
class ObservedCluster:
    """A RayCluster that the job owns."""

    name: str
    uid: str
    deleting: bool
    pod_creation_error: str | None
    """KubeRay's message when it could not create a pod."""
    provisioned: bool | None = None
    """Whether all pods of the cluster have once been ready at the same time. From then on, KubeRay no longer replaces
    the head pod."""
    asks_for_token: bool = True
    """Whether the cluster's spec still turns on Ray's token authentication: a KubeRay that is too old drops
    `authOptions`."""
    suspended: bool = False
    """`spec.suspend`: KubeRay creates no pods, or deletes them. Kueue suspends a cluster until its queue admits it, and
    again when it evicts the cluster."""
    suspending: bool = False
    """Whether KubeRay is deleting the pods after `suspend` was set. It goes on with this even if `suspend` is reset."""
    queue: str = ""
    """Name of the cluster's queue (Kueue); empty without one."""
    workload: ObservedWorkload | None = None
    """None without a queue, or if the operator does not read Kueue's objects."""
    priority_class: str = ""
    """Name of the cluster's WorkloadPriorityClass (Kueue); empty without one."""

    def has_queue_labels(self, labels: Mapping[str, str]) -> bool:
        """Whether the cluster has these labels for Kueue. A webhook may have added a priority, so without a label for
        it, any priority is right."""
        priority = labels.get(PRIORITY_CLASS_LABEL)
        return self.queue == labels.get(QUEUE_LABEL, "") and priority in (None, self.priority_class)

    @property
    def is_suspended(self) -> bool:
        """Whether the cluster is suspended, or KubeRay still deletes its pods after it was suspended."""
        return self.suspended or self.suspending


@dataclass(frozen=True)
class PodProblem:
    """Why a pod, or pods of a cluster, do not start, or how a pod ended."""

    reason: Reason
    message: str


@dataclass(frozen=True)
class ObservedPod:
    """A pod with the job's UID as a label."""

    name: str
    cluster: str
    """Name of its RayCluster."""
    group: str
    """Name of the pool, or `constants.HEAD_GROUP`."""
    ready: bool
    deleting: bool
    ended: bool
    """Whether the pod's phase is Succeeded or Failed: none of its containers will run again."""
    problem: PodProblem | None
    """None if no problem is known."""
    overdue: bool = False
    """Whether the pod should have been deleted more than a minute ago: its node's kubelet does not delete it."""
    node: str = ""
    """Name of the pod's Kubernetes node; empty before the pod is scheduled."""
    node_silent_seconds: float = 0.0
    """How long the pod's node has been unreachable: since the node became NotReady, or since the kubelet's lease was
    last renewed, if the operator has read the lease."""
    uid: str = ""


class Reachability(StrEnum):
    """The result of a poll of Ray's dashboard."""

    NOT_ASKED = "NotAsked"
    """No request was sent: no attempt is running, or its cluster has no head pod that can be polled."""
    OK = "Ok"
    UNREACHABLE = "Unreachable"
    REJECTED = "Rejected"
    """The dashboard rejected the token (401 or 403)."""
    OPEN = "Open"
    """The dashboard accepts requests without a token: anybody who reaches it can run any program."""


class RayJobStatus(StrEnum):
    """The status of a Ray job in Ray's Jobs API."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    STOPPED = "STOPPED"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"

    @property
    def has_ended(self) -> bool:
        """Whether the Ray job has ended, with or without success."""
        return self not in (RayJobStatus.PENDING, RayJobStatus.RUNNING)


@dataclass(frozen=True)
class ObservedRayJob:
    """What Ray reports about the newest submission of the trainer."""

    submission_id: str
    status: RayJobStatus
    message: str
    error_type: str | None
    exit_code: int | None
    """Exit code of the driver process; negative for a signal, None if Ray does not know the exit code."""


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
    """Why `reachability` is not OK; None if it is OK, or nothing was asked."""
    silent_seconds: float = 0.0
    """If the newest poll failed: for how long all polls by this operator process have failed. A short time may only
    mean one slow response."""
    nodes: tuple[ObservedRayNode, ...] = ()
    job: ObservedRayJob | None = None
    """None if nothing was submitted, or Ray knows no Ray job with the id of the newest submission."""
    run_state: RunState | None = None
    """The run state of the newest submission. The operator reads it after `job`: if the Ray job has ended, this is the
    final run state. None if the trainer has not written a run state yet, or if it cannot be parsed. (If the request
    fails, `reachability` is Unreachable.)"""
    run_state_error: str | None = None
    """Why the run state cannot be parsed; None if it can be parsed, or there is none."""
    infeasible_groups: tuple[str, ...] = ()
    """Placement groups that no set of nodes can hold, with the resources that they request."""
    stacks_missing: bool = False
    """Whether the operator asked Ray for the program that writes the trainer's stack traces, and Ray does not know
    it."""
    log_tail: str = ""
    """Last lines of the driver's log; read only if the Ray job has ended without success."""


class EffectKind(StrEnum):
    """The kinds of changes that the operator makes in Kubernetes and Ray. SubmitRayJob and StopRayJob are about the
    trainer's Ray job, DeleteJob is about the RLJob."""

    CREATE_CLUSTER = "CreateCluster"
    SUBMIT_JOB = "SubmitRayJob"
    STOP_JOB = "StopRayJob"
    DUMP_STACKS = "DumpStacks"
    APPLY_NETWORK_POLICY = "ApplyNetworkPolicy"
    DELETE_CLUSTER = "DeleteCluster"
    DELETE_JOB = "DeleteJob"


@dataclass(frozen=True)
class EffectFailure:
    """The newest failure of an effect for this job. The operator remembers it until all effects of a pass succeed; a
    restarted operator does not know it and retries the effect."""

    kind: EffectKind
    reason: Reason
    message: str


@dataclass(frozen=True)
class Observed:
    """The input of `reconcile`. It contains all clusters that the job owns and all pods that have the job's UID as a
    label: of every attempt, and also while they are being deleted."""

    job: ObservedJob
    kuberay_installed: bool
    clusters: tuple[ObservedCluster, ...]
    pods: tuple[ObservedPod, ...]
    ray: ObservedRay
    """What the dashboard of the current attempt's cluster reports."""
    failure: EffectFailure | None = None
    """None if no effect has failed, or all effects have succeeded since then."""
    forbidden: str | None = None
    """The API server's message if the operator is not allowed to read the job, its clusters or its pods: then
    `clusters` and `pods` may be stale or empty. None if the operator could read all of them."""

    def cluster(self, name: str) -> ObservedCluster | None:
        """The cluster of this name; None if there is none."""
        return next((cluster for cluster in self.clusters if cluster.name == name), None)

    def pods_of(self, name: str) -> tuple[ObservedPod, ...]:
        """The pods of the cluster of this name."""
        return tuple(pod for pod in self.pods if pod.cluster == name)
