"""Deadlines, stopping and cleaning up."""

from __future__ import annotations

from enum import StrEnum

from rljob_api.base import WireModel
from rljob_api.scalars import Seconds


class Cleanup(StrEnum):
    """What becomes of the cluster when the job has ended."""

    DELETE_CLUSTER = "DeleteCluster"
    KEEP_CLUSTER = "KeepCluster"


class RunPolicy(WireModel):
    """May be changed while the job exists."""

    provisioning_deadline_seconds: Seconds = 1800
    """From the beginning of an attempt until its trainer runs; the job fails after that."""
    active_deadline_seconds: Seconds | None = None
    """From the beginning of the first attempt, waiting for pods included; then the job is stopped with a checkpoint and
    fails."""
    cleanup: Cleanup = Cleanup.DELETE_CLUSTER
    grace_period_seconds: Seconds = 120
    """Time to write a checkpoint when the job is stopped."""
