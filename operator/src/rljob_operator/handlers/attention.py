"""Which jobs need a look, and when. A job that has ended, and of which nothing is left, needs none."""

from __future__ import annotations

from datetime import datetime

from rljob_api.constants import ANNOTATION_RETRY
from rljob_operator.kube.observed_objects import time_at
from rljob_operator.raw_json import JsonObject, at, integer_at, object_at, optional_text_at, text_at


def seconds_until_look(job: JsonObject, now: datetime) -> float | None:
    """0 for a job that needs a look now; None for one that needs none, ever. Reads a job as it is stored: of all the
    jobs that have ended, none is worth more."""
    status = object_at(job, "status")
    if not is_settled(job):
        return 0.0
    retry = text_at(object_at(job, "metadata", "annotations"), ANNOTATION_RETRY)
    if retry and retry != text_at(status, "handledRequests", "retry"):
        return 0.0
    lifetime = integer_at(job, "spec", "runPolicy", "ttlSecondsAfterFinished")
    ended = time_at(status, "result", "at")
    if lifetime is None or ended is None:
        return None
    return max(0.0, lifetime - (now - ended).total_seconds())


def is_settled(job: JsonObject) -> bool:
    """Whether it has ended and was seen to have left nothing, and nobody has changed it since."""
    metadata, status = object_at(job, "metadata"), object_at(job, "status")
    is_going = optional_text_at(metadata, "deletionTimestamp") is not None
    is_seen = at(status, "observedGeneration") == at(metadata, "generation")
    return bool(text_at(status, "result", "cleanedUpAt")) and is_seen and not is_going
