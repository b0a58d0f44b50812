"""The meaning of each reason and what to do, for `rljob explain` and the troubleshooting page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from rljob_api.conditions import Reason


@dataclass(frozen=True)
class Explanation:
    """Explanation of a reason, for people."""

    means: str
    """What the operator observed."""
    advice: str
    """What the user should do."""


_RETRY = (
    "Nothing to do while retries are left: the operator starts the next attempt. If the job is Failed, run `rljob"
    " retry` to resume from the newest checkpoint."
)

_CREATE_AGAIN = "delete the job and create it again from the changed file."

EXPLANATIONS: Mapping[Reason, Explanation] = MappingProxyType(
    {
        Reason.VALID: Explanation(
            means="The job is valid and can run on this cluster.",
            advice="Nothing to do.",
        ),
        Reason.MEMORY_TOO_SMALL: Explanation(
            means=(
                "The job is valid, but its models probably do not fit into the memory of its GPUs. This is an estimate,"
                " so the job is not rejected."
            ),
            advice=(
                f"Run `rljob plan` with the job file. To change the settings in the message: {_CREATE_AGAIN} If the job"
                " runs, ignore this warning."
            ),
        ),
        Reason.INVALID_SPEC: Explanation(
            means=(
                "The job cannot run on this cluster as it is written: the operator or the API server found an invalid"
                " field. Or this version of the operator cannot parse the spec; then a running attempt continues."
            ),
            advice=(
                "Delete the job, correct the fields in the message, and create the job again. `rljob validate` finds"
                " most such faults without a cluster."
            ),
        ),
        Reason.STORAGE_MISSING: Explanation(
            means="The job has no `spec.checkpoint.storage`, the shared folder that its pods need on a cluster.",
            advice=(
                "Delete the job, set spec.checkpoint.storage to a PersistentVolumeClaim with access mode ReadWriteMany,"
                " and create the job again."
            ),
        ),
        Reason.TRAINER_IMAGE_INCOMPATIBLE: Explanation(
            means="The trainer in the image and this operator are incompatible: their versions are too far apart.",
            advice="Use an image of the operator's version; contract versions (`rljob --version`) may differ by one.",
        ),
        Reason.CREATING: Explanation(
            means="The job's RayCluster is being created, or pods of a previous one with the same name still exist.",
            advice="Wait; KubeRay creates the pods. If nothing happens, check the log of the KubeRay operator.",
        ),
        Reason.PODS_PENDING: Explanation(
            means="Some pods are not ready yet, and no problem of them is known.",
            advice="Wait; the pods are starting. If a pod cannot start, the message shows it within seconds.",
        ),
        Reason.READY: Explanation(
            means="All pods are ready and have joined Ray.",
            advice="Nothing to do.",
        ),
        Reason.CREATION_REJECTED: Explanation(
            means=(
                "The API server rejected the creation of the RayCluster, its Secret or its NetworkPolicy (not because"
                " of an invalid field), or, after the job has finished, the deletion of the RayCluster."
            ),
            advice=(
                "Read the API server's response in the message; usual causes are quotas and admission policies. The"
                " operator retries. If the creation is still rejected after runPolicy.provisioningDeadlineSeconds, the"
                " job fails. A rejected deletion is retried without a limit."
            ),
        ),
        Reason.NAME_CONFLICT: Explanation(
            means=(
                "A RayCluster of another owner has the name that this job's RayCluster needs. If it still exists a"
                " minute after it was first seen, the job fails."
            ),
            advice="Delete the other RayCluster, or create the job with another name.",
        ),
        Reason.KUBERAY_UNAVAILABLE: Explanation(
            means="KubeRay is not installed: the API server does not know RayClusters (`ray.io/v1`).",
            advice=(
                "Install KubeRay. The job then continues automatically, unless runPolicy.provisioningDeadlineSeconds"
                " have passed."
            ),
        ),
        Reason.KUBERAY_TOO_OLD: Explanation(
            means=(
                "The installed CustomResourceDefinition of RayClusters lacks a field that the operator needs; the"
                " message names the field."
            ),
            advice="Update KubeRay and its CustomResourceDefinitions; see docs/install.md for the oldest version.",
        ),
        Reason.READ_FORBIDDEN: Explanation(
            means="The operator lacks a permission to read objects that it needs. A running training continues.",
            advice=(
                "Restore the operator's role from its Helm chart; the message names the missing permission. The job"
                " fails if the trainer's state is unknown for `runPolicy.stallDeadlineSeconds`."
            ),
        ),
        Reason.POD_CREATION_FAILED: Explanation(
            means="The API server rejects a pod that KubeRay tries to create.",
            advice=(
                "Read the API server's response in the message; usual causes are quotas, limit ranges and Pod Security"
                " of the namespace."
            ),
        ),
        Reason.UNSCHEDULABLE: Explanation(
            means="The scheduler finds no node for a pod; the message has the scheduler's reason.",
            advice=(
                "Compare the message with `kubectl describe nodes`. Wait until other pods free GPUs, or create a"
                " missing PersistentVolumeClaim. To change the request, nodeSelector or tolerations:"
                f" {_CREATE_AGAIN} After runPolicy.provisioningDeadlineSeconds the job fails."
            ),
        ),
        Reason.IMAGE_PULL_FAILED: Explanation(
            means="A node cannot pull the image of a pod.",
            advice="Check the image's name and tag (spec.image) and, for a private registry, spec.imagePullSecrets.",
        ),
        Reason.CONTAINER_CONFIG_ERROR: Explanation(
            means="The kubelet cannot create or start a container as it is configured.",
            advice=(
                "The usual cause is a missing Secret, ConfigMap or key in env or envFrom. Create it, and the pod starts"
                " automatically."
            ),
        ),
        Reason.VOLUME_MOUNT_FAILED: Explanation(
            means="The kubelet cannot mount a volume of a pod, so none of its containers starts.",
            advice=(
                "Check that the ConfigMap or Secret of the volume in the message exists in the job's namespace (code or"
                " volumes), and that the volume of a PersistentVolumeClaim can be attached and mounted."
            ),
        ),
        Reason.CONTAINER_CRASHING: Explanation(
            means="A container of a pod exits again and again, or its pod has failed, before the pod became ready.",
            advice=(
                "Read the end of its log with `kubectl logs --previous`. Usual causes are an image without Ray, another"
                " Ray version than spec.rayVersion, and too little memory."
            ),
        ),
        Reason.RAY_NODES_MISSING: Explanation(
            means="All pods are ready, but some of them have not joined Ray.",
            advice="Wait. If it continues, check network policies between the job's pods, and the logs of worker pods.",
        ),
        Reason.DASHBOARD_UNREACHABLE: Explanation(
            means=(
                "The head pod exists, but Ray's dashboard does not respond to the operator, or the dashboard does not"
                " have the final run state of a trainer that has succeeded. The message says which of the two. A"
                " running training continues without visible progress."
            ),
            advice=(
                "Check network policies between the operator and the job's namespace (port 8265), and whether the head"
                " pod is overloaded. If the dashboard is unreachable for runPolicy.stallDeadlineSeconds, the attempt"
                " ends and the operator starts the next one, if a retry is left."
            ),
        ),
        Reason.TOKEN_REJECTED: Explanation(
            means="Ray's dashboard rejects the token that the operator derived for this job.",
            advice=(
                "Somebody replaced the key in the operator's Secret. Put the old key back as `previous-key`. If not, a"
                " running trainer ends after `runPolicy.stallDeadlineSeconds`, and the next attempt has the new key; a"
                " job without a running trainer fails at its provisioning deadline: then run `rljob retry`."
            ),
        ),
        Reason.AUTHENTICATION_MISSING: Explanation(
            means=(
                "Ray's dashboard accepts requests without a token, so anybody who can reach it could run any code. The"
                " trainer was not submitted."
            ),
            advice=(
                "Use at least the versions of KubeRay and Ray in docs/install.md, with the same Ray version in the"
                " image and in spec.rayVersion."
            ),
        ),
        Reason.CLUSTER_LOST: Explanation(
            means="The RayCluster was deleted while the attempt needed it, and not by the operator.",
            advice=_RETRY,
        ),
        Reason.HEAD_LOST: Explanation(
            means="The head pod exited or was deleted after the cluster had been ready.",
            advice=f"Read the cause in the message (node lost, evicted, out of memory). {_RETRY}",
        ),
        Reason.WAITING_FOR_NEXT_ATTEMPT: Explanation(
            means="An attempt ended. The next one starts after a pause, once the pods of the previous one are deleted.",
            advice="Wait; the condition Retrying says why the attempt ended and when the next one starts.",
        ),
        Reason.NEXT_ATTEMPT_STARTED: Explanation(
            means="Another attempt has started; this condition was about the previous one.",
            advice="Nothing to do.",
        ),
        Reason.DELETING: Explanation(
            means="The job has finished, and the operator is deleting its cluster.",
            advice="Wait; the pods have `runPolicy.gracePeriodSeconds` to terminate.",
        ),
        Reason.REMOVED: Explanation(
            means=(
                "The job has finished and has no RayCluster: it was deleted, or never created. The Secret and the"
                " NetworkPolicy of a deleted RayCluster stay until the job is deleted; no RayCluster accepts the token"
                " in the Secret any more."
            ),
            advice="Nothing to do.",
        ),
        Reason.KEPT: Explanation(
            means="The job has finished, and its RayCluster is kept for runPolicy.keepClusterSeconds (KeepCluster).",
            advice="To free its GPUs earlier, delete the job or set runPolicy.cleanup to DeleteCluster.",
        ),
        Reason.FEASIBLE: Explanation(
            means="Ray's nodes have the GPUs that the job's pools request.",
            advice="Nothing to do.",
        ),
        Reason.INSUFFICIENT_GPUS: Explanation(
            means="A worker pod has fewer GPUs in Ray than its pool requests; the message has the numbers.",
            advice="Check gpuResource and gpusPerNode of the pool, and the device plugin on the Kubernetes nodes.",
        ),
        Reason.PLACEMENT_GROUP_INFEASIBLE: Explanation(
            means=(
                "The CPUs and GPUs that the trainer reserves (a placement group) do not fit on Ray's nodes, so the"
                " trainer would wait forever."
            ),
            advice="Check gpusPerNode and the CPUs under spec.pools[].resources.",
        ),
        Reason.SUBMITTING: Explanation(
            means="The operator has submitted the trainer to Ray, and Ray does not list it yet.",
            advice="Wait; the trainer starts in the head pod.",
        ),
        Reason.SUBMITTED: Explanation(
            means="Ray has accepted the trainer.",
            advice="Nothing to do.",
        ),
        Reason.SUBMISSION_FAILED: Explanation(
            means=(
                "If JobSubmitted has this reason: Ray rejected the submission of the trainer. The operator retries"
                " until `runPolicy.provisioningDeadlineSeconds` have passed. If the job is Failed with this reason: Ray"
                " accepted the trainer, but could not start its process."
            ),
            advice="Read Ray's response in the message, and check that the image (spec.image) contains the trainer.",
        ),
        Reason.DRIVER_LOST: Explanation(
            means=(
                "Ray no longer lists the trainer (in Ray's words, the driver) that it had accepted, because the Ray"
                " head restarted."
            ),
            advice=f"{_RETRY} If it happens again, check whether the head pod ran out of memory.",
        ),
        Reason.STARTING: Explanation(
            means="The trainer is running and has not started its first step.",
            advice="Wait; the trainer loads the model and creates its workers. `rljob logs` shows its progress.",
        ),
        Reason.TRAINING: Explanation(
            means="The trainer executes training steps.",
            advice="Nothing to do.",
        ),
        Reason.STOPPING: Explanation(
            means="The trainer was asked to stop: by the operator, by the termination of its pod, or through Ray.",
            advice="Wait; the trainer saves a checkpoint, if training has started, and exits.",
        ),
        Reason.RUN_STATE_UNREADABLE: Explanation(
            means="The operator cannot read the trainer's run state, so its progress is unknown.",
            advice=(
                "The message says what cannot be read. If it names a contract version, use an image of the operator's"
                " version. The job fails if the trainer's state is unknown for `runPolicy.stallDeadlineSeconds`."
            ),
        ),
        Reason.STALLED: Explanation(
            means="The trainer made no progress for `runPolicy.stallDeadlineSeconds`.",
            advice=(
                "The message says where it stopped. The stacks of all processes are in the job's storage, in"
                " `run/logs/attempt-N/stacks-*.txt`. Increase the deadline if a step of this job takes that long."
            ),
        ),
        Reason.ENDED: Explanation(
            means="If Retrying has this reason: the job has finished. Otherwise: the attempt has ended.",
            advice="Nothing to do; the conditions Retrying, Suspended, Complete and Failed say what comes next.",
        ),
        Reason.NO_CHECKPOINT_YET: Explanation(
            means="The trainer has not saved a complete checkpoint yet.",
            advice=(
                "Wait for step spec.checkpoint.everySteps. A failure before the first checkpoint restarts from step 0."
            ),
        ),
        Reason.SAVED: Explanation(
            means="There is a complete checkpoint.",
            advice="Nothing to do.",
        ),
        Reason.SUSPENDING: Explanation(
            means=(
                "The job is being suspended: the trainer saves a checkpoint, if training has started, then the operator"
                " deletes the cluster."
            ),
            advice=(
                "Wait; the trainer has `runPolicy.gracePeriodSeconds` to save, and then the pods have the same time to"
                " terminate."
            ),
        ),
        Reason.SUSPENDED: Explanation(
            means="The job is suspended (`spec.suspend`): its pods are deleted, so their GPUs are free.",
            advice="To resume it from its newest checkpoint, run `rljob resume`.",
        ),
        Reason.RESIZED: Explanation(
            means=(
                "The job ran with fewer worker pods than it requests (`runPolicy.elastic`), and the others are ready"
                " now. It was stopped with a checkpoint and resumes with all worker pods."
            ),
            advice="Nothing to do.",
        ),
        Reason.RESUMED: Explanation(
            means="The job is no longer suspended: it has resumed or finished.",
            advice="Nothing to do.",
        ),
        Reason.SUCCEEDED: Explanation(
            means="All training steps are completed.",
            advice=(
                "Nothing to do; the newest checkpoint is at status.checkpoint.uri, and the model, if it was exported,"
                " at status.exportUri."
            ),
        ),
        Reason.PROVISIONING_DEADLINE_EXCEEDED: Explanation(
            means=(
                "The trainer did not run within `runPolicy.provisioningDeadlineSeconds` after the creation of its"
                " cluster or, if the cluster could not be created, after the start of the attempt."
            ),
            advice=(
                "The message says what the job was waiting for. Fix the cause or increase the deadline, then run"
                " `rljob retry`."
            ),
        ),
        Reason.ACTIVE_DEADLINE_EXCEEDED: Explanation(
            means=(
                "The job did not finish within `runPolicy.activeDeadlineSeconds`, the limit for all attempts together."
                " A running trainer was asked to stop, and had `runPolicy.gracePeriodSeconds` to save."
            ),
            advice=(
                "Increase the deadline, then run `rljob retry`: the job resumes from the checkpoint in the message."
            ),
        ),
        Reason.CONFIGURATION_ERROR: Explanation(
            means="The trainer exited with code 2: the job cannot work as it is written.",
            advice=(
                "Correct the field in the message and create the job again. If the cause is outside the job, such as a"
                " missing file, fix it and run `rljob retry`."
            ),
        ),
        Reason.APPLICATION_ERROR: Explanation(
            means=(
                "The training or user code failed: the trainer exited with code 1, or with an exit code or signal that"
                " has no other reason, such as SIGSEGV."
            ),
            advice="Read the error or the end of the log in the message; `rljob logs` prints the whole log.",
        ),
        Reason.INFRASTRUCTURE_ERROR: Explanation(
            means=(
                "If an attempt or the job failed with this reason: the trainer exited with code 75, was killed by"
                " SIGKILL or SIGTERM, or Ray could not start it or lost it. If ClusterReady has this reason: a pod was"
                " evicted, preempted, or lost with its node, or the kubelet cannot create the pod's sandbox or network."
            ),
            advice=f"The job itself is not at fault; the message has the cause. {_RETRY}",
        ),
        Reason.OUT_OF_MEMORY: Explanation(
            means="The kernel killed a container of the job because it exceeded its memory limit (`OOMKilled`).",
            advice=(
                "Increase the memory under spec.head.resources or spec.pools[].resources, or reduce batch sizes or"
                f" response lengths: {_CREATE_AGAIN}"
            ),
        ),
        Reason.STOPPED_THROUGH_RAY: Explanation(
            means=(
                "The trainer was asked to stop through Ray's API (`ray job stop`) or by a signal, not by the operator."
                " It handled the request and exited with code 130."
            ),
            advice="To resume it from its newest checkpoint, run `rljob retry`.",
        ),
        Reason.STOPPED_BY_USER: Explanation(
            means="A user stopped the job (`rljob stop`); the trainer had `runPolicy.gracePeriodSeconds` to save.",
            advice="To resume it from its newest checkpoint, run `rljob retry`.",
        ),
        Reason.EXITED_WITHOUT_RESULT: Explanation(
            means="The trainer exited with code 0, but its run state does not report that the training is complete.",
            advice=(
                "Read `rljob logs`. Usual causes are an image with another version of the trainer, and code that ends"
                " the process (`os._exit`)."
            ),
        ),
    }
)
