"""Observations of jobs that wait for quota or room, or lose it: part of the table of `test_reconcile_reasons`."""

from __future__ import annotations

from dataclasses import replace

from rljob_api.conditions import ConditionType, Reason
from rljob_api.constants import HEAD_GROUP
from rljob_api.v1alpha1.pools import QUEUE_LABEL
from rljob_api.v1alpha1.status import RLJobStatus, StopRequest
from rljob_operator.reconcile.observed import (
    EffectFailure,
    EffectKind,
    Observed,
    ObservedWorkload,
    PodProblem,
    RayJobStatus,
)
from rljob_operator.reconcile.status_draft import timestamp
from rljob_testing.messages import Mentions
from rljob_testing.operator import inputs

C, R = ConditionType, Reason
NO_GPU = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
QUOTA = (
    'pods "example-1-w" is forbidden: exceeded quota: gpus, requested: requests.nvidia.com/gpu=2, used:'
    " requests.nvidia.com/gpu=8, limited: requests.nvidia.com/gpu=8"
)
"""A message of the API server: other pods use up the quota."""
QUOTA_TOO_SMALL = (
    'pods "example-1-w" is forbidden: exceeded quota: gpus, requested: requests.nvidia.com/gpu=2, used:'
    " requests.nvidia.com/gpu=0, limited: requests.nvidia.com/gpu=1"
)
"""A message of the API server: the pod alone needs more than the whole quota."""
WAITS = "couldn't assign flavors to pod set main: insufficient unused quota for nvidia.com/gpu, 2 more needed"
PREEMPTED = "Preempted to accommodate a workload (UID: 1) due to prioritization in the ClusterQueue"


def in_queue(*, suspended: bool = True, message: str = WAITS, active: bool = False) -> Observed:
    """A job whose cluster is in the queue `team`; `active`: its queue has admitted it before."""
    there = inputs.cluster(suspended=suspended, queue="team", workload=ObservedWorkload(waits_for=message))
    status = inputs.provisioning() if active else inputs.provisioning(record={"active_since": None})
    return inputs.observed(status, there)


def in_another_queue() -> Observed:
    """A job that waits in the queue `team`; its label now names the queue `other`."""
    seen = in_queue()
    return replace(seen, job=replace(seen.job, labels={QUEUE_LABEL: "other"}))


def evicted() -> Observed:
    """A cluster that its queue has just suspended, with its pods and its trainer."""
    seen = inputs.healthy(inputs.ray_job(), inputs.run_state())
    there = inputs.cluster(suspended=True, queue="team", workload=ObservedWorkload(WAITS, PREEMPTED))
    return replace(seen, clusters=(there,))


def without_room(reason: Reason = R.UNSCHEDULABLE, seconds_ago: float = 1800) -> Observed:
    """An attempt whose pods find no node, or exceed a quota, since `seconds_ago`."""
    waiting = (inputs.pod("w", problem=PodProblem(reason, NO_GPU)),) if reason is R.UNSCHEDULABLE else ()
    pods = (inputs.pod("h", HEAD_GROUP), *waiting)
    error = QUOTA if reason is R.QUOTA_EXCEEDED else None
    return inputs.observed(
        having_waited(inputs.provisioning(seconds_ago=seconds_ago), seconds_ago), inputs.cluster(error=error), pods
    )


def having_waited(status: RLJobStatus, seconds_ago: float) -> RLJobStatus:
    """The status of a job that has waited for capacity since `seconds_ago`."""
    return status.model_copy(update={"waiting_since": timestamp(inputs.at(-seconds_ago))})


def disrupted(*, stopped: bool = False) -> Observed:
    """A trainer one of whose worker pods was evicted by its kubelet; `stopped`: it has stopped because of this."""
    problem = PodProblem(R.DISRUPTED, "TerminationByKubelet: the node was low on memory")
    pods = (inputs.pod("h", HEAD_GROUP), inputs.pod("w", ended=True, problem=problem))
    if not stopped:
        return replace(inputs.healthy(inputs.ray_job(), inputs.run_state()), pods=pods)
    now = timestamp(inputs.NOW)
    stop = StopRequest(reason=R.DISRUPTED.value, message="low on memory", requested_at=now, sent_at=now)
    seen = inputs.healthy(inputs.ray_job(RayJobStatus.STOPPED), status=inputs.running(record={"stop": stop}))
    return replace(seen, pods=pods)


def refused_creation() -> Observed:
    failure = EffectFailure(EffectKind.CREATE_CLUSTER, R.CREATION_REJECTED, QUOTA.replace("pods", "rayclusters.ray.io"))
    return replace(inputs.observed(having_waited(inputs.provisioning(seen=False), 60)), failure=failure)


ROWS: list[tuple[ConditionType, Reason, Observed, str, str | Mentions]] = [
    (C.QUOTA_RESERVED, R.QUEUED, in_queue(), "False", Mentions("example-1 waits in queue team (Kueue)", WAITS)),
    (C.CLUSTER_READY, R.QUEUED, in_queue(), "False", Mentions("example-1 waits in queue team (Kueue)", WAITS)),
    (C.QUOTA_RESERVED, R.ADMITTED, in_queue(suspended=False), "True", "queue team"),
    (C.RETRYING, R.QUEUE_CHANGED, in_another_queue(), "True", Mentions("before its trainer started", "queue team")),
    (C.QUOTA_RESERVED, R.EVICTED, evicted(), "False", Mentions("example-1 was evicted by queue team", PREEMPTED)),
    (C.CLUSTER_READY, R.EVICTED, evicted(), "False", Mentions("example-1 was evicted by queue team", PREEMPTED)),
    (
        C.RETRYING,
        R.EVICTED,
        replace(evicted(), pods=(inputs.pod("w", deleting=True),)),
        "True",
        Mentions(PREEMPTED, "was lost before it exited"),
    ),
    (C.CLUSTER_READY, R.QUOTA_EXCEEDED, without_room(R.QUOTA_EXCEEDED, 60), "False", Mentions("1 of 2 pods", QUOTA)),
    (C.CLUSTER_READY, R.QUOTA_EXCEEDED, refused_creation(), "False", Mentions("exceeded quota: gpus")),
    (C.RETRYING, R.QUOTA_EXCEEDED, without_room(R.QUOTA_EXCEEDED), "True", Mentions("uses no retry", "1800 s", QUOTA)),
    (C.RETRYING, R.UNSCHEDULABLE, without_room(), "True", Mentions("uses no retry", "1800 s", NO_GPU)),
    (C.CLUSTER_READY, R.DISRUPTED, disrupted(), "False", Mentions("low on memory")),
    (C.PROGRESSING, R.STOPPING, disrupted(), "False", Mentions("(Disrupted)")),
    (C.RETRYING, R.DISRUPTED, disrupted(stopped=True), "True", Mentions("uses no retry", "low on memory", "stopped")),
]
