"""Looks at all jobs now and then, whatever the watches say: an event may be lost, an unfinished job may not."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable

from rljob_api.conditions import ConditionType
from rljob_api.contract import LABEL_JOB
from rljob_operator.controller.loop import JobKey
from rljob_operator.kube.errors import KubeError, ResourceTypeMissingError
from rljob_operator.kube.objects import CLUSTERS, JOBS, KubeObjects
from rljob_operator.metrics import Metrics
from rljob_operator.raw_json import JsonObject, objects_at, text_at

RELIST_SECONDS = 60.0
WITHOUT_KUBERAY_SECONDS = 5.0
AFTER_FAILURE_SECONDS = 5.0
LATCHED = {ConditionType.COMPLETE.value, ConditionType.FAILED.value}
CLUSTER_READY = ConditionType.CLUSTER_READY.value

logger = logging.getLogger(__name__)


class Relist:
    """`on_key` is called for each job that is not over; `on_kuberay` when KubeRay's resource has appeared."""

    def __init__(
        self,
        objects: KubeObjects,
        namespaces: tuple[str, ...],
        on_key: Callable[[JobKey], None],
        on_kuberay: Callable[[], None],
        metrics: Metrics,
    ) -> None:
        self._objects = objects
        self._namespaces: tuple[str | None, ...] = namespaces or (None,)
        self._on_key = on_key
        self._on_kuberay = on_kuberay
        self._metrics = metrics
        self._has_kuberay: bool | None = None

    async def run(self) -> None:
        """Relists until it is cancelled."""
        while True:
            try:
                await self.once()
                await asyncio.sleep(RELIST_SECONDS if self._has_kuberay else WITHOUT_KUBERAY_SECONDS)
            except KubeError as error:
                logger.warning("relist: %s", error)
                await asyncio.sleep(AFTER_FAILURE_SECONDS)

    async def once(self) -> None:
        """One look at everything. Raises KubeError."""
        clusters = await self._clusters()
        jobs = [job for namespace in self._namespaces for job in await self._objects.list_all(JOBS, namespace)]
        self._metrics.set_jobs(Counter(text_at(job, "status", "phase") or "New" for job in jobs))
        of_clusters = {_key(cluster, text_at(cluster, "metadata", "labels", LABEL_JOB)) for cluster in clusters}
        unfinished = {_key(job, text_at(job, "metadata", "name")) for job in jobs if not _is_over(job)}
        for key in sorted(of_clusters | unfinished):
            self._on_key(key)

    async def _clusters(self) -> list[JsonObject]:
        """Clusters of jobs. Those of jobs that are over are among them: they may have to go."""
        try:
            found = [
                cluster
                for namespace in self._namespaces
                for cluster in await self._objects.list_all(CLUSTERS, namespace, labels=LABEL_JOB)
            ]
        except ResourceTypeMissingError:
            if self._has_kuberay is not False:
                logger.warning("KubeRay is not installed: jobs wait until there are RayClusters")
            self._has_kuberay = False
            return []
        if self._has_kuberay is False:
            logger.info("KubeRay is there now")
            self._on_kuberay()
        self._has_kuberay = True
        return found


def _key(raw: JsonObject, job: str) -> JobKey:
    return JobKey(text_at(raw, "metadata", "namespace"), job)


def _is_over(job: JsonObject) -> bool:
    """Whether it has ended and says that its cluster is gone."""
    conditions = objects_at(job, "status", "conditions")
    true = {text_at(each, "type") for each in conditions if text_at(each, "status") == "True"}
    return bool(true & LATCHED) and CLUSTER_READY not in true
