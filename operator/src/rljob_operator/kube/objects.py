"""The objects that the operator reads and makes: one method for each thing that its role allows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rljob_api.constants import API_GROUP, API_VERSION
from rljob_operator.kube.client import MERGE_PATCH, KubeClient
from rljob_operator.kube.errors import AlreadyExistsError, ConflictError, NotFoundError
from rljob_operator.raw_json import JsonObject, objects_at, text_at

PAGE_SIZE = 500


@dataclass(frozen=True)
class ResourceType:
    """A kind of object, and where the API server has it."""

    group_path: str
    plural: str

    def path(self, namespace: str | None, name: str = "") -> str:
        """Of the objects in a namespace (None: in all), or of one of them."""
        parts = [self.group_path, *(("namespaces", namespace) if namespace else ()), self.plural]
        return "/".join([*parts, name] if name else parts)


JOBS = ResourceType(f"/apis/{API_GROUP}/{API_VERSION}", "rljobs")
CLUSTERS = ResourceType("/apis/ray.io/v1", "rayclusters")
PODS = ResourceType("/api/v1", "pods")
SECRETS = ResourceType("/api/v1", "secrets")
CORE_EVENTS = ResourceType("/api/v1", "events")
EVENTS = ResourceType("/apis/events.k8s.io/v1", "events")
NETWORK_POLICIES = ResourceType("/apis/networking.k8s.io/v1", "networkpolicies")
LEASES = ResourceType("/apis/coordination.k8s.io/v1", "leases")


class KubeObjects:
    """All methods raise KubeError; which ones matter is said where it does."""

    def __init__(self, client: KubeClient) -> None:
        self._client = client

    async def get(self, kind: ResourceType, namespace: str, name: str) -> JsonObject:
        """One object. Raises NotFoundError, or ResourceTypeMissingError where its kind is unknown."""
        return await self._client.request("GET", kind.path(namespace, name), resource=kind.plural)

    async def list_all(
        self, kind: ResourceType, namespace: str | None, *, labels: str = "", fields: str = ""
    ) -> tuple[JsonObject, ...]:
        """All objects, by selectors. Raises ResourceTypeMissingError."""
        query = {"limit": str(PAGE_SIZE)}
        if labels:
            query["labelSelector"] = labels
        if fields:
            query["fieldSelector"] = fields
        found: list[JsonObject] = []
        while True:
            page = await self._client.request("GET", kind.path(namespace), resource=kind.plural, query=query)
            found += objects_at(page, "items")
            rest = text_at(page, "metadata", "continue")
            if not rest:
                return tuple(found)
            query["continue"] = rest

    async def create(self, kind: ResourceType, namespace: str, manifest: JsonObject) -> bool:
        """Creates an object; False where one of this name exists, which is left as it is. Raises RefusedError."""
        try:
            await self._client.request("POST", kind.path(namespace), resource=kind.plural, body=manifest)
        except AlreadyExistsError:
            return False
        return True

    async def replace(self, kind: ResourceType, namespace: str, name: str, manifest: JsonObject) -> None:
        """Writes an object that was read before. Raises ConflictError where it was changed since."""
        await self._client.request("PUT", kind.path(namespace, name), resource=kind.plural, body=manifest)

    async def patch_job_status(
        self, namespace: str, name: str, patch: Mapping[str, object], resource_version: str
    ) -> None:
        """Merges into the job's status. Raises ConflictError where the job was changed since that version."""
        body = {"metadata": {"resourceVersion": resource_version}, "status": patch}
        path = f"{JOBS.path(namespace, name)}/status"
        await self._client.request("PATCH", path, resource="rljobs/status", body=body, content_type=MERGE_PATCH)

    async def delete_cluster(self, namespace: str, name: str, uid: str) -> bool:
        """Deletes a RayCluster if it is the one with this UID; False where it is not there."""
        body = {"kind": "DeleteOptions", "apiVersion": "v1", "preconditions": {"uid": uid}}
        try:
            await self._client.request("DELETE", CLUSTERS.path(namespace, name), resource=CLUSTERS.plural, body=body)
        except (NotFoundError, ConflictError):
            return False
        return True
