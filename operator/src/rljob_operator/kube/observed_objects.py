"""From the API server's objects to what `reconcile` knows about a job and its cluster; pure."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from pydantic_core import ErrorDetails

from rljob_api.constants import ANNOTATION_RETRY, ANNOTATION_STOP, API_GROUP, API_VERSION, KIND
from rljob_api.pydantic_messages import plain_message
from rljob_api.v1alpha1.job import RLJob
from rljob_api.v1alpha1.run_policy import RunPolicy
from rljob_api.v1alpha1.status import RLJobStatus
from rljob_api.yaml_text import wire_path
from rljob_operator.kube.errors import KubeError
from rljob_operator.kube.status_upgrade import is_without_records, with_records
from rljob_operator.kube.tolerant_reading import TolerantReading, read_tolerantly, remove
from rljob_operator.manifests.required_fields import asks_for_token
from rljob_operator.raw_json import (
    JsonObject,
    flag_at,
    integer_at,
    object_at,
    objects_at,
    optional_text_at,
    text_at,
)
from rljob_operator.reconcile.observed import ObservedCluster, ObservedJob
from rljob_planner.job_memory import memory_shortage

MAX_ATTEMPTS = 64
"""That a status of this version lists."""
TOLD_ONLY = ("phase", "reason", "gpus", "conditions", "pools", "progress", "checkpoint", "exportUri")
"""Fields of a status that are for people: where one of them cannot be read, it is written anew."""
INVALID_CLUSTER_EVENTS = ("InvalidRayClusterSpec", "InvalidRayClusterMetadata", "InvalidRayClusterStatus")
"""How KubeRay says that it will not touch a RayCluster: by events only."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class JobObject:
    """A job as read, with what is needed to write its status."""

    observed: ObservedJob
    resource_version: str
    status: JsonObject
    """Its JSON as stored, without fields that this version does not know: those are left alone."""
    is_upgraded: bool = False
    """Whether an older operator wrote the status, so that the one observed differs from what is stored."""


class JobReader:
    """Reads jobs. A spec takes most of the time and seldom changes: of each job the last one read is kept."""

    def __init__(self) -> None:
        self._readings: dict[tuple[str, str], tuple[object, TolerantReading[RLJob], str]] = {}
        """By place: the spec as stored, the reading of it, and what its memory lacks."""

    def read(self, raw: JsonObject) -> JobObject:
        """The job in an API object. A spec that cannot be read becomes `spec_error`; a status that cannot be
        read raises KubeError, for working on without it would do everything again."""
        place, spec = _place(raw), raw.get("spec")
        kept = self._readings.get(place)
        if kept is None or kept[0] != spec:
            reading = _checked(raw)
            kept = self._readings[place] = (spec, reading, _memory_shortage(reading))
        return _job_object(raw, kept[1], kept[2])

    def forget(self, namespace: str, name: str) -> None:
        """The job is gone."""
        self._readings.pop((namespace, name), None)


def observed_cluster(raw: JsonObject, events: Iterable[JsonObject] = ()) -> ObservedCluster:
    """A RayCluster. `events`: those about it, where it has no pods."""
    metadata = object_at(raw, "metadata")
    return ObservedCluster(
        name=text_at(metadata, "name"),
        uid=text_at(metadata, "uid"),
        deleting=optional_text_at(metadata, "deletionTimestamp") is not None,
        pod_creation_error=_pod_creation_error(raw) or _refusal_in(events),
        provisioned=_has_condition(raw, "RayClusterProvisioned"),
        authenticated=asks_for_token(raw),
    )


def controller_uid(raw: JsonObject) -> str | None:
    """UID of the object's controlling owner."""
    for owner in objects_at(raw, "metadata", "ownerReferences"):
        if flag_at(owner, "controller"):
            return optional_text_at(owner, "uid")
    return None


def time_at(value: object, *path: str) -> datetime | None:
    """The time at a path, in UTC; None where there is none."""
    try:
        return datetime.fromisoformat(text_at(value, *path)).astimezone(UTC)
    except ValueError:
        return None


def _memory_shortage(reading: TolerantReading[RLJob]) -> str:
    """Of a spec that can be read. An estimate that fails is none: the job goes on without."""
    if reading.value is None:
        return ""
    try:
        return memory_shortage(reading.value.spec)
    except Exception:
        logger.exception("the memory of a job could not be estimated")
        return ""


def _job_object(raw: JsonObject, reading: TolerantReading[RLJob], shortage: str) -> JobObject:
    metadata = object_at(raw, "metadata")
    namespace, name = _place(raw)
    created = time_at(metadata, "creationTimestamp") or datetime.fromtimestamp(0, UTC)
    status, stored = _status(object_at(raw, "status"), f"RLJob {namespace}/{name}")
    is_upgraded = is_without_records(status)
    annotations = object_at(metadata, "annotations")
    observed = ObservedJob(
        namespace=namespace,
        name=name,
        uid=text_at(metadata, "uid"),
        generation=integer_at(metadata, "generation") or 0,
        created=created,
        deleting=optional_text_at(metadata, "deletionTimestamp") is not None,
        spec=reading.value.spec if reading.value is not None else None,
        spec_error=_words(reading.errors) or None,
        status=with_records(status, created) if is_upgraded else status,
        unknown_fields=reading.unknown_fields,
        memory_shortage=shortage,
        stop_request=optional_text_at(annotations, ANNOTATION_STOP),
        retry_request=optional_text_at(annotations, ANNOTATION_RETRY),
        readable_policy=RunPolicy() if reading.value is not None else _readable_policy(raw),
    )
    return JobObject(observed, text_at(metadata, "resourceVersion"), stored, is_upgraded)


def _place(raw: JsonObject) -> tuple[str, str]:
    return text_at(raw, "metadata", "namespace"), text_at(raw, "metadata", "name")


def _checked(raw: JsonObject) -> TolerantReading[RLJob]:
    metadata = object_at(raw, "metadata")
    document = {
        "apiVersion": f"{API_GROUP}/{API_VERSION}",
        "kind": KIND,
        "metadata": {name: metadata[name] for name in ("name", "namespace") if name in metadata},
        "spec": raw.get("spec"),
    }
    return read_tolerantly(RLJob, document)


def _readable_policy(raw: JsonObject) -> RunPolicy:
    """What can be read of `spec.runPolicy` by itself."""
    reading = read_tolerantly(RunPolicy, object_at(raw, "spec", "runPolicy"))
    while reading.value is None:
        place = reading.errors[0]["loc"][:1]
        if not place or not remove(reading.document, place):
            return RunPolicy()
        reading = read_tolerantly(RunPolicy, reading.document)
    return reading.value


def _words(errors: Iterable[ErrorDetails]) -> str:
    return "; ".join(f"{wire_path(each['loc'])}: {plain_message(each, RLJob)}" for each in errors)


def _status(raw: JsonObject, where: str) -> tuple[RLJobStatus, JsonObject]:
    """The status, read after taking away what a newer version may have written, and its JSON."""
    attempts = objects_at(raw, "attempts")
    document = dict(raw) | ({"attempts": list(attempts[-MAX_ATTEMPTS:])} if len(attempts) > MAX_ATTEMPTS else {})
    reading = read_tolerantly(RLJobStatus, document)
    while reading.value is None:
        first = reading.errors[0]
        place = first["loc"][:1] if first["loc"] and first["loc"][0] in TOLD_ONLY else ()
        if not place or not remove(reading.document, place):
            raise KubeError(
                f"{where}: status.{wire_path(first['loc'])} {plain_message(first, RLJobStatus)}; delete the job and"
                " create it again"
            )
        reading = read_tolerantly(RLJobStatus, reading.document)
    return reading.value, reading.document


def _has_condition(raw: JsonObject, kind: str) -> bool:
    conditions = objects_at(raw, "status", "conditions")
    return any(text_at(each, "type") == kind and text_at(each, "status") == "True" for each in conditions)


def _pod_creation_error(raw: JsonObject) -> str | None:
    for condition in objects_at(raw, "status", "conditions"):
        failed = text_at(condition, "type") == "ReplicaFailure" and text_at(condition, "status") == "True"
        if failed and text_at(condition, "reason").startswith("FailedCreate"):
            return ": ".join(text_at(condition, "message").split("\n")) or text_at(condition, "reason")
    return None


def _refusal_in(events: Iterable[JsonObject]) -> str | None:
    """KubeRay's newest words about a RayCluster that it does not take."""
    found = [event for event in events if text_at(event, "reason") in INVALID_CLUSTER_EVENTS]
    return text_at(max(found, key=event_time), "message") if found else None


def event_time(event: Mapping[str, object]) -> str:
    """When an event was last seen, in a form that sorts."""
    for path in (("series", "lastObservedTime"), ("lastTimestamp",), ("eventTime",), ("metadata", "creationTimestamp")):
        found = text_at(event, *path)
        if found:
            return found
    return ""
