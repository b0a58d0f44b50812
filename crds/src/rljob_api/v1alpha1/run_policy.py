"""Retries, deadlines, graceful stop and cleanup of a job."""

from __future__ import annotations

from enum import StrEnum

from rljob_api.base import WireModel
from rljob_api.scalars import Count, PositiveCount, Seconds


class Cleanup(StrEnum):
    """What happens to the RayCluster when the job finishes."""

    DELETE_CLUSTER = "DeleteCluster"
    """The cluster is deleted, and its GPUs become free."""
    KEEP_CLUSTER = "KeepCluster"
    """The cluster stays for debugging, and keeps its GPUs for `keepClusterSeconds`, or until the job is deleted or this
    field is changed."""


class Elastic(WireModel):
    """Run an attempt with fewer worker pods if some cannot start. When all pods have been ready for `growAfterSeconds`,
    it is stopped with a checkpoint, and the next attempt resumes on all pods."""

    min_nodes: PositiveCount
    """Smallest number of worker pods of each pool.

    The operator uses only numbers with which the job is valid: the batch must be divisible among the GPUs. A pool with
    fewer `nodes` than minNodes always runs with all of its nodes."""
    wait_seconds: Seconds = 300
    """Seconds that an attempt waits for all worker pods. Then it starts with as many of the ready ones as the job is
    valid with."""
    grow_after_seconds: Seconds = 300
    """Seconds that all worker pods must be ready before the job resumes on them.

    Doubled each time that an attempt on
    all pods fails or is disrupted before its first checkpoint, at most six times."""


class RunPolicy(WireModel):
    """Retries, deadlines and cleanup. These fields may be changed while the job exists."""

    max_app_retries: Count = 2
    """Retry budget for application errors (the training or user code failed). Each retry resumes from the newest
    checkpoint.

    At a failure, both retry budgets are reset if the newest checkpoint is later than at every earlier failure."""
    max_infra_retries: Count = 10
    """Retry budget for infrastructure errors (a pod, node, GPU, memory or the network failed); reset together with
    `maxAppRetries`."""
    provisioning_deadline_seconds: Seconds = 1800
    """Seconds from the creation of an attempt's RayCluster, or its admission by a queue, until its trainer runs.

    Then, without free nodes or ResourceQuota, the job deletes the RayCluster and tries again later; if nodes are
    slow, a retry is used; otherwise the job fails."""
    active_deadline_seconds: Seconds | None = None
    """Largest total time of all attempts in seconds. After that the job is stopped with a checkpoint and fails, without
    a retry. Unlimited when unset.

    The start of pods counts; time in a queue, without free nodes, between attempts and during suspension does not."""
    stall_deadline_seconds: Seconds = 3600
    """Largest time in seconds without progress of the trainer (a step, phase or evaluation) or without contact to it;
    then the attempt ends with an infrastructure error.

    If the operator cannot parse the trainer's state, or lacks a permission to read it, the job fails instead."""
    ttl_seconds_after_finished: Count | None = None
    """Seconds after which a finished job is deleted. Its files in the storage stay. When unset, it is never deleted."""
    elastic: Elastic | None = None
    """Run with fewer worker pods if some cannot start. When unset, every attempt waits for all worker pods."""
    cleanup: Cleanup = Cleanup.DELETE_CLUSTER
    keep_cluster_seconds: Seconds = 86_400
    """With `cleanup: KeepCluster`: seconds that the cluster is kept after the end of the job."""
    grace_period_seconds: Seconds = 120
    """Seconds that the trainer has to save a checkpoint and exit when it is asked to stop: by a user, a suspension or a
    deadline, or because its pod is terminated."""
