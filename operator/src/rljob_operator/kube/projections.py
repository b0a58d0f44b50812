"""What the cache keeps of an API object, and which object it belongs to.

Whole objects would need too much memory: for example, a pod of a RayCluster is 30 KiB of JSON.
"""

from __future__ import annotations

from rljob_api.constants import LABEL_JOB_UID
from rljob_operator.kube.allowed_calls import WORKLOADS, ResourceType
from rljob_operator.raw_json import JsonObject, flag_at, object_at, objects_at, text_at

LABEL_CLUSTER_UID = "kueue.x-k8s.io/job-uid"
"""Label of a Kueue workload: the UID of the object for which it reserves quota, here of a RayCluster."""
WORKLOAD_METADATA = ("name", "namespace", "uid", "resourceVersion", "creationTimestamp", "deletionTimestamp")


def projected(kind: ResourceType, raw: JsonObject) -> JsonObject:
    """The part of an object that is kept."""
    if kind == WORKLOADS:
        return _workload(raw)
    # managedFields is as large as the object itself and is not used here.
    metadata = {name: value for name, value in object_at(raw, "metadata").items() if name != "managedFields"}
    return {**raw, "metadata": metadata}


def job_uid(raw: JsonObject) -> str:
    """UID of the job that a cluster or a pod belongs to, by its label; empty if it has no such label."""
    return text_at(raw, "metadata", "labels", LABEL_JOB_UID)


def cluster_uid(workload: JsonObject) -> str:
    """UID of the RayCluster that a workload belongs to, by its label; empty if it has no such label."""
    return text_at(workload, "metadata", "labels", LABEL_CLUSTER_UID)


def is_of_ray_cluster(workload: JsonObject) -> bool:
    """Whether a Kueue workload belongs to a RayCluster. Others belong to other programs."""
    owners = objects_at(workload, "metadata", "ownerReferences")
    return any(flag_at(owner, "controller") and text_at(owner, "kind") == "RayCluster" for owner in owners)


def _workload(raw: JsonObject) -> JsonObject:
    metadata = object_at(raw, "metadata")
    kept = {name: metadata[name] for name in WORKLOAD_METADATA if name in metadata}
    labels = {LABEL_CLUSTER_UID: cluster_uid(raw)}
    owners = list(objects_at(metadata, "ownerReferences"))
    return {
        "metadata": {**kept, "labels": labels, "ownerReferences": owners},
        "status": {"conditions": list(objects_at(raw, "status", "conditions"))},
    }
