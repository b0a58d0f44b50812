"""The conditions of a job and the reasons that they give; the operator uses no reason that is not here."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType


class ConditionType(StrEnum):
    """What is observed about a job, in the order in which a job gets there."""

    SPEC_VALID = "SpecValid"
    CLUSTER_READY = "ClusterReady"
    PLACEMENT_FEASIBLE = "PlacementFeasible"
    JOB_SUBMITTED = "JobSubmitted"
    PROGRESSING = "Progressing"
    CHECKPOINTED = "Checkpointed"
    COMPLETE = "Complete"
    FAILED = "Failed"


class Reason(StrEnum):
    """Why a condition has its status."""

    VALID = "Valid"
    INVALID_SPEC = "InvalidSpec"
    STORAGE_MISSING = "StorageMissing"

    CREATING = "Creating"
    PODS_PENDING = "PodsPending"
    READY = "Ready"
    CREATION_REFUSED = "CreationRefused"
    NAME_CONFLICT = "NameConflict"
    KUBERAY_UNAVAILABLE = "KubeRayUnavailable"
    POD_CREATION_FAILED = "PodCreationFailed"
    UNSCHEDULABLE = "Unschedulable"
    IMAGE_PULL_FAILED = "ImagePullFailed"
    CONTAINER_CONFIG_ERROR = "ContainerConfigError"
    VOLUME_MOUNT_FAILED = "VolumeMountFailed"
    CONTAINER_CRASHING = "ContainerCrashing"
    RAY_NODES_MISSING = "RayNodesMissing"
    DASHBOARD_UNREACHABLE = "DashboardUnreachable"
    TOKEN_REJECTED = "TokenRejected"
    CLUSTER_LOST = "ClusterLost"
    HEAD_LOST = "HeadLost"
    REMOVED = "Removed"
    KEPT = "Kept"

    FEASIBLE = "Feasible"
    INSUFFICIENT_GPUS = "InsufficientGPUs"
    PLACEMENT_GROUP_INFEASIBLE = "PlacementGroupInfeasible"

    SUBMITTING = "Submitting"
    SUBMITTED = "Submitted"
    SUBMISSION_FAILED = "SubmissionFailed"
    DRIVER_LOST = "DriverLost"

    STARTING = "Starting"
    TRAINING = "Training"
    STOPPING = "Stopping"
    ENDED = "Ended"

    NO_CHECKPOINT_YET = "NoCheckpointYet"
    SAVED = "Saved"

    SUCCEEDED = "Succeeded"
    PROVISIONING_DEADLINE_EXCEEDED = "ProvisioningDeadlineExceeded"
    ACTIVE_DEADLINE_EXCEEDED = "ActiveDeadlineExceeded"
    CONFIGURATION_ERROR = "ConfigurationError"
    APPLICATION_ERROR = "ApplicationError"
    INFRASTRUCTURE_ERROR = "InfrastructureError"
    OUT_OF_MEMORY = "OutOfMemory"
    STOPPED_OUTSIDE = "StoppedOutside"
    ENDED_WITHOUT_RESULT = "EndedWithoutResult"


REASONS: Mapping[ConditionType, tuple[Reason, ...]] = MappingProxyType(
    {
        ConditionType.SPEC_VALID: (Reason.VALID, Reason.INVALID_SPEC, Reason.STORAGE_MISSING),
        ConditionType.CLUSTER_READY: (
            Reason.CREATING,
            Reason.PODS_PENDING,
            Reason.READY,
            Reason.CREATION_REFUSED,
            Reason.NAME_CONFLICT,
            Reason.KUBERAY_UNAVAILABLE,
            Reason.POD_CREATION_FAILED,
            Reason.UNSCHEDULABLE,
            Reason.IMAGE_PULL_FAILED,
            Reason.CONTAINER_CONFIG_ERROR,
            Reason.VOLUME_MOUNT_FAILED,
            Reason.CONTAINER_CRASHING,
            Reason.OUT_OF_MEMORY,
            Reason.INFRASTRUCTURE_ERROR,
            Reason.RAY_NODES_MISSING,
            Reason.DASHBOARD_UNREACHABLE,
            Reason.TOKEN_REJECTED,
            Reason.CLUSTER_LOST,
            Reason.HEAD_LOST,
            Reason.ENDED,
            Reason.REMOVED,
            Reason.KEPT,
        ),
        ConditionType.PLACEMENT_FEASIBLE: (
            Reason.FEASIBLE,
            Reason.INSUFFICIENT_GPUS,
            Reason.PLACEMENT_GROUP_INFEASIBLE,
        ),
        ConditionType.JOB_SUBMITTED: (
            Reason.SUBMITTING,
            Reason.SUBMITTED,
            Reason.SUBMISSION_FAILED,
            Reason.DASHBOARD_UNREACHABLE,
            Reason.TOKEN_REJECTED,
            Reason.DRIVER_LOST,
        ),
        ConditionType.PROGRESSING: (
            Reason.STARTING,
            Reason.TRAINING,
            Reason.STOPPING,
            Reason.DASHBOARD_UNREACHABLE,
            Reason.TOKEN_REJECTED,
            Reason.ENDED,
        ),
        ConditionType.CHECKPOINTED: (Reason.NO_CHECKPOINT_YET, Reason.SAVED),
        ConditionType.COMPLETE: (Reason.SUCCEEDED,),
        ConditionType.FAILED: (
            Reason.INVALID_SPEC,
            Reason.STORAGE_MISSING,
            Reason.NAME_CONFLICT,
            Reason.CLUSTER_LOST,
            Reason.HEAD_LOST,
            Reason.SUBMISSION_FAILED,
            Reason.DRIVER_LOST,
            Reason.PROVISIONING_DEADLINE_EXCEEDED,
            Reason.ACTIVE_DEADLINE_EXCEEDED,
            Reason.CONFIGURATION_ERROR,
            Reason.APPLICATION_ERROR,
            Reason.INFRASTRUCTURE_ERROR,
            Reason.OUT_OF_MEMORY,
            Reason.STOPPED_OUTSIDE,
            Reason.ENDED_WITHOUT_RESULT,
        ),
    }
)
"""The reasons that each condition may give."""
