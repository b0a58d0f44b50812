"""Reads and writes API objects of any kind; watches are elsewhere. The operator uses it only for what its Role allows
(`_rules.tpl` of the chart).

Responses are checked: a proxy between the API server and this process may respond in place of the API server, and such
a response must not count as success or as a missing object.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

from rljob_api.constants import API_GROUP, API_VERSION
from rljob_operator.kube.client import APPLY_PATCH, JSON, MERGE_PATCH, KubeClient
from rljob_operator.kube.errors import (
    AlreadyExistsError,
    ConflictError,
    ExpiredError,
    NotFoundError,
    ResourceTypeMissingError,
    TimedOutError,
    TooLongError,
    UnavailableError,
)
from rljob_operator.raw_json import JsonObject, objects_at, text_at

PAGE_SIZE = 250
"""Objects per request of a listing; fewer after a response that is too long or too late."""
METADATA_ONLY = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
"""With this Accept header, a listing has only the metadata of the objects."""
CORE_PATH, GROUPS_PATH = "/api/v1", "/apis"
FIELD_MANAGER = "rljob-operator"
"""The field manager for server-side apply."""


@dataclass(frozen=True)
class ResourceType:
    """A kind of object and its URL path."""

    group_path: str
    """Path of the API group and version, such as `/apis/ray.io/v1`."""
    plural: str
    kind: str

    def path(self, namespace: str | None, name: str = "") -> str:
        """The path of the objects in a namespace (None: in all), or of the object with this name."""
        parts = [self.group_path, *(("namespaces", namespace) if namespace else ()), self.plural]
        return "/".join([*parts, name] if name else parts)


JOBS = ResourceType(f"/apis/{API_GROUP}/{API_VERSION}", "rljobs", "RLJob")
CLUSTERS = ResourceType("/apis/ray.io/v1", "rayclusters", "RayCluster")
PODS = ResourceType(CORE_PATH, "pods", "Pod")
SECRETS = ResourceType(CORE_PATH, "secrets", "Secret")
CORE_EVENTS = ResourceType(CORE_PATH, "events", "Event")
"""For reading events: the operator may list events only in this API group."""
EVENTS = ResourceType("/apis/events.k8s.io/v1", "events", "Event")
"""For creating events."""
NETWORK_POLICIES = ResourceType("/apis/networking.k8s.io/v1", "networkpolicies", "NetworkPolicy")
WORKLOADS = ResourceType("/apis/kueue.x-k8s.io/v1beta2", "workloads", "Workload")
"""Kueue's workloads, one for each RayCluster that waits in a queue or was admitted. Kueue 0.15 or newer serves this
version."""
LEASES = ResourceType("/apis/coordination.k8s.io/v1", "leases", "Lease")


@dataclass(frozen=True)
class Listing:
    """A listing of the objects of a kind, or one page of it."""

    items: tuple[JsonObject, ...]
    version: str
    """The resource version of the listing."""


class KubeObjects:
    """Reads and writes API objects. All methods raise KubeError; docstrings name the subclasses that callers handle."""

    def __init__(self, client: KubeClient, status_manager: str = FIELD_MANAGER) -> None:
        self._client = client
        self._status_manager = status_manager
        """The field manager of status patches."""

    async def get(self, kind: ResourceType, namespace: str, name: str) -> JsonObject:
        """Gets one object. Raises NotFoundError, or ResourceTypeMissingError if the server does not know the kind."""
        response = await self._client.request("GET", kind.path(namespace, name), resource=kind.plural)
        return _require_object(response, kind.kind, name)

    async def list_all(
        self, kind: ResourceType, namespace: str | None, *, labels: str = "", fields: str = ""
    ) -> tuple[JsonObject, ...]:
        """The objects of a kind in a namespace (None: in all), optionally by a label selector and a field selector.
        Raises ResourceTypeMissingError or ForbiddenError."""
        return (await self.listing(kind, namespace, labels=labels, fields=fields)).items

    async def listing(
        self, kind: ResourceType, namespace: str | None, *, labels: str = "", fields: str = ""
    ) -> Listing:
        """Like `list_all`, but also returns the resource version of the listing."""
        try:
            return await self._whole_listing(kind, namespace, labels, fields)
        except ExpiredError:
            # The listing took longer than the server keeps its snapshot.
            return await self._whole_listing(kind, namespace, labels, fields)

    async def pages(
        self,
        kind: ResourceType,
        namespace: str | None,
        *,
        labels: str = "",
        fields: str = "",
        only_metadata: bool = False,
    ) -> AsyncIterator[Listing]:
        """Like `listing`, but yields page by page, all from the same snapshot, so that one page at a time is in memory.
        Raises ExpiredError if the server no longer has the snapshot: then the listing must start again. With
        `only_metadata`, the objects have only their metadata."""
        accept, list_kind = (
            (METADATA_ONLY, "PartialObjectMetadataList") if only_metadata else (JSON, f"{kind.kind}List")
        )
        query = {name: text for name, text in (("labelSelector", labels), ("fieldSelector", fields)) if text}
        size = PAGE_SIZE
        while True:
            query["limit"] = str(size)
            try:
                page = await self._client.request(
                    "GET", kind.path(namespace), resource=kind.plural, query=query, accept=accept
                )
            except (TooLongError, TimedOutError) as error:
                # A server that answers no request at all is not asked again.
                if size == 1 or (isinstance(error, TimedOutError) and "continue" not in query):
                    raise
                size = max(1, size // 4)
                continue
            except ResourceTypeMissingError as error:
                await self._require_missing(kind, error)
                raise
            _require_list(page, list_kind)
            rest = text_at(page, "metadata", "continue")
            found = Listing(objects_at(page, "items"), text_at(page, "metadata", "resourceVersion"))
            # Nothing here refers to the page any more when the caller continues.
            del page
            yield found
            del found
            if not rest:
                return
            query["continue"] = rest

    async def create(self, kind: ResourceType, namespace: str, manifest: JsonObject) -> bool:
        """Creates an object; returns False if one with this name exists (it stays as it is). Raises RefusedError."""
        try:
            response = await self._client.request("POST", kind.path(namespace), resource=kind.plural, body=manifest)
        except AlreadyExistsError:
            return False
        _require_object(response, kind.kind, text_at(manifest, "metadata", "name"))
        return True

    async def create_strictly(self, kind: ResourceType, namespace: str, manifest: JsonObject) -> JsonObject:
        """Creates an object with strict field validation; returns it as stored. Raises AlreadyExistsError,
        UnknownFieldError or RefusedError."""
        response = await self._client.request(
            "POST", kind.path(namespace), resource=kind.plural, query={"fieldValidation": "Strict"}, body=manifest
        )
        return _require_object(response, kind.kind, text_at(manifest, "metadata", "name"))

    async def apply(self, kind: ResourceType, namespace: str, name: str, manifest: JsonObject) -> None:
        """Applies a manifest (server-side apply; overwrites fields of other field managers). Raises RefusedError."""
        response = await self._client.request(
            "PATCH",
            kind.path(namespace, name),
            resource=kind.plural,
            query={"fieldManager": FIELD_MANAGER, "force": "true"},
            body=manifest,
            content_type=APPLY_PATCH,
        )
        _require_object(response, kind.kind, name)

    async def replace(self, kind: ResourceType, namespace: str, name: str, manifest: JsonObject) -> None:
        """Replaces an object. Raises ConflictError if it was changed since the `resourceVersion` in the manifest, and
        NotFoundError if it was deleted."""
        response = await self._client.request("PUT", kind.path(namespace, name), resource=kind.plural, body=manifest)
        _require_object(response, kind.kind, name)

    async def patch_job_status(
        self, namespace: str, name: str, patch: Mapping[str, object], resource_version: str
    ) -> JsonObject:
        """Applies a merge patch to the job's status; returns the job as stored. Raises ConflictError if the job was
        changed since `resource_version`."""
        body = {"metadata": {"resourceVersion": resource_version}, "status": patch}
        path = f"{JOBS.path(namespace, name)}/status"
        response = await self._client.request(
            "PATCH",
            path,
            resource="rljobs/status",
            query={"fieldManager": self._status_manager},
            body=body,
            content_type=MERGE_PATCH,
        )
        return _require_object(response, JOBS.kind, name)

    async def delete(self, kind: ResourceType, namespace: str, name: str, uid: str, version: str = "") -> bool:
        """Deletes the object with this name and UID; Kubernetes then deletes what the object owns. Returns False if
        there is no such object. With a resource version, raises ConflictError if the object was changed since that
        version, or replaced by another one of the same name."""
        body = {
            "kind": "DeleteOptions",
            "apiVersion": "v1",
            "preconditions": {"uid": uid} | ({"resourceVersion": version} if version else {}),
            "propagationPolicy": "Background",
        }
        try:
            await self._client.request("DELETE", kind.path(namespace, name), resource=kind.plural, body=body)
        except NotFoundError:
            return False
        except ConflictError:
            if version:
                raise
            return False
        return True

    async def _require_missing(self, kind: ResourceType, error: ResourceTypeMissingError) -> None:
        """Returns if API discovery confirms that the kind is not installed. Raises UnavailableError if the kind exists,
        or if discovery responds with Not Found as well: `error` may then come from a proxy."""
        if kind.group_path == CORE_PATH:
            raise UnavailableError(str(error))
        try:
            is_served = await self._is_served(kind)
        except ResourceTypeMissingError:
            raise UnavailableError(str(error)) from None
        if is_served:
            raise UnavailableError(str(error))

    async def _is_served(self, kind: ResourceType) -> bool:
        """Whether API discovery lists the kind."""
        group, _, version = kind.group_path.removeprefix(f"{GROUPS_PATH}/").partition("/")
        groups = _require_list(await self._client.request("GET", GROUPS_PATH, resource="apis"), "APIGroupList")
        for each in objects_at(groups, "groups"):
            versions = [text_at(served, "version") for served in objects_at(each, "versions")]
            if text_at(each, "name") == group and version in versions:
                found = await self._client.request("GET", kind.group_path, resource="apis")
                resources = objects_at(_require_list(found, "APIResourceList"), "resources")
                return kind.plural in [text_at(resource, "name") for resource in resources]
        return False

    async def _whole_listing(self, kind: ResourceType, namespace: str | None, labels: str, fields: str) -> Listing:
        found: list[JsonObject] = []
        version = ""
        async for page in self.pages(kind, namespace, labels=labels, fields=fields):
            found += page.items
            version = page.version
        return Listing(tuple(found), version)


def merge_patch(old: JsonObject, new: JsonObject) -> dict[str, object]:
    """The smallest merge patch (RFC 7386) that changes `old` to `new`; empty if they are equal. A null in `old` or
    `new` counts as an absent field."""
    patch: dict[str, object] = {
        name: None for name, value in old.items() if value is not None and new.get(name) is None
    }
    for name, value in new.items():
        before = old.get(name)
        if value is None or value == before:
            continue
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            inner = merge_patch(before, value)
            if inner:
                patch[name] = inner
        else:
            patch[name] = value
    return patch


def without_nulls(document: JsonObject) -> JsonObject:
    """A JSON object without null fields, at any depth."""
    return {name: _without_nulls(value) for name, value in document.items() if value is not None}


def missing_fields(sent: JsonObject, stored: JsonObject, part: str = "spec") -> tuple[str, ...]:
    """Paths of the fields that were sent and are not stored, such as `spec.authOptions.secretName`. Changed values do
    not count as missing, nor do entries of lists whose length has changed. `part`: the field in which to search."""
    return tuple(_missing(part, sent.get(part), stored.get(part)))


def _without_nulls(value: object) -> object:
    if isinstance(value, Mapping):
        return without_nulls(value)
    return [_without_nulls(item) for item in value] if isinstance(value, list | tuple) else value


def _missing(path: str, sent: object, stored: object) -> list[str]:
    found: list[str] = []
    if isinstance(sent, Mapping):
        fields: Mapping[object, object] = stored if isinstance(stored, Mapping) else {}
        for name, value in sent.items():
            found += _missing(f"{path}.{name}", value, fields[name]) if name in fields else [f"{path}.{name}"]
    elif isinstance(sent, list) and isinstance(stored, list) and len(sent) == len(stored):
        for index, (value, stored_value) in enumerate(zip(sent, stored, strict=True)):
            found += _missing(f"{path}[{index}]", value, stored_value)
    return found


def _require_object(response: JsonObject, kind: str, name: str) -> JsonObject:
    """Returns the response if it is the requested object, otherwise raises UnavailableError."""
    seen_kind, seen_name = text_at(response, "kind"), text_at(response, "metadata", "name")
    if (seen_kind, seen_name) != (kind, name):
        raise UnavailableError(
            f"{kind} {name}: the response is not this object (seen: kind {seen_kind!r}, name {seen_name!r})"
        )
    return response


def _require_list(response: JsonObject, kind: str) -> JsonObject:
    """Returns the response if it is of this kind, such as `PodList`, otherwise raises UnavailableError."""
    seen_kind = text_at(response, "kind")
    if seen_kind != kind:
        raise UnavailableError(f"{kind}: the response is not such a list (seen: kind {seen_kind!r})")
    return response
