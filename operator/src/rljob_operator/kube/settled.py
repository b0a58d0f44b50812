"""Jobs that are over and were seen to have left nothing. There may be many, so little of each is kept."""

from __future__ import annotations

from rljob_api.constants import ANNOTATION_RETRY
from rljob_operator.raw_json import JsonObject, at, object_at, optional_text_at, text_at

KEPT_METADATA = ("name", "namespace", "uid", "resourceVersion", "generation", "creationTimestamp", "deletionTimestamp")
KEPT_STATUS = ("observedGeneration", "phase", "result", "handledRequests")


def is_settled(job: JsonObject) -> bool:
    """Whether it has ended and was seen to have left nothing, and nobody has changed it since."""
    metadata, status = object_at(job, "metadata"), object_at(job, "status")
    is_going = optional_text_at(metadata, "deletionTimestamp") is not None
    is_seen = at(status, "observedGeneration") == at(metadata, "generation")
    return bool(text_at(status, "result", "cleanedUpAt")) and is_seen and not is_going and not _is_to_be_tried(job)


def remnant(job: JsonObject) -> JsonObject:
    """What has to be known of a job that is settled: who it is, how it ended, and when it is to be deleted."""
    metadata, status = object_at(job, "metadata"), object_at(job, "status")
    return {
        "metadata": {name: metadata[name] for name in KEPT_METADATA if name in metadata},
        "spec": {"runPolicy": dict(object_at(job, "spec", "runPolicy"))},
        "status": {name: status[name] for name in KEPT_STATUS if name in status},
    }


def _is_to_be_tried(job: JsonObject) -> bool:
    """Whether somebody has asked for another attempt that nobody has seen to yet."""
    request = text_at(object_at(job, "metadata", "annotations"), ANNOTATION_RETRY)
    return bool(request) and request != text_at(job, "status", "handledRequests", "retry")
