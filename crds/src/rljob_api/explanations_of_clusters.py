"""The meaning of each reason of QuotaReserved and ClusterReady, and what to do; `explanations` has all reasons."""

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


RETRY = (
    "Nothing to do while retries are left: the operator starts the next attempt. If the job is Failed, run `rljob"
    " retry` to resume from the newest checkpoint."
)

CREATE_AGAIN = "delete the job and create it again from the changed file."

EXPLANATIONS_OF_CLUSTERS: Mapping[Reason, Explanation] = MappingProxyType(
    {
        Reason.QUEUED: Explanation(
            means="The job waits in its queue: its RayCluster is suspended, and Kueue has not admitted it yet.",
            advice=(
                "Wait; Kueue admits the job when its queue has enough quota, and this time counts toward no deadline."
                " A job waits for ever if its queue does not exist or is too small for it, or if Kueue is missing or"
                " does not manage RayClusters (docs/queues.md)."
            ),
        ),
        Reason.ADMITTED: Explanation(
            means="The queue has reserved quota for the job: its pods may start.",
            advice="Nothing to do.",
        ),
        Reason.EVICTED: Explanation(
            means=(
                "Kueue suspended the RayCluster after it had been admitted, for example because a job of higher"
                " priority needs the quota."
            ),
            advice=(
                "Wait; the trainer saves a checkpoint if it can within `runPolicy.gracePeriodSeconds`. When its pods"
                " are deleted, the next attempt waits in the queue with the same RayCluster, and uses no retry."
            ),
        ),
        Reason.QUEUE_CHANGED: Explanation(
            means=(
                "The job's queue or priority label was changed while the job waited in its queue. Its RayCluster is"
                " created again with the new labels, so the job goes to the end of the queue."
            ),
            advice="Nothing to do.",
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
                "Read the API server's response in the message; usual causes are admission policies, and a"
                " ResourceQuota smaller than the job. The operator tries again, the creation until"
                " runPolicy.provisioningDeadlineSeconds have passed: then a new job fails, and a job that has run"
                " before uses a retry."
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
                "Install KubeRay. The job then continues automatically. After runPolicy.provisioningDeadlineSeconds, a"
                " new job fails, and a job that has run before uses a retry."
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
                "Read the API server's response in the message; usual causes are limit ranges and Pod Security of the"
                " namespace, and a ResourceQuota that is smaller than the job."
            ),
        ),
        Reason.UNSCHEDULABLE: Explanation(
            means="The scheduler finds no node for a pod; the message has the scheduler's reason.",
            advice=(
                "Compare the message with `kubectl describe nodes`. Wait until GPUs are free: after"
                " runPolicy.provisioningDeadlineSeconds the job deletes its RayCluster and tries again later. To change"
                f" the request, nodeSelector or tolerations: {CREATE_AGAIN}"
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
        Reason.QUOTA_EXCEEDED: Explanation(
            means=(
                "A ResourceQuota of the namespace is used up by others, so the RayCluster or pods of the job cannot be"
                " created."
            ),
            advice=(
                "Wait until other jobs of the namespace end, or ask for a larger ResourceQuota. After"
                " `runPolicy.provisioningDeadlineSeconds` the job deletes its RayCluster and tries again later, as"
                " often as needed."
            ),
        ),
        Reason.VOLUME_MOUNT_FAILED: Explanation(
            means=(
                "The PersistentVolumeClaim of a pod does not exist, or the kubelet cannot mount a volume of the pod, so"
                " none of its containers starts."
            ),
            advice=(
                "Check that the PersistentVolumeClaim, ConfigMap or Secret in the message exists in the job's namespace"
                " (checkpoint.storage, code, volumes), and that the volume of the claim can be attached and mounted."
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
                " running trainer ends after `runPolicy.stallDeadlineSeconds`, and the next attempt has the new key."
                " Before the trainer runs, a new job fails at its provisioning deadline: then run `rljob retry`."
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
            advice=RETRY,
        ),
        Reason.HEAD_LOST: Explanation(
            means="The head pod exited, was deleted or was lost with its node after the cluster had been ready.",
            advice=f"Read the cause in the message. {RETRY}",
        ),
        Reason.WAITING_FOR_NEXT_ATTEMPT: Explanation(
            means="An attempt ended. The next one starts after a backoff, once the pods of the former are deleted.",
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
    }
)
