"""From the API server's objects to what `reconcile` knows about a job and its cluster; pure."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from pydantic import ValidationError

from rljob_api.pydantic_messages import is_echo, plain_message
from rljob_api.v1alpha1.job import RLJob
from rljob_api.v1alpha1.status import RLJobStatus
from rljob_api.yaml_text import wire_path
from rljob_operator.kube.errors import KubeError
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

INVALID_CLUSTER_EVENTS = ("InvalidRayClusterSpec", "InvalidRayClusterMetadata", "InvalidRayClusterStatus")
"""How KubeRay says that it will not touch a RayCluster: by events only."""


@dataclass(frozen=True)
class JobObject:
    """A job as read, with what is needed to write its status."""

    observed: ObservedJob
    resource_version: str
    status: JsonObject
    """Its JSON, without fields that this version does not know: those are left alone."""


def job_object(raw: JsonObject) -> JobObject:
    """The job in an API object. A spec that cannot be read becomes `spec_error`; a status that cannot be
    read raises KubeError, for working on without it would do everything again."""
    metadata = object_at(raw, "metadata")
    namespace, name = text_at(metadata, "namespace"), text_at(metadata, "name")
    status, known = _status(object_at(raw, "status"), f"RLJob {namespace}/{name}")
    job, error = _checked(raw)
    observed = ObservedJob(
        namespace=namespace,
        name=name,
        uid=text_at(metadata, "uid"),
        generation=integer_at(metadata, "generation") or 0,
        created=time_at(metadata, "creationTimestamp") or datetime.fromtimestamp(0, UTC),
        deleting=optional_text_at(metadata, "deletionTimestamp") is not None,
        spec=job.spec if job is not None else None,
        spec_error=error,
        status=status,
    )
    return JobObject(observed, text_at(metadata, "resourceVersion"), known)


def observed_cluster(raw: JsonObject, events: Iterable[JsonObject] = ()) -> ObservedCluster:
    """A RayCluster. `events`: those about it, where it has no pods."""
    metadata = object_at(raw, "metadata")
    return ObservedCluster(
        name=text_at(metadata, "name"),
        uid=text_at(metadata, "uid"),
        owner_uid=controller_uid(raw),
        deleting=optional_text_at(metadata, "deletionTimestamp") is not None,
        pod_creation_error=_pod_creation_error(raw) or _refusal_in(events),
        provisioned=_has_condition(raw, "RayClusterProvisioned"),
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


def _checked(raw: JsonObject) -> tuple[RLJob | None, str | None]:
    metadata = object_at(raw, "metadata")
    document = {
        "apiVersion": raw.get("apiVersion"),
        "kind": raw.get("kind"),
        "metadata": {name: metadata[name] for name in ("name", "namespace") if name in metadata},
        "spec": raw.get("spec"),
    }
    try:
        return RLJob.from_wire(document), None
    except ValidationError as error:
        found = [details for details in error.errors(include_url=False) if not is_echo(details)]
        return None, "; ".join(f"{wire_path(each['loc'])}: {plain_message(each, RLJob)}" for each in found)


def _status(raw: JsonObject, where: str) -> tuple[RLJobStatus, JsonObject]:
    """The status, read after taking away fields that a newer version may have written, and its JSON."""
    known = copy.deepcopy(dict(raw))
    try:
        return RLJobStatus.from_wire(known), known
    except ValidationError as error:
        for details in error.errors(include_url=False):
            if details["type"] == "extra_forbidden":
                _remove(known, details["loc"])
    try:
        return RLJobStatus.from_wire(known), known
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise KubeError(
            f"{where}: status.{wire_path(first['loc'])} {plain_message(first, RLJobStatus)}; delete the job and create"
            " it again"
        ) from None


def _remove(value: object, path: tuple[int | str, ...]) -> None:
    for part in path[:-1]:
        if isinstance(value, dict | list):
            value = value[part]  # type: ignore[index]
    if isinstance(value, dict):
        value.pop(path[-1], None)


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
