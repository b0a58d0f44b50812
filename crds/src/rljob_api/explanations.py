"""What each reason means and what to do about it: printed by `rljob explain` and on the troubleshooting page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from rljob_api.conditions import Reason


@dataclass(frozen=True)
class Explanation:
    """For people."""

    means: str
    """What was observed."""
    advice: str
    """What to do."""


EXPLANATIONS: Mapping[Reason, Explanation] = MappingProxyType(
    {
        Reason.VALID: Explanation(
            means="The operator can read the job, and nothing that a cluster needs is missing.",
            advice="Nothing to do.",
        ),
        Reason.MEMORY_TOO_SMALL: Explanation(
            means=(
                "The operator can read the job, and by an estimate its models do not fit into the memory of the GPUs"
                " that its pools name. It is not refused for that: an estimate may be wrong."
            ),
            advice=(
                "Look at `rljob plan` for the job's file, and change what the message names; a job that does run has"
                " nothing to fear from it."
            ),
        ),
        Reason.INVALID_SPEC: Explanation(
            means=(
                "The job cannot run on this cluster as it is written, or this operator cannot read it. A job that runs"
                " already goes on."
            ),
            advice=(
                "Correct the fields named in the message and create the job again; `rljob validate` finds most of them"
                " without a cluster."
            ),
        ),
        Reason.STORAGE_MISSING: Explanation(
            means=(
                "The job has no `spec.checkpoint.storage`. It is not required by the schema, because a run on one "
                "machine needs none."
            ),
            advice=(
                "Name a PersistentVolumeClaim that all pods can write (ReadWriteMany) under spec.checkpoint.storage; "
                "the pods have no other folder in common."
            ),
        ),
        Reason.TRAINER_IMAGE_INCOMPATIBLE: Explanation(
            means="The trainer in the image cannot be driven by this operator: their versions are too far apart.",
            advice="Use an image and an operator of the same or of neighbouring versions.",
        ),
        Reason.CREATING: Explanation(
            means="The job's RayCluster is about to be made, or pods of a former one of its name have not ended yet.",
            advice="Wait; KubeRay is making the pods. If nothing happens, look at KubeRay's own log.",
        ),
        Reason.PODS_PENDING: Explanation(
            means="Some pods are not ready, and nothing is known to be wrong with them.",
            advice="Wait; the pods are starting. A pod that cannot start is named here within seconds.",
        ),
        Reason.READY: Explanation(
            means="All pods are ready and have joined Ray.",
            advice="Nothing to do.",
        ),
        Reason.CREATION_REFUSED: Explanation(
            means="The API server refused the RayCluster, its Secret or its NetworkPolicy.",
            advice=(
                "The message says why. Quotas and admission policies of the namespace are the usual causes; the "
                "operator tries again by itself."
            ),
        ),
        Reason.NAME_CONFLICT: Explanation(
            means=(
                "There is a RayCluster of the name that the job's own needs, and it belongs to something else. If it is"
                " still there a minute after it was first seen, the job fails."
            ),
            advice="Remove the other one, or create the job under another name.",
        ),
        Reason.KUBERAY_UNAVAILABLE: Explanation(
            means="The API server knows no RayClusters (`ray.io/v1`).",
            advice="Install KubeRay; the job goes on by itself, unless its provisioningDeadlineSeconds are over.",
        ),
        Reason.KUBERAY_TOO_OLD: Explanation(
            means="The API server's RayClusters lack a field that the operator needs; the message names it.",
            advice=(
                "Update KubeRay and its CustomResourceDefinitions; docs/install.md names the oldest version that works."
            ),
        ),
        Reason.READ_FORBIDDEN: Explanation(
            means="The API server does not let the operator read what it must; a training that runs goes on.",
            advice=(
                "Give the operator back the role of its Helm chart; the message names what it may not do. A job whose"
                " trainer runs fails when nothing was learned of it for `runPolicy.stallDeadlineSeconds`."
            ),
        ),
        Reason.POD_CREATION_FAILED: Explanation(
            means="KubeRay wants to make a pod, and the API server refuses it.",
            advice=(
                "The message holds the API server's answer. Quotas, limit ranges and Pod Security of the namespace are "
                "the usual causes."
            ),
        ),
        Reason.UNSCHEDULABLE: Explanation(
            means="The scheduler finds no node for a pod; the message holds its words.",
            advice=(
                "Compare the resources in the message with `kubectl describe nodes`; ask for fewer GPUs or less memory,"
                " correct nodeSelector or tolerations, or wait until nodes are free. A claim that does not exist is "
                "named here too. After runPolicy.provisioningDeadlineSeconds the job fails."
            ),
        ),
        Reason.IMAGE_PULL_FAILED: Explanation(
            means="A node cannot get the image of a pod.",
            advice="Check the image's name and tag (spec.image) and, for private registries, spec.imagePullSecrets.",
        ),
        Reason.CONTAINER_CONFIG_ERROR: Explanation(
            means="The kubelet cannot make or start a container as the pod describes it.",
            advice=(
                "The usual cause is a Secret or ConfigMap, or a key of one, that env or envFrom names and that does not"
                " exist; create it, and the pod starts by itself."
            ),
        ),
        Reason.VOLUME_MOUNT_FAILED: Explanation(
            means="The kubelet cannot mount a volume of a pod, so none of its containers starts.",
            advice=(
                "The message names the volume. Check that the ConfigMap, Secret or claim under code, volumes or "
                "checkpoint.storage exists in the job's namespace."
            ),
        ),
        Reason.CONTAINER_CRASHING: Explanation(
            means="A container ended before its pod was ever ready, more than once or for good.",
            advice=(
                "`kubectl logs --previous` shows its last words. The usual causes are an image without Ray, another Ray"
                " version than spec.rayVersion, and too little memory."
            ),
        ),
        Reason.RAY_NODES_MISSING: Explanation(
            means="The pods are ready for Kubernetes, but Ray in the head pod does not see all of them.",
            advice=(
                "Wait; if it stays, look for network policies between the pods of the job and at the log of the worker "
                "pods."
            ),
        ),
        Reason.DASHBOARD_UNREACHABLE: Explanation(
            means=(
                "The head pod is there, but Ray's dashboard does not answer the operator. A training that runs goes on;"
                " only its progress is not seen."
            ),
            advice=(
                "Look for network policies between the operator and the job's namespace (port 8265), and whether the "
                "head pod is overloaded."
            ),
        ),
        Reason.TOKEN_REJECTED: Explanation(
            means="Ray's dashboard answers, and refuses the token that the operator derived for this job.",
            advice=(
                "The key in the operator's Secret was replaced. Put the former key back as `previous-key`; else a"
                " trainer that runs ends after `runPolicy.stallDeadlineSeconds`, and the next attempt has the new key."
                " Where none ran yet, the job fails at its provisioning deadline; then `rljob retry`."
            ),
        ),
        Reason.AUTHENTICATION_MISSING: Explanation(
            means=(
                "Ray's dashboard answers requests without a token, so anybody who reaches it could run what they like."
                " Nothing was submitted."
            ),
            advice=(
                "Use KubeRay and Ray of at least the versions in docs/install.md, both in the image and in"
                " spec.rayVersion."
            ),
        ),
        Reason.CLUSTER_LOST: Explanation(
            means="The RayCluster was there and has been deleted, not by the operator.",
            advice="Nothing to do while retries are left; then `rljob retry` lets it go on from its newest checkpoint.",
        ),
        Reason.HEAD_LOST: Explanation(
            means="The head pod has ended or is gone after the cluster had been complete.",
            advice=(
                "The message says what is known (node lost, evicted, out of memory). Nothing to do while retries are "
                "left; then `rljob retry` lets it go on from its newest checkpoint."
            ),
        ),
        Reason.WAITING_FOR_NEXT_ATTEMPT: Explanation(
            means="An attempt has ended, and the next one begins after a pause, when nothing of the former is left.",
            advice="Wait; Retrying says why the attempt ended and when the next one begins.",
        ),
        Reason.NEXT_ATTEMPT_STARTED: Explanation(
            means="Another attempt has begun; what was known of the one before no longer holds.",
            advice="Nothing to do.",
        ),
        Reason.REMOVED: Explanation(
            means=(
                "The job has ended, and nothing of its cluster runs any more. Its Secret and NetworkPolicy stay until "
                "the job is deleted; the token in the Secret opens nothing now."
            ),
            advice="Nothing to do.",
        ),
        Reason.KEPT: Explanation(
            means="The job has ended, and its cluster is kept because the job says so.",
            advice="Its GPUs are held. Delete the job, or set runPolicy.cleanup to DeleteCluster, to free them.",
        ),
        Reason.FEASIBLE: Explanation(
            means="Ray's nodes have the GPUs that the pools promise.",
            advice="Nothing to do.",
        ),
        Reason.INSUFFICIENT_GPUS: Explanation(
            means="A Ray node has fewer GPUs than its pool promises; the message has the numbers.",
            advice="Check gpuResource and gpusPerNode, and the device plugin of the nodes.",
        ),
        Reason.PLACEMENT_GROUP_INFEASIBLE: Explanation(
            means="Ray says that no set of its nodes can hold a placement group of the trainer.",
            advice="The trainer would wait for ever. Check gpusPerNode and the CPUs under spec.pools[].resources.",
        ),
        Reason.SUBMITTING: Explanation(
            means="The operator has asked Ray to start the trainer and has not seen it there yet.",
            advice="Wait; the trainer is being started in the head pod.",
        ),
        Reason.SUBMITTED: Explanation(
            means="Ray knows the trainer's job.",
            advice="Nothing to do.",
        ),
        Reason.SUBMISSION_FAILED: Explanation(
            means=(
                "Ray refused the trainer's job, which is tried again until `runPolicy.provisioningDeadlineSeconds` are"
                " over, or could not start its process, and the job has failed."
            ),
            advice="The message holds Ray's answer. Check that the image contains the trainer.",
        ),
        Reason.DRIVER_LOST: Explanation(
            means="Ray knew the trainer's job and no longer does.",
            advice=(
                "The head was restarted under it: look at the head pod's last state (memory above all). Nothing to do "
                "while retries are left; then `rljob retry` lets it go on from its newest checkpoint."
            ),
        ),
        Reason.STARTING: Explanation(
            means="The trainer runs and has not begun its first step.",
            advice="Wait; the trainer is loading the model and building its workers. `rljob logs` shows how far it is.",
        ),
        Reason.TRAINING: Explanation(
            means="Steps are being done.",
            advice="Nothing to do.",
        ),
        Reason.STOPPING: Explanation(
            means="The trainer was asked to stop, by the operator, by the end of its pod, or through Ray.",
            advice="Wait; it saves a checkpoint.",
        ),
        Reason.RUN_STATE_UNREADABLE: Explanation(
            means="The trainer writes its state in a form that this operator cannot read, so nothing is known of it.",
            advice=(
                "Use an image and an operator of neighbouring versions; the message says what cannot be read. The job"
                " fails when nothing was learned of it for `runPolicy.stallDeadlineSeconds`."
            ),
        ),
        Reason.STALLED: Explanation(
            means="The trainer has shown no progress for `runPolicy.stallDeadlineSeconds`.",
            advice=(
                "The message says where it stood; the stacks of every process are in the job's storage, in"
                " `run/logs/attempt-N/stacks-*.txt`. Raise the deadline if a step of this job takes that long."
            ),
        ),
        Reason.ENDED: Explanation(
            means="The trainer of the newest attempt has ended.",
            advice=("Nothing to do; Retrying or Suspended says what follows, or Complete or Failed how the job ended."),
        ),
        Reason.NO_CHECKPOINT_YET: Explanation(
            means="The trainer has not saved a complete checkpoint.",
            advice="Wait for step spec.checkpoint.everySteps. Until then a failure loses everything.",
        ),
        Reason.SAVED: Explanation(
            means="There is a complete checkpoint.",
            advice="Nothing to do.",
        ),
        Reason.SUSPENDING: Explanation(
            means="The job is to be suspended: its trainer saves a checkpoint, then its cluster is removed.",
            advice=(
                "Wait: the trainer has `runPolicy.gracePeriodSeconds` to save, then its pods end, which may take as"
                " long again."
            ),
        ),
        Reason.SUSPENDED: Explanation(
            means="The job is suspended (`spec.suspend`) and holds no nodes.",
            advice="`rljob resume` lets it go on from its newest checkpoint.",
        ),
        Reason.RESIZED: Explanation(
            means=(
                "The job ran on fewer nodes than it asks for (`runPolicy.elastic`), and the others are back: it was"
                " stopped with a checkpoint to go on with all of them."
            ),
            advice="Nothing to do.",
        ),
        Reason.RESUMED: Explanation(
            means="The job was suspended and goes on.",
            advice="Nothing to do.",
        ),
        Reason.SUCCEEDED: Explanation(
            means="All steps are done, and the trainer has said so.",
            advice="Nothing to do; the model is at status.exportUri, the newest checkpoint at status.checkpoint.uri.",
        ),
        Reason.PROVISIONING_DEADLINE_EXCEEDED: Explanation(
            means="The trainer was not running `runPolicy.provisioningDeadlineSeconds` after its cluster was made.",
            advice=(
                "The message says what the job was waiting for. Remove that cause or raise the deadline, then"
                " `rljob retry`."
            ),
        ),
        Reason.ACTIVE_DEADLINE_EXCEEDED: Explanation(
            means=(
                "The job was not done after `runPolicy.activeDeadlineSeconds` of all its attempts. A trainer that "
                "ran was asked to stop first, and had `runPolicy.gracePeriodSeconds` to save."
            ),
            advice=(
                "Raise the deadline, then `rljob retry`: it goes on from its last checkpoint, which the message names."
            ),
        ),
        Reason.CONFIGURATION_ERROR: Explanation(
            means="The trainer ended with exit code 2: the job can never work as it is written.",
            advice=(
                "The message says which field. Correct it and create the job again; where the cause is outside of the"
                " job, such as a file that was missing, `rljob retry` is enough."
            ),
        ),
        Reason.APPLICATION_ERROR: Explanation(
            means=(
                "The trainer ended with another exit code than those it has for other causes: the training, or code of "
                "the job, failed."
            ),
            advice="The message holds the trainer's error or the last lines of its log, `rljob logs` all of it.",
        ),
        Reason.INFRASTRUCTURE_ERROR: Explanation(
            means=(
                "The trainer ended with exit code 75, was killed, or Ray lost it; for a pod: it was evicted, preempted,"
                " lost with its node, or has no network."
            ),
            advice="Nothing is wrong with the job. If it has failed, `rljob retry` lets it go on from its checkpoint.",
        ),
        Reason.OUT_OF_MEMORY: Explanation(
            means="The kernel killed a container of the job because it used more memory than its limit (`OOMKilled`).",
            advice=(
                "Raise the memory under spec.head.resources or spec.pools[].resources, or make batches or rollouts "
                "smaller."
            ),
        ),
        Reason.STOPPED_OUTSIDE: Explanation(
            means="The trainer was stopped, and not by the operator.",
            advice="Somebody used Ray's own interface. `rljob retry` lets it go on from its newest checkpoint.",
        ),
        Reason.STOPPED_BY_USER: Explanation(
            means="Somebody asked for it (`rljob stop`); the trainer had `runPolicy.gracePeriodSeconds` to save.",
            advice="`rljob retry` lets it go on from its newest checkpoint.",
        ),
        Reason.ENDED_WITHOUT_RESULT: Explanation(
            means="The trainer ended with exit code 0, but its run state does not say that the training is complete.",
            advice="The image's trainer is of another version, or something else ended it. Look at `rljob logs`.",
        ),
    }
)
