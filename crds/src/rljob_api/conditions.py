"""The conditions of a job, the reasons that they give, and what to do about each.

`rljob explain` and the troubleshooting page print the advice; the operator uses no reason that is not here.
"""

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


ADVICE: Mapping[Reason, str] = MappingProxyType(
    {
        Reason.VALID: "Nothing to do.",
        Reason.INVALID_SPEC: (
            "Correct the fields named in the message and create the job again; `rljob validate` says the same"
            " without a cluster."
        ),
        Reason.STORAGE_MISSING: (
            "Name a PersistentVolumeClaim that all pods can write (ReadWriteMany) under spec.checkpoint.storage;"
            " the pods have no other folder in common."
        ),
        Reason.CREATING: "Wait; KubeRay is making the pods. If nothing happens, look at KubeRay's own log.",
        Reason.PODS_PENDING: "Wait; the pods are starting. A pod that cannot start is named here within seconds.",
        Reason.READY: "Nothing to do.",
        Reason.CREATION_REFUSED: (
            "The API server refused what the operator wanted to make; the message says why. Quotas and admission"
            " policies of the namespace are the usual causes; the operator tries again by itself."
        ),
        Reason.NAME_CONFLICT: (
            "Something else in the namespace has the name that the job's cluster needs. Remove it or create the"
            " job under another name."
        ),
        Reason.KUBERAY_UNAVAILABLE: (
            "Install KubeRay (its RayCluster resource is not there); the job goes on by itself."
        ),
        Reason.POD_CREATION_FAILED: (
            "KubeRay could not create a pod; the message holds the API server's answer. Quotas, limit ranges and"
            " Pod Security of the namespace are the usual causes."
        ),
        Reason.UNSCHEDULABLE: (
            "No node has what the pod asks for. Compare the resources in the message with `kubectl describe"
            " nodes`; ask for fewer GPUs or less memory, correct nodeSelector or tolerations, or wait until nodes"
            " are free. A claim that does not exist is named here too."
        ),
        Reason.IMAGE_PULL_FAILED: (
            "Check the image's name and tag (spec.image) and, for private registries, spec.imagePullSecrets."
        ),
        Reason.CONTAINER_CONFIG_ERROR: (
            "A Secret or ConfigMap, or a key of one, that env or envFrom names does not exist; create it, and the"
            " pod starts by itself."
        ),
        Reason.VOLUME_MOUNT_FAILED: (
            "A volume cannot be mounted; the message names it. Check that the ConfigMap, Secret or claim under"
            " code, volumes or checkpoint.storage exists in the job's namespace."
        ),
        Reason.CONTAINER_CRASHING: (
            "A container ends again and again; `kubectl logs --previous` shows its last words. The usual causes"
            " are an image without Ray, another Ray version than spec.rayVersion, and too little memory."
        ),
        Reason.RAY_NODES_MISSING: (
            "All pods are ready, but not all have joined Ray. Wait; if it stays, look for network policies"
            " between the pods of the job and at the log of the worker pods."
        ),
        Reason.DASHBOARD_UNREACHABLE: (
            "The operator cannot reach Ray's dashboard in the head pod. Look for network policies between the"
            " operator and the job's namespace (port 8265), and whether the head pod is overloaded."
        ),
        Reason.TOKEN_REJECTED: (
            "Ray does not accept the operator's token: the key in the operator's Secret was replaced. Put the"
            " former key back as `previous-key`, or create the job again."
        ),
        Reason.CLUSTER_LOST: (
            "Somebody deleted the RayCluster while the job needed it. Create the job again; it resumes from its"
            " last checkpoint."
        ),
        Reason.HEAD_LOST: (
            "The head pod is gone, and the training's driver with it; the message says what is known (node lost,"
            " evicted, out of memory). Create the job again; it resumes from its last checkpoint."
        ),
        Reason.REMOVED: "Nothing to do; the job has ended and its cluster was removed (runPolicy.cleanup).",
        Reason.KEPT: (
            "The job has ended and its cluster still holds its GPUs (runPolicy.cleanup: KeepCluster). Delete the"
            " job, or set runPolicy.cleanup to DeleteCluster, to free them."
        ),
        Reason.FEASIBLE: "Nothing to do.",
        Reason.INSUFFICIENT_GPUS: (
            "Ray sees fewer GPUs on its nodes than the pools promise. Check gpuResource and gpusPerNode, and the"
            " device plugin of the nodes."
        ),
        Reason.PLACEMENT_GROUP_INFEASIBLE: (
            "No Ray node can hold what the trainer reserves, so it would wait for ever. Check gpusPerNode and the"
            " CPUs under spec.pools[].resources."
        ),
        Reason.SUBMITTING: "Wait; the trainer is being started in the head pod.",
        Reason.SUBMITTED: "Nothing to do.",
        Reason.SUBMISSION_FAILED: (
            "Ray did not start the trainer; the message holds its answer. Check that the image contains the trainer."
        ),
        Reason.DRIVER_LOST: (
            "Ray no longer knows the trainer's process: the head pod was restarted under it. Look at the head"
            " pod's last state (memory above all). Create the job again; it resumes from its last checkpoint."
        ),
        Reason.STARTING: (
            "Wait; the trainer is loading the model and building its workers. `rljob logs` shows how far it is."
        ),
        Reason.TRAINING: "Nothing to do.",
        Reason.STOPPING: "Wait; the trainer was asked to stop and is saving a checkpoint.",
        Reason.ENDED: "Nothing to do; Complete or Failed says how the job ended.",
        Reason.NO_CHECKPOINT_YET: "Wait for step spec.checkpoint.everySteps. Until then a failure loses everything.",
        Reason.SAVED: "Nothing to do.",
        Reason.SUCCEEDED: (
            "Nothing to do; the model is at status.exportUri, the newest checkpoint at status.checkpoint.uri."
        ),
        Reason.PROVISIONING_DEADLINE_EXCEEDED: (
            "The pods were not all ready within spec.runPolicy.provisioningDeadlineSeconds; the message says what"
            " they were waiting for. Remove the cause or raise the deadline, then create the job again."
        ),
        Reason.ACTIVE_DEADLINE_EXCEEDED: (
            "The job ran for spec.runPolicy.activeDeadlineSeconds. It was stopped with a checkpoint: create it"
            " again with a longer deadline, and it goes on from there."
        ),
        Reason.CONFIGURATION_ERROR: (
            "The trainer refused the job as it is written; the message says which field. Correct it and create"
            " the job again."
        ),
        Reason.APPLICATION_ERROR: (
            "The training or the job's own code failed; the message holds the last lines of the log, `rljob logs`"
            " all of it."
        ),
        Reason.INFRASTRUCTURE_ERROR: (
            "A worker, node or device was lost, or something that Ray needs was missing. Nothing is wrong with"
            " the job: create it again, and it resumes from its last checkpoint."
        ),
        Reason.OUT_OF_MEMORY: (
            "A container was killed because it needed more memory than its limit. Raise the memory under"
            " spec.head.resources or spec.pools[].resources, or make batches or rollouts smaller."
        ),
        Reason.STOPPED_OUTSIDE: (
            "Somebody stopped the trainer through Ray's own interface. Create the job again; it resumes from its"
            " last checkpoint."
        ),
        Reason.ENDED_WITHOUT_RESULT: (
            "The trainer's process ended well but did not say that the training is complete: the image's trainer"
            " is of another version, or something else ended it. Look at `rljob logs`."
        ),
    }
)
"""One sentence or two for each reason: what to do."""
