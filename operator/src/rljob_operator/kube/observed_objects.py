"""From the API server's objects to what `reconcile` knows about a job and its cluster; pure.

What another version wrote is read by `rljob_api.tolerant_reading`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from rljob_api.constants import ANNOTATION_RETRY, ANNOTATION_STOP, API_GROUP, API_VERSION, KIND
from rljob_api.pydantic_messages import is_echo, plain_message
from rljob_api.tolerant_reading import AS_FAR_AS_READABLE, STATUS, STORED_SPEC, read_document
from rljob_api.v1alpha1.job import RLJob
from rljob_api.v1alpha1.run_policy import RunPolicy
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_api.v1alpha1.status import RLJobStatus
from rljob_api.yaml_text import wire_path
from rljob_operator.kube.errors import KubeError
from rljob_operator.manifests.access import asks_for_token
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
INVALID_CLUSTER_EVENTS = ("InvalidRayClusterSpec", "InvalidRayClusterMetadata", "InvalidRayClusterStatus")
"""How KubeRay says that it will not touch a RayCluster: by events only."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class JobObject:
    """A job as read, and the version that its status is written over."""

    observed: ObservedJob
    resource_version: str


@dataclass(frozen=True)
class _SpecReading:
    """What could be read of a job's spec."""

    spec: RLJobSpec | None
    error: str | None
    """Why there is none."""
    unknown_fields: tuple[str, ...]
    readable_policy: RunPolicy
    """Of a spec that cannot be read: what can be read of its `runPolicy`."""
    memory_shortage: str


class JobReader:
    """Reads jobs. A spec takes most of the time and seldom changes: of each job the last one read is kept."""

    def __init__(self) -> None:
        self._readings: dict[tuple[str, str], tuple[object, _SpecReading]] = {}
        """By place: the spec as stored, and the reading of it."""

    def read(self, raw: JsonObject) -> JobObject:
        """The job in an API object. A spec that cannot be read becomes `spec_error`; a status that cannot be
        read raises KubeError, for working on without it would do everything again."""
        place, spec = _place(raw), raw.get("spec")
        kept = self._readings.get(place)
        if kept is None or kept[0] != spec:
            kept = self._readings[place] = (spec, _spec_reading(raw))
        return _job_object(raw, kept[1])

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
    """The time at a path, in UTC; None where there is none, or none of the calendar's years in UTC."""
    try:
        return datetime.fromisoformat(text_at(value, *path)).astimezone(UTC)
    except (ValueError, OverflowError):
        return None


def _job_object(raw: JsonObject, reading: _SpecReading) -> JobObject:
    metadata = object_at(raw, "metadata")
    namespace, name = _place(raw)
    annotations = object_at(metadata, "annotations")
    observed = ObservedJob(
        namespace=namespace,
        name=name,
        uid=text_at(metadata, "uid"),
        generation=integer_at(metadata, "generation") or 0,
        created=time_at(metadata, "creationTimestamp") or datetime.fromtimestamp(0, UTC),
        deleting=optional_text_at(metadata, "deletionTimestamp") is not None,
        spec=reading.spec,
        spec_error=reading.error,
        status=_status(object_at(raw, "status"), f"RLJob {namespace}/{name}"),
        unknown_fields=reading.unknown_fields,
        memory_shortage=reading.memory_shortage,
        stop_request=optional_text_at(annotations, ANNOTATION_STOP),
        retry_request=optional_text_at(annotations, ANNOTATION_RETRY),
        readable_policy=reading.readable_policy,
    )
    return JobObject(observed, text_at(metadata, "resourceVersion"))


def _place(raw: JsonObject) -> tuple[str, str]:
    return text_at(raw, "metadata", "namespace"), text_at(raw, "metadata", "name")


def _spec_reading(raw: JsonObject) -> _SpecReading:
    metadata = object_at(raw, "metadata")
    document = {
        "apiVersion": f"{API_GROUP}/{API_VERSION}",
        "kind": KIND,
        "metadata": {name: metadata[name] for name in ("name", "namespace") if name in metadata},
        "spec": raw.get("spec"),
    }
    try:
        reading = read_document(RLJob, document, STORED_SPEC)
    except ValidationError as error:
        words = "; ".join(f"{wire_path(each['loc'])}: {plain_message(each, RLJob)}" for each in _errors(error))
        policy = read_document(RunPolicy, object_at(raw, "spec", "runPolicy"), AS_FAR_AS_READABLE).value
        return _SpecReading(None, words, (), policy, "")
    spec = reading.value.spec
    return _SpecReading(spec, None, reading.unknown_fields, RunPolicy(), _memory_shortage(spec))


def _memory_shortage(spec: RLJobSpec) -> str:
    """An estimate that fails is none: the job goes on without."""
    try:
        return memory_shortage(spec)
    except Exception:
        logger.exception("the memory of a job could not be estimated")
        return ""


def _status(raw: JsonObject, where: str) -> RLJobStatus:
    """Raises KubeError where more of it cannot be read than what is only told."""
    attempts = objects_at(raw, "attempts")
    if len(attempts) > MAX_ATTEMPTS:
        raw = {**raw, "attempts": list(attempts[-MAX_ATTEMPTS:])}
    try:
        status = read_document(RLJobStatus, raw, STATUS).value
    except ValidationError as error:
        first = _errors(error)[0]
        raise _damaged(f"{where}: status.{wire_path(first['loc'])} {plain_message(first, RLJobStatus)}") from None
    if not status.attempts and (num_attempts := _num_attempts(status)) > 0:
        raise _damaged(f"{where}: status.attempts is empty, and there have been attempts (seen: {num_attempts})")
    return status


def _num_attempts(status: RLJobStatus) -> int:
    """How many there have been at least, by what is said beside their records."""
    counted = status.counters.attempts if status.counters is not None else 0
    goes_on = status.next_attempt is not None and status.next_attempt.same_cluster
    return max(counted, int(goes_on))


def _damaged(found: str) -> KubeError:
    return KubeError(f"{found}; delete the job and create it again")


def _errors(error: ValidationError) -> list[ErrorDetails]:
    return [each for each in error.errors(include_url=False) if not is_echo(each)]


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
