"""Deadlines, stopping and cleaning up."""

from __future__ import annotations

from enum import StrEnum

from rljob_api.base import WireModel
from rljob_api.scalars import Count, PositiveCount, Seconds


class Cleanup(StrEnum):
    """What becomes of the cluster when the job has ended."""

    DELETE_CLUSTER = "DeleteCluster"
    KEEP_CLUSTER = "KeepCluster"


class Elastic(WireModel):
    """Lets an attempt run on fewer nodes where nodes stay away, and on all of them again when they are back."""

    min_nodes: PositiveCount
    """Of each pool, at least. Fewer nodes are used only where the job is valid with them: its batch must divide."""
    wait_seconds: Seconds = 300
    """How long an attempt waits for all nodes before it begins with those that are there."""


class RunPolicy(WireModel):
    """May be changed while the job exists."""

    max_app_retries: Count = 2
    """How often the job goes on from its last checkpoint after its training or its own code has failed; counted anew
    once a later checkpoint has been saved."""
    max_infra_retries: Count = 10
    """The same after a pod, a node, memory or the network has failed."""
    provisioning_deadline_seconds: Seconds = 1800
    """From when an attempt's cluster is there (one that cannot be made: when the attempt began) until its trainer runs;
    the job fails after that."""
    active_deadline_seconds: Seconds | None = None
    """Of all attempts together, from when their clusters are there, waiting for pods included; time between attempts
    and suspension do not count. Then the job is stopped with a checkpoint and fails."""
    stall_deadline_seconds: Seconds = 3600
    """How long a trainer may show no progress (a step, a phase, an evaluation), or cannot be asked; then the attempt
    ends as a failure of the infrastructure (where its state cannot be read, or a right is missing: the job fails)."""
    ttl_seconds_after_finished: Count | None = None
    """So long after its end the job is deleted, with all but its files; never when unset."""
    elastic: Elastic | None = None
    """Unset: every attempt waits for all nodes."""
    cleanup: Cleanup = Cleanup.DELETE_CLUSTER
    grace_period_seconds: Seconds = 120
    """Time to write a checkpoint when the job is stopped."""
