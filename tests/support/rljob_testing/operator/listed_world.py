"""The parts of the operator that list and watch, with an API server in memory and without kopf.

The tests use a job called `job`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from typing import cast

from rljob_operator.controller.reconcile_loop import JobKey
from rljob_operator.handlers.relist import NOT_CLEANED_UP, Relist
from rljob_operator.handlers.watch_events import WatchEventRouter
from rljob_operator.kube.allowed_calls import (
    CLUSTERS,
    JOBS,
    NETWORK_POLICIES,
    PODS,
    WORKLOADS,
    KubeObjects,
    Listing,
    ResourceType,
)
from rljob_operator.kube.cache import ObjectCache
from rljob_operator.kube.errors import ExpiredError, KubeError, NotFoundError, RefusedError
from rljob_operator.kube.server_history import ServerHistory
from rljob_operator.metrics import Metrics
from rljob_operator.raw_json import JsonObject, text_at
from rljob_operator.workqueue import WorkQueue
from rljob_testing.operator import manual_clock

KEY = JobKey("team", "job")
TOO_LONG = "x" * 300
"""A request that the status records as its hash."""
OVER: Mapping[str, object] = {
    "observedGeneration": 1,
    "result": {"outcome": "Failed", "reason": "Stalled", "at": "2026-01-31T11:59:00Z", "cleanedUpAt": "x"},
    "handledRequests": {"retry": "first"},
}
GOING: Mapping[str, object] = {
    "observedGeneration": 1,
    "result": {"outcome": "Failed", "reason": "Stalled", "at": "2026-01-31T11:59:00Z"},
    "conditions": [
        {"type": "Failed", "status": "True"},
        {"type": "ClusterReady", "status": "False", "reason": "Deleting"},
    ],
}


def job(status: Mapping[str, object], lifetime: int | None = None, version: int = 1, **metadata: object) -> JsonObject:
    """A job as stored; `lifetime` is in seconds after its end."""
    policy = {} if lifetime is None else {"ttlSecondsAfterFinished": lifetime}
    return {
        "metadata": {
            "name": "job",
            "namespace": "team",
            "uid": "j1",
            "generation": 1,
            "resourceVersion": str(version),
            **metadata,
        },
        "spec": {"runPolicy": policy},
        "status": status,
    }


def part(version: int, name: str = "job-1-head", uid: str = "p1", job_uid: str = "j1") -> JsonObject:
    """A cluster or a pod of the job."""
    labels = {"rljob.dev/job": "job", "rljob.dev/job-uid": job_uid}
    metadata = {"name": name, "namespace": "team", "uid": uid, "resourceVersion": str(version), "labels": labels}
    return {"metadata": metadata}


def retry(value: str) -> dict[str, object]:
    return {"annotations": {"rljob.dev/retry-requested-at": value}}


SELECTORS = {
    JOBS: "",
    CLUSTERS: "rljob.dev/job-uid",
    PODS: "rljob.dev/job-uid",
    WORKLOADS: "kueue.x-k8s.io/job-uid",
    NETWORK_POLICIES: "rljob.dev/job-uid in (j1)",
}


def workload(version: int, cluster: str = "c1", namespace: str = "team") -> JsonObject:
    """Kueue's workload of a RayCluster."""
    owner = {"kind": "RayCluster", "uid": cluster, "controller": True}
    labels = {"kueue.x-k8s.io/job-uid": cluster}
    metadata = {"name": "w", "namespace": namespace, "uid": "w1", "resourceVersion": str(version), "labels": labels}
    return {"metadata": {**metadata, "ownerReferences": [owner]}}


class ApiObjects:
    """Listings of the API server."""

    def __init__(self) -> None:
        self.objects: dict[ResourceType, Sequence[JsonObject]] = dict.fromkeys(SELECTORS, ())
        self.errors: dict[ResourceType, KubeError] = {}
        self.version = 10
        self.knows_field_selector = True
        self.expires_after_pages: int | None = None
        """After this number of pages, a listing expires once."""
        self.listed: list[str] = []
        """The kind and field selector of each listing, and kind, namespace and name of each object that was read."""

    async def pages(
        self,
        kind: ResourceType,
        namespace: str | None,
        *,
        labels: str = "",
        fields: str = "",
        only_metadata: bool = False,
    ) -> AsyncIterator[Listing]:
        """Yields pages of two objects."""
        assert (namespace, labels, only_metadata) == (None, SELECTORS[kind], kind == NETWORK_POLICIES)
        self.listed.append(f"{kind.plural} {fields}".strip())
        if kind in self.errors:
            raise self.errors[kind]
        assert fields in ("", NOT_CLEANED_UP)
        if fields and not self.knows_field_selector:
            raise RefusedError("field label not supported: status.result.cleanedUpAt")
        found = [raw for raw in self.objects[kind] if not fields or not text_at(raw, "status", "result", "cleanedUpAt")]
        for start in range(0, max(1, len(found)), 2):
            if self.expires_after_pages is not None and start >= 2 * self.expires_after_pages:
                self.expires_after_pages = None
                raise ExpiredError("the provided continue parameter is too old")
            yield Listing(tuple(found[start : start + 2]), str(self.version))

    async def get(self, kind: ResourceType, namespace: str, name: str) -> JsonObject:
        self.listed.append(f"{kind.plural} {namespace}/{name}")
        for raw in self.objects[kind]:
            if text_at(raw, "metadata", "name") == name:
                return raw
        raise NotFoundError(name)


class ListedWorld:
    """The parts that `handlers` need, without kopf."""

    def __init__(self) -> None:
        self.api = ApiObjects()
        self.cache = ObjectCache((None,))
        self.queue: WorkQueue[JobKey] = WorkQueue(lambda: 0.5, lambda key: key.namespace)
        clock = manual_clock.synchronized_clock(manual_clock.NOON)
        self.events = WatchEventRouter(self.cache, self.queue, clock.clock)
        self.num_new_kinds = 0
        objects = cast(KubeObjects, self.api)
        history = ServerHistory(self.cache)
        self.metrics = Metrics()
        self.relist = Relist(
            objects, (None,), self.cache, clock.ages, self.events, self._on_new_kind, self.metrics, history, kueue=True
        )

    def _on_new_kind(self) -> None:
        self.num_new_kinds += 1

    async def start(self) -> None:
        """The first two listings: of the jobs that are not cleaned up, and of all."""
        await self.relist.once()
        await self.relist.once()

    async def work(self) -> list[JobKey]:
        """Returns the keys that wait for work, and marks them as done."""
        found = []
        while self.queue.num_waiting:
            key = await self.queue.get()
            self.queue.done(key)
            found.append(key)
        return found


def run(test: Callable[[ListedWorld], Coroutine[None, None, None]]) -> None:
    async def made() -> None:
        await test(ListedWorld())

    asyncio.run(made())
