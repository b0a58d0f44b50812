"""Looks at all jobs now and then, whatever the watches say: an event may be lost, an unfinished job may not."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable

from rljob_api.conditions import ConditionType
from rljob_api.constants import LABEL_JOB
from rljob_operator.controller.loop import JobKey
from rljob_operator.kube.errors import KubeError, ResourceTypeMissingError
from rljob_operator.kube.objects import CLUSTERS, JOBS, KubeObjects, ResourceType
from rljob_operator.metrics import Metrics
from rljob_operator.raw_json import JsonObject, objects_at, text_at

RELIST_SECONDS = 60.0
MISSING_KIND_SECONDS = 5.0
AFTER_FAILURE_SECONDS = 5.0
LATCHED = {ConditionType.COMPLETE.value, ConditionType.FAILED.value}
CLUSTER_READY = ConditionType.CLUSTER_READY.value

logger = logging.getLogger(__name__)


class Relist:
    """`on_key` is called for each job that is not over; `on_new_kind` when there are RLJobs or RayClusters now, which
    there were not before: no watch begins by itself for a kind that the API server did not know."""

    def __init__(
        self,
        objects: KubeObjects,
        namespaces: tuple[str, ...],
        on_key: Callable[[JobKey], None],
        on_new_kind: Callable[[], None],
        metrics: Metrics,
    ) -> None:
        self._objects = objects
        self._namespaces: tuple[str | None, ...] = namespaces or (None,)
        self._on_key = on_key
        self._on_new_kind = on_new_kind
        self._metrics = metrics
        self._missing: set[ResourceType] = set()

    async def run(self) -> None:
        """Relists until it is cancelled."""
        while True:
            try:
                await self.once()
                await asyncio.sleep(MISSING_KIND_SECONDS if self._missing else RELIST_SECONDS)
            except KubeError as error:
                logger.warning("relist: %s", error)
                await asyncio.sleep(AFTER_FAILURE_SECONDS)

    async def once(self) -> None:
        """One look at everything. Raises KubeError."""
        missing_before = set(self._missing)
        # Clusters of jobs that are over too: they may have to go.
        clusters = await self._all(CLUSTERS, LABEL_JOB)
        jobs = await self._all(JOBS)
        if missing_before - self._missing:
            self._on_new_kind()
        self._metrics.set_jobs(Counter(text_at(job, "status", "phase") or "New" for job in jobs))
        of_clusters = {_key(cluster, text_at(cluster, "metadata", "labels", LABEL_JOB)) for cluster in clusters}
        unfinished = {_key(job, text_at(job, "metadata", "name")) for job in jobs if not _is_over(job)}
        for key in sorted(of_clusters | unfinished):
            self._on_key(key)

    async def _all(self, kind: ResourceType, labels: str = "") -> list[JsonObject]:
        """The objects of a kind, if the API server knows it."""
        try:
            found = [
                each
                for namespace in self._namespaces
                for each in await self._objects.list_all(kind, namespace, labels=labels)
            ]
        except ResourceTypeMissingError:
            if kind not in self._missing:
                logger.warning("there is no resource %s; jobs wait until it is installed", kind.plural)
            self._missing.add(kind)
            return []
        if kind in self._missing:
            logger.info("there is a resource %s now", kind.plural)
        self._missing.discard(kind)
        return found


def _key(raw: JsonObject, job: str) -> JobKey:
    return JobKey(text_at(raw, "metadata", "namespace"), job)


def _is_over(job: JsonObject) -> bool:
    """Whether it has ended and says that its cluster is gone."""
    conditions = objects_at(job, "status", "conditions")
    true = {text_at(each, "type") for each in conditions if text_at(each, "status") == "True"}
    return bool(true & LATCHED) and CLUSTER_READY not in true
