"""Parses jobs and RayClusters, from API objects into the types of `reconcile.observed`. It sends no requests.

Fields of a job that this version of the operator does not know are tolerated (`rljob_api.tolerant_reading`).
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from rljob_api.constants import ANNOTATION_RETRY, ANNOTATION_STOP, API_GROUP, API_VERSION, KIND
from rljob_api.pydantic_messages import follows_from_another, plain_message
from rljob_api.tolerant_reading import AS_FAR_AS_READABLE, STATUS, STORED_SPEC, read_document
from rljob_api.v1alpha1.job import RLJob
from rljob_api.v1alpha1.pools import PRIORITY_CLASS_LABEL, QUEUE_LABEL
from rljob_api.v1alpha1.run_policy import RunPolicy
from rljob_api.v1alpha1.spec import ManagedBy, RLJobSpec
from rljob_api.v1alpha1.status import RLJobStatus
from rljob_api.yaml_text import wire_path
from rljob_operator.kube.errors import StatusUnreadableError
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
from rljob_operator.reconcile.observed import ObservedCluster, ObservedJob, ObservedWorkload
from rljob_planner.job_memory import memory_shortage

MAX_ATTEMPTS = 64
"""How many attempts are read from a status at most: the newest ones."""
MAX_MEMORY_WARNINGS = 256
"""How many warnings about GPU memory are cached."""
INVALID_CLUSTER_EVENTS = ("InvalidRayClusterSpec", "InvalidRayClusterMetadata", "InvalidRayClusterStatus")
"""Reasons of the events with which KubeRay rejects a RayCluster. KubeRay reports a rejection only by events."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class JobObject:
    """A parsed job and its resource version, which a status update requires."""

    observed: ObservedJob
    resource_version: str


@dataclass(frozen=True)
class _SpecReading:
    """A job's spec as far as it could be parsed."""

    spec: RLJobSpec | None
    error: str | None
    """Why the spec could not be parsed; None if it could."""
    unknown_fields: tuple[str, ...]
    """Paths of the fields that this operator does not know and ignores."""
    readable_policy: RunPolicy
    """If the spec cannot be parsed: the readable part of its `runPolicy`, with defaults for the rest."""
    memory_shortage: str
    """The warning about GPU memory; empty if there is none."""


class JobReader:
    """Parses jobs. Parsing a spec is slow and specs rarely change, so the last result for each job is cached. A memory
    estimate takes up to 5 ms, several times as long as parsing; jobs with equal pools, roles and training share it."""

    def __init__(self) -> None:
        self._readings: dict[tuple[str, str], tuple[object, _SpecReading]] = {}
        """By namespace and name: the raw spec and its parsed form."""
        self._memory_warnings: OrderedDict[bytes, str] = OrderedDict()
        """By digest of pools, roles and training: the warning about GPU memory; the last used one is at the end."""

    def read(self, raw: JsonObject) -> JobObject:
        """Parses a job. An invalid spec becomes `spec_error`. An invalid status raises StatusUnreadableError:
        without the status, the operator would start the job again."""
        key, spec = _key(raw), raw.get("spec")
        cached = self._readings.get(key)
        if cached is None or cached[0] != spec:
            cached = self._readings[key] = (spec, self._spec_reading(raw))
        return _job_object(raw, cached[1])

    def forget(self, namespace: str, name: str) -> None:
        """Forgets a job that was deleted."""
        self._readings.pop((namespace, name), None)

    def _spec_reading(self, raw: JsonObject) -> _SpecReading:
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
            message = "; ".join(f"{wire_path(each['loc'])}: {plain_message(each, RLJob)}" for each in _errors(error))
            policy = read_document(RunPolicy, object_at(raw, "spec", "runPolicy"), AS_FAR_AS_READABLE).value
            return _SpecReading(None, message, (), policy, "")
        spec = reading.value.spec
        warning = self._memory_shortage(object_at(raw, "spec"), spec)
        return _SpecReading(spec, None, reading.unknown_fields, RunPolicy(), warning)

    def _memory_shortage(self, raw: JsonObject, spec: RLJobSpec) -> str:
        """The warning about GPU memory, from the cache if it has one. `raw`: the spec as the API server sent it."""
        parts = [raw.get(name) for name in ("pools", "roles", "training")]
        key = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).digest()
        if key not in self._memory_warnings:
            self._memory_warnings[key] = _memory_shortage(spec)
            if len(self._memory_warnings) > MAX_MEMORY_WARNINGS:
                self._memory_warnings.popitem(last=False)
        self._memory_warnings.move_to_end(key)
        return self._memory_warnings[key]


def observed_cluster(
    raw: JsonObject, workload: JsonObject | None = None, events: Iterable[JsonObject] = ()
) -> ObservedCluster:
    """Parses a RayCluster. `workload`: Kueue's object for this cluster, if there is one. `events`: events about this
    cluster; needed only if the cluster has no pods."""
    metadata = object_at(raw, "metadata")
    return ObservedCluster(
        name=text_at(metadata, "name"),
        uid=text_at(metadata, "uid"),
        deleting=optional_text_at(metadata, "deletionTimestamp") is not None,
        pod_creation_error=_pod_creation_error(raw) or _rejection_in(events),
        provisioned=_is_provisioned(raw),
        asks_for_token=asks_for_token(raw),
        suspended=flag_at(raw, "spec", "suspend"),
        suspending=_has_condition(raw, "RayClusterSuspending"),
        queue=text_at(object_at(metadata, "labels"), QUEUE_LABEL),
        priority_class=text_at(object_at(metadata, "labels"), PRIORITY_CLASS_LABEL),
        workload=None if workload is None else _observed_workload(workload),
    )


def controller_uid(raw: JsonObject) -> str | None:
    """UID of the object's controlling owner (`ownerReferences[].controller`); None if there is none."""
    for owner in objects_at(raw, "metadata", "ownerReferences"):
        if flag_at(owner, "controller"):
            return optional_text_at(owner, "uid")
    return None


def time_at(value: object, *path: str) -> datetime | None:
    """The time at a path, in UTC; None if it is absent or invalid."""
    try:
        return datetime.fromisoformat(text_at(value, *path)).astimezone(UTC)
    except (ValueError, OverflowError):
        return None


def _observed_workload(raw: JsonObject) -> ObservedWorkload:
    conditions = {text_at(each, "type"): each for each in objects_at(raw, "status", "conditions")}

    def message_if(kind: str, status: str) -> str:
        found = conditions.get(kind, {})
        return text_at(found, "message") if text_at(found, "status") == status else ""

    is_reserved = text_at(conditions.get("QuotaReserved", {}), "status") == "True"
    checks = _open_admission_checks(raw, is_reserved=is_reserved)
    parts = ["quota is reserved" if is_reserved and checks else message_if("QuotaReserved", "False"), checks]
    return ObservedWorkload("; ".join(filter(None, parts)), message_if("Evicted", "True"))


def _open_admission_checks(workload: JsonObject, *, is_reserved: bool) -> str:
    """Which admission checks (Kueue) keep a workload from being admitted, and why; empty if none does. Without reserved
    quota, a check that is Pending has not begun, and does not count."""
    counts = ("Pending", "Retry", "Rejected") if is_reserved else ("Retry", "Rejected")
    found = []
    for check in objects_at(workload, "status", "admissionChecks"):
        name, state, message = (text_at(check, field) for field in ("name", "state", "message"))
        if state in counts:
            found.append(f"admission check {name} is {state}" + (f" ({message})" if message else ""))
    return "; ".join(found)


def _job_object(raw: JsonObject, reading: _SpecReading) -> JobObject:
    metadata = object_at(raw, "metadata")
    namespace, name = _key(raw)
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
        labels={key: value for key, value in object_at(metadata, "labels").items() if isinstance(value, str)},
        is_managed=text_at(raw, "spec", "managedBy") in ("", ManagedBy.OPERATOR),
        memory_shortage=reading.memory_shortage,
        stop_request=optional_text_at(annotations, ANNOTATION_STOP),
        retry_request=optional_text_at(annotations, ANNOTATION_RETRY),
        readable_policy=reading.readable_policy,
    )
    return JobObject(observed, text_at(metadata, "resourceVersion"))


def _key(raw: JsonObject) -> tuple[str, str]:
    return text_at(raw, "metadata", "namespace"), text_at(raw, "metadata", "name")


def _memory_shortage(spec: RLJobSpec) -> str:
    """The warning about GPU memory; empty if there is none or if the estimate fails: a failed estimate must not stop
    the job."""
    try:
        return memory_shortage(spec)
    except Exception:
        logger.exception("the memory of a job could not be estimated")
        return ""


def _status(raw: JsonObject, where: str) -> RLJobStatus:
    """Parses the status. Raises StatusUnreadableError if a field on which decisions depend cannot be parsed, or if
    the status has lost its attempts. `where`: the job, for the message."""
    attempts = objects_at(raw, "attempts")
    if len(attempts) > MAX_ATTEMPTS:
        raw = {**raw, "attempts": list(attempts[-MAX_ATTEMPTS:])}
    try:
        status = read_document(RLJobStatus, raw, STATUS).value
    except ValidationError as error:
        first = _errors(error)[0]
        raise _damaged(f"{where}: status.{wire_path(first['loc'])} {plain_message(first, RLJobStatus)}") from None
    if not status.attempts and (num_attempts := _num_attempts(status)) > 0:
        raise _damaged(f"{where}: status.attempts is empty, but the job has had attempts (seen: {num_attempts})")
    return status


def _num_attempts(status: RLJobStatus) -> int:
    """How many attempts there have been at least, according to the counters and the planned next attempt: if the next
    attempt reuses a cluster, an earlier attempt has created it."""
    counted = status.counters.attempts if status.counters is not None else 0
    reuses_cluster = status.next_attempt is not None and status.next_attempt.same_cluster
    return max(counted, int(reuses_cluster))


def _damaged(message: str) -> StatusUnreadableError:
    return StatusUnreadableError(f"{message}; delete the job and create it again")


def _errors(error: ValidationError) -> list[ErrorDetails]:
    """The errors, without those that only follow from another one."""
    return [each for each in error.errors(include_url=False) if not follows_from_another(each)]


def _is_provisioned(cluster: JsonObject) -> bool | None:
    """Whether the condition RayClusterProvisioned is True; None if there is no such condition."""
    kind = "RayClusterProvisioned"
    has_one = any(text_at(each, "type") == kind for each in objects_at(cluster, "status", "conditions"))
    return _has_condition(cluster, kind) if has_one else None


def _has_condition(raw: JsonObject, condition_type: str) -> bool:
    """Whether the object has a condition of this type that is True."""
    conditions = objects_at(raw, "status", "conditions")
    return any(text_at(each, "type") == condition_type and text_at(each, "status") == "True" for each in conditions)


def _pod_creation_error(raw: JsonObject) -> str | None:
    """KubeRay's message, on one line, if it could not create a pod of the cluster; otherwise None."""
    for condition in objects_at(raw, "status", "conditions"):
        failed = text_at(condition, "type") == "ReplicaFailure" and text_at(condition, "status") == "True"
        if failed and text_at(condition, "reason").startswith("FailedCreate"):
            return ": ".join(text_at(condition, "message").split("\n")) or text_at(condition, "reason")
    return None


def _rejection_in(events: Iterable[JsonObject]) -> str | None:
    """The newest message with which KubeRay rejects the RayCluster; None if there is none."""
    found = [event for event in events if text_at(event, "reason") in INVALID_CLUSTER_EVENTS]
    return text_at(max(found, key=event_time), "message") if found else None


def event_time(event: Mapping[str, object]) -> str:
    """When an event was last seen, as a sortable string."""
    for path in (("series", "lastObservedTime"), ("lastTimestamp",), ("eventTime",), ("metadata", "creationTimestamp")):
        found = text_at(event, *path)
        if found:
            return found
    return ""
