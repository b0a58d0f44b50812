"""The conditions of a job, their possible reasons, and the failure class of each reason that ends an attempt. The
operator sets no other conditions and reasons.

`rljob_operator.reconcile` derives the conditions; its docstring lists which module decides which condition.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

from rljob_api.v1alpha1.status import FailureClass


class ConditionType(StrEnum):
    """Types of conditions, in the order in which a job reaches them."""

    SPEC_VALID = "SpecValid"
    QUOTA_RESERVED = "QuotaReserved"
    """Only for jobs in a queue (Kueue)."""
    CLUSTER_READY = "ClusterReady"
    PLACEMENT_FEASIBLE = "PlacementFeasible"
    JOB_SUBMITTED = "JobSubmitted"
    PROGRESSING = "Progressing"
    CHECKPOINTED = "Checkpointed"
    TRAINING_HEALTHY = "TrainingHealthy"
    """False while the trainer reports an alarm. It stays as it is when the job has finished."""
    SUSPENDED = "Suspended"
    RETRYING = "Retrying"
    FINISHED = "Finished"
    """The job is Complete or Failed; `kubectl wait` can wait for either with this condition."""
    COMPLETE = "Complete"
    FAILED = "Failed"


class Reason(StrEnum):
    """Why a condition has its status; `explanations.py` explains each reason."""

    VALID = "Valid"
    INVALID_SPEC = "InvalidSpec"
    STORAGE_MISSING = "StorageMissing"
    MEMORY_TOO_SMALL = "MemoryTooSmall"
    TRAINER_IMAGE_INCOMPATIBLE = "TrainerImageIncompatible"

    QUEUED = "Queued"
    ADMITTED = "Admitted"
    EVICTED = "Evicted"
    QUEUE_CHANGED = "QueueChanged"

    CREATING = "Creating"
    PODS_PENDING = "PodsPending"
    READY = "Ready"
    CREATION_REJECTED = "CreationRejected"
    NAME_CONFLICT = "NameConflict"
    KUBERAY_UNAVAILABLE = "KubeRayUnavailable"
    KUBERAY_TOO_OLD = "KubeRayTooOld"
    READ_FORBIDDEN = "ReadForbidden"
    POD_CREATION_FAILED = "PodCreationFailed"
    QUOTA_EXCEEDED = "QuotaExceeded"
    UNSCHEDULABLE = "Unschedulable"
    IMAGE_PULL_FAILED = "ImagePullFailed"
    CONTAINER_CONFIG_ERROR = "ContainerConfigError"
    VOLUME_MOUNT_FAILED = "VolumeMountFailed"
    CONTAINER_CRASHING = "ContainerCrashing"
    RAY_NODES_MISSING = "RayNodesMissing"
    DASHBOARD_UNREACHABLE = "DashboardUnreachable"
    TOKEN_REJECTED = "TokenRejected"
    AUTHENTICATION_MISSING = "AuthenticationMissing"
    CLUSTER_LOST = "ClusterLost"
    HEAD_LOST = "HeadLost"
    WAITING_FOR_NEXT_ATTEMPT = "WaitingForNextAttempt"
    NEXT_ATTEMPT_STARTED = "NextAttemptStarted"
    DELETING = "Deleting"
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
    RUN_STATE_UNREADABLE = "RunStateUnreadable"
    STALLED = "Stalled"
    ENDED = "Ended"

    NO_CHECKPOINT_YET = "NoCheckpointYet"
    SAVED = "Saved"

    NO_ALARMS = "NoAlarms"
    NOT_REPORTED = "NotReported"
    REWARD_ERRORS = "RewardErrors"
    RESPONSES_EXCLUDED = "ResponsesExcluded"
    HIGH_GRADIENT_NORM = "HighGradientNorm"
    HIGH_KL = "HighKl"
    ROLLOUT_MISMATCH = "RolloutMismatch"
    TOKENS_REJECTED = "TokensRejected"
    ADAPTERS_ROUNDED = "AdaptersRounded"
    RESPONSES_CUT_OFF = "ResponsesCutOff"
    EQUAL_SCORES = "EqualScores"
    OTHER_ALARM = "OtherAlarm"

    SUSPENDED = "Suspended"
    SUSPENDING = "Suspending"
    RESUMED = "Resumed"
    RESIZED = "Resized"

    SUCCEEDED = "Succeeded"
    PROVISIONING_DEADLINE_EXCEEDED = "ProvisioningDeadlineExceeded"
    ACTIVE_DEADLINE_EXCEEDED = "ActiveDeadlineExceeded"
    CONFIGURATION_ERROR = "ConfigurationError"
    APPLICATION_ERROR = "ApplicationError"
    INFRASTRUCTURE_ERROR = "InfrastructureError"
    OUT_OF_MEMORY = "OutOfMemory"
    DISRUPTED = "Disrupted"
    STOPPED_THROUGH_RAY = "StoppedThroughRay"
    STOPPED_BY_USER = "StoppedByUser"
    EXITED_WITHOUT_RESULT = "ExitedWithoutResult"


FAILURE_CLASSES: Mapping[Reason, FailureClass] = MappingProxyType(
    {
        Reason.INVALID_SPEC: FailureClass.CONFIGURATION,
        Reason.STORAGE_MISSING: FailureClass.CONFIGURATION,
        Reason.NAME_CONFLICT: FailureClass.CONFIGURATION,
        Reason.CONFIGURATION_ERROR: FailureClass.CONFIGURATION,
        Reason.SUBMISSION_FAILED: FailureClass.CONFIGURATION,
        Reason.TRAINER_IMAGE_INCOMPATIBLE: FailureClass.CONFIGURATION,
        Reason.RUN_STATE_UNREADABLE: FailureClass.CONFIGURATION,
        Reason.AUTHENTICATION_MISSING: FailureClass.CONFIGURATION,
        Reason.KUBERAY_TOO_OLD: FailureClass.CONFIGURATION,
        Reason.READ_FORBIDDEN: FailureClass.CONFIGURATION,
        Reason.APPLICATION_ERROR: FailureClass.APPLICATION,
        Reason.EXITED_WITHOUT_RESULT: FailureClass.APPLICATION,
        Reason.INFRASTRUCTURE_ERROR: FailureClass.INFRASTRUCTURE,
        Reason.OUT_OF_MEMORY: FailureClass.INFRASTRUCTURE,
        Reason.CLUSTER_LOST: FailureClass.INFRASTRUCTURE,
        Reason.HEAD_LOST: FailureClass.INFRASTRUCTURE,
        Reason.DRIVER_LOST: FailureClass.INFRASTRUCTURE,
        Reason.DASHBOARD_UNREACHABLE: FailureClass.INFRASTRUCTURE,
        Reason.TOKEN_REJECTED: FailureClass.INFRASTRUCTURE,
        Reason.STALLED: FailureClass.INFRASTRUCTURE,
        Reason.SUSPENDED: FailureClass.RESUMABLE,
        Reason.RESIZED: FailureClass.RESUMABLE,
        Reason.EVICTED: FailureClass.RESUMABLE,
        Reason.QUEUE_CHANGED: FailureClass.RESUMABLE,
        Reason.DISRUPTED: FailureClass.RESUMABLE,
        Reason.UNSCHEDULABLE: FailureClass.RESUMABLE,
        Reason.QUOTA_EXCEEDED: FailureClass.RESUMABLE,
        Reason.PROVISIONING_DEADLINE_EXCEEDED: FailureClass.FINAL,
        Reason.ACTIVE_DEADLINE_EXCEEDED: FailureClass.FINAL,
        Reason.STOPPED_BY_USER: FailureClass.FINAL,
        Reason.STOPPED_THROUGH_RAY: FailureClass.FINAL,
    }
)
"""The failure class of every reason with which an attempt or a job can end, except `Succeeded`."""

NO_ROOM = (Reason.UNSCHEDULABLE, Reason.QUOTA_EXCEEDED)
"""Nodes or ResourceQuota are missing now: at its provisioning deadline, the job deletes its RayCluster and tries again
later."""
RESTARTED_FREELY = (Reason.RESIZED, Reason.EVICTED, Reason.QUEUE_CHANGED, Reason.DISRUPTED, *NO_ROOM)
"""Reasons of ended attempts after which the next attempt starts by itself, without using a retry."""

ALARMS = (
    Reason.REWARD_ERRORS,
    Reason.RESPONSES_EXCLUDED,
    Reason.HIGH_GRADIENT_NORM,
    Reason.HIGH_KL,
    Reason.ROLLOUT_MISMATCH,
    Reason.TOKENS_REJECTED,
    Reason.ADAPTERS_ROUNDED,
    Reason.RESPONSES_CUT_OFF,
    Reason.EQUAL_SCORES,
)
"""The alarms that a trainer reports in its run state, most serious first. For an alarm that this version does not know,
the operator uses OtherAlarm."""

_FAILURES_OF_JOBS = tuple(reason for reason, each in FAILURE_CLASSES.items() if each is not FailureClass.RESUMABLE)
_RETRIED = tuple(
    reason
    for reason, each in FAILURE_CLASSES.items()
    if each in (FailureClass.APPLICATION, FailureClass.INFRASTRUCTURE)
)

REASONS: Mapping[ConditionType, tuple[Reason, ...]] = MappingProxyType(
    {
        ConditionType.SPEC_VALID: (
            Reason.VALID,
            Reason.MEMORY_TOO_SMALL,
            Reason.INVALID_SPEC,
            Reason.STORAGE_MISSING,
        ),
        ConditionType.QUOTA_RESERVED: (Reason.QUEUED, Reason.ADMITTED, Reason.EVICTED),
        ConditionType.CLUSTER_READY: (
            Reason.CREATING,
            Reason.QUEUED,
            Reason.EVICTED,
            Reason.PODS_PENDING,
            Reason.READY,
            Reason.CREATION_REJECTED,
            Reason.NAME_CONFLICT,
            Reason.KUBERAY_UNAVAILABLE,
            Reason.KUBERAY_TOO_OLD,
            Reason.READ_FORBIDDEN,
            Reason.POD_CREATION_FAILED,
            Reason.QUOTA_EXCEEDED,
            Reason.UNSCHEDULABLE,
            Reason.IMAGE_PULL_FAILED,
            Reason.CONTAINER_CONFIG_ERROR,
            Reason.VOLUME_MOUNT_FAILED,
            Reason.CONTAINER_CRASHING,
            Reason.OUT_OF_MEMORY,
            Reason.INFRASTRUCTURE_ERROR,
            Reason.DISRUPTED,
            Reason.RAY_NODES_MISSING,
            Reason.DASHBOARD_UNREACHABLE,
            Reason.TOKEN_REJECTED,
            Reason.CLUSTER_LOST,
            Reason.HEAD_LOST,
            Reason.WAITING_FOR_NEXT_ATTEMPT,
            Reason.SUSPENDED,
            Reason.DELETING,
            Reason.REMOVED,
            Reason.KEPT,
        ),
        ConditionType.PLACEMENT_FEASIBLE: (
            Reason.FEASIBLE,
            Reason.INSUFFICIENT_GPUS,
            Reason.PLACEMENT_GROUP_INFEASIBLE,
            Reason.NEXT_ATTEMPT_STARTED,
        ),
        ConditionType.JOB_SUBMITTED: (
            Reason.SUBMITTING,
            Reason.SUBMITTED,
            Reason.SUBMISSION_FAILED,
            Reason.DASHBOARD_UNREACHABLE,
            Reason.TOKEN_REJECTED,
            Reason.AUTHENTICATION_MISSING,
            Reason.DRIVER_LOST,
            Reason.NEXT_ATTEMPT_STARTED,
        ),
        ConditionType.PROGRESSING: (
            Reason.STARTING,
            Reason.TRAINING,
            Reason.STOPPING,
            Reason.DASHBOARD_UNREACHABLE,
            Reason.TOKEN_REJECTED,
            Reason.RUN_STATE_UNREADABLE,
            Reason.READ_FORBIDDEN,
            Reason.NEXT_ATTEMPT_STARTED,
            Reason.ENDED,
        ),
        ConditionType.CHECKPOINTED: (Reason.NO_CHECKPOINT_YET, Reason.SAVED),
        ConditionType.TRAINING_HEALTHY: (
            Reason.STARTING,
            Reason.NO_ALARMS,
            Reason.NOT_REPORTED,
            *ALARMS,
            Reason.OTHER_ALARM,
        ),
        ConditionType.SUSPENDED: (Reason.SUSPENDING, Reason.SUSPENDED, Reason.RESUMED),
        ConditionType.RETRYING: (
            *_RETRIED,
            # The next two are used only for a job whose spec this operator cannot read.
            Reason.PROVISIONING_DEADLINE_EXCEEDED,
            Reason.RUN_STATE_UNREADABLE,
            *RESTARTED_FREELY,
            Reason.NEXT_ATTEMPT_STARTED,
            Reason.SUSPENDED,
            Reason.ENDED,
        ),
        ConditionType.FINISHED: (Reason.SUCCEEDED, *_FAILURES_OF_JOBS),
        ConditionType.COMPLETE: (Reason.SUCCEEDED,),
        ConditionType.FAILED: _FAILURES_OF_JOBS,
    }
)
"""The possible reasons of each condition."""
