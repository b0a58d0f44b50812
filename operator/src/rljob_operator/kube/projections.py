"""What the cache keeps of an API object: the fields that are read. A field that is to be read must be added here.

Whole objects would need too much memory: for example, a pod of a RayCluster is 30 KiB of JSON, and more as objects.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from rljob_api.constants import (
    ANNOTATION_RETRY,
    ANNOTATION_STOP,
    ANNOTATION_TOKEN_KEY,
    LABEL_ATTEMPT,
    LABEL_JOB,
    LABEL_JOB_UID,
)
from rljob_api.v1alpha1.pools import PRIORITY_CLASS_LABEL, QUEUE_LABEL
from rljob_operator.kube.allowed_calls import CLUSTERS, CORE_EVENTS, PODS, WORKLOADS, ResourceType
from rljob_operator.raw_json import JsonObject, flag_at, objects_at, text_at

LABEL_CLUSTER_UID = "kueue.x-k8s.io/job-uid"
"""Label of a Kueue workload: the UID of the object for which it reserves quota, here of a RayCluster."""
MOST_ENTRIES = 64
"""Of longer lists, this number of entries is kept."""
LONGEST_TEXT = 2000
"""Longer strings are shortened to about this length: their first and last 1,000 characters are kept."""

_Shape = Mapping[str, "_Shape"] | list["_Shape"] | str
"""What is kept of a value: of an object these fields, of each entry of a list this shape, or one of these two:"""
WHOLE = "whole"
CONTROLLER = "controller"
"""Of owner references, the one of the controller. A user may add others."""

_CONDITION: _Shape = dict.fromkeys(("type", "status", "reason", "message", "lastTransitionTime"), WHOLE)
_CONTAINER_STATE: _Shape = {
    "running": WHOLE,
    "waiting": {"reason": WHOLE, "message": WHOLE},
    "terminated": dict.fromkeys(("reason", "message", "exitCode", "finishedAt"), WHOLE),
}
_CONTAINER: _Shape = {
    **dict.fromkeys(("name", "ready", "restartCount"), WHOLE),
    "state": _CONTAINER_STATE,
    "lastState": _CONTAINER_STATE,
}
_METADATA: Mapping[str, _Shape] = {
    **dict.fromkeys(("name", "namespace", "uid", "resourceVersion", "generation"), WHOLE),
    **dict.fromkeys(("creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds"), WHOLE),
    # A user may set tens of thousands of labels.
    "labels": dict.fromkeys(
        (
            *(LABEL_JOB, LABEL_JOB_UID, LABEL_ATTEMPT, "ray.io/cluster", "ray.io/group", "ray.io/node-type"),
            *(QUEUE_LABEL, PRIORITY_CLASS_LABEL, LABEL_CLUSTER_UID),
        ),
        WHOLE,
    ),
    "annotations": dict.fromkeys((ANNOTATION_TOKEN_KEY, ANNOTATION_STOP, ANNOTATION_RETRY), WHOLE),
    "ownerReferences": CONTROLLER,
}
_SHAPES: Mapping[ResourceType, _Shape] = {
    CLUSTERS: {
        "metadata": _METADATA,
        "spec": {"suspend": WHOLE, "authOptions": WHOLE},
        "status": {"conditions": [_CONDITION]},
    },
    PODS: {
        "metadata": _METADATA,
        "spec": {"nodeName": WHOLE},
        "status": {
            **dict.fromkeys(("phase", "reason", "message"), WHOLE),
            "conditions": [_CONDITION],
            "initContainerStatuses": [_CONTAINER],
            "containerStatuses": [_CONTAINER],
        },
    },
    CORE_EVENTS: {
        **dict.fromkeys(("reason", "message", "lastTimestamp", "eventTime"), WHOLE),
        "metadata": {"creationTimestamp": WHOLE},
        "series": {"lastObservedTime": WHOLE},
        "involvedObject": {"uid": WHOLE},
    },
    WORKLOADS: {
        "metadata": _METADATA,
        "status": {
            "conditions": [_CONDITION],
            "admissionChecks": [dict.fromkeys(("name", "state", "message"), WHOLE)],
        },
    },
}
_CLEANED_UP_JOB: _Shape = {
    "metadata": dict.fromkeys(
        ("name", "namespace", "uid", "resourceVersion", "generation", "creationTimestamp", "deletionTimestamp"), WHOLE
    ),
    "spec": {"runPolicy": {"ttlSecondsAfterFinished": WHOLE}},
    "status": {
        **dict.fromkeys(("observedGeneration", "phase", "gpus"), WHOLE),
        "result": {"at": WHOLE, "cleanedUpAt": WHOLE},
        "handledRequests": {"retry": WHOLE},
    },
}


def projected(kind: ResourceType, raw: JsonObject) -> JsonObject:
    """The part of a cluster, pod, workload or event that is kept."""
    kept = _kept(raw, _SHAPES[kind])
    assert isinstance(kept, dict)
    return kept


def projected_job(raw: JsonObject, known: JsonObject | None) -> JsonObject:
    """The part of a job that is kept while it is not cleaned up. `known`: what is kept of an earlier state of the job.
    If the spec has not changed, the result has the same object as its spec."""
    spec, known_spec = raw.get("spec"), known.get("spec") if known is not None else None
    return {
        "metadata": _kept(raw.get("metadata"), _METADATA),
        "spec": known_spec if spec == known_spec else _with_shared_names(spec),
        "status": _with_shared_names(raw.get("status")),
    }


def trimmed_job(raw: JsonObject) -> JsonObject:
    """The part of a job that is kept if it is finished and cleaned up: its identity and when to delete it. There may be
    many such jobs."""
    kept = _kept(raw, _CLEANED_UP_JOB)
    assert isinstance(kept, dict)
    return kept


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


def _kept(value: object, shape: _Shape) -> object:
    """The part of a value that has this shape. A value of another type is kept as it is: it counts as absent."""
    if isinstance(value, Mapping) and isinstance(shape, Mapping):
        return {name: _kept(value[name], inner) for name, inner in shape.items() if name in value}
    if isinstance(value, list) and isinstance(shape, list):
        return [_kept(entry, shape[0]) for entry in value[:MOST_ENTRIES]]
    if isinstance(value, list) and shape == CONTROLLER:
        controllers = [each for each in value if flag_at(each, "controller")]
        return [_kept(each, dict.fromkeys(("kind", "uid", "controller"), WHOLE)) for each in controllers[:1]]
    if isinstance(value, str) and len(value) > LONGEST_TEXT:
        return f"{value[: LONGEST_TEXT // 2]} ... {value[-LONGEST_TEXT // 2 :]}"
    return value


def _with_shared_names(value: object) -> object:
    """The value with one string for each name of a field, instead of one in each object of the API server."""
    if isinstance(value, dict):
        return {sys.intern(name): _with_shared_names(inner) for name, inner in value.items()}
    return [_with_shared_names(entry) for entry in value] if isinstance(value, list) else value
