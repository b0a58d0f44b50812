"""What a job's status says, read in one place: how it ended, what it waits for, where its results are."""

from __future__ import annotations

from datetime import datetime

from rljob_api.conditions import ConditionType
from rljob_api.v1alpha1.status import Condition, ConditionStatus, RLJobStatus
from rljob_cli.kube_objects import StoredJob

_MUST_BE_TRUE = (
    ConditionType.SPEC_VALID,
    ConditionType.CLUSTER_READY,
    ConditionType.PLACEMENT_FEASIBLE,
    ConditionType.JOB_SUBMITTED,
    ConditionType.PROGRESSING,
)
"""In the order in which a job gets there. Without a checkpoint a job still goes on."""


def moment(timestamp: str) -> datetime:
    """The time that a status names."""
    return datetime.fromisoformat(timestamp)


def condition(status: RLJobStatus, kind: ConditionType) -> Condition | None:
    """One condition; None where the operator has not said it yet."""
    return next((found for found in status.conditions if found.type == kind), None)


def is_true(status: RLJobStatus, kind: ConditionType) -> bool:
    """Whether a condition holds; not, where nothing was said yet."""
    found = condition(status, kind)
    return found is not None and found.status is ConditionStatus.TRUE


def ending(status: RLJobStatus) -> Condition | None:
    """The condition that ended the job: Complete or Failed. None while it has not ended."""
    ends = (ConditionType.COMPLETE, ConditionType.FAILED)
    return next((condition(status, kind) for kind in ends if is_true(status, kind)), None)


def is_complete(status: RLJobStatus) -> bool:
    """Whether it ended well."""
    return is_true(status, ConditionType.COMPLETE)


def waits_for(status: RLJobStatus) -> Condition | None:
    """The first condition that keeps a job that has not ended from training; None if there is none."""
    for kind in _MUST_BE_TRUE:
        found = condition(status, kind)
        if found is not None and found.status is not ConditionStatus.TRUE:
            return found
    return None


def phase(job: StoredJob) -> str:
    """One word for people."""
    if job.metadata.deletion_timestamp is not None:
        return "Deleting"
    return job.status.phase or "Unseen"


def storage_uri(job: StoredJob) -> str | None:
    """The job's folder in its claim, in the form of the status's own URIs; None without a claim."""
    storage = job.spec().checkpoint.storage
    if storage is None:
        return None
    return f"pvc://{storage.persistent_volume_claim}/{storage.sub_path or job.metadata.name}"
