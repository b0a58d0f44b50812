"""Lists everything now and then, whatever the watches say: an event may be lost, an unfinished job may not.

What is listed goes to the cache, and with the first listing the operator begins to work. No event tells of what is
deleted between that listing and the beginning of the watches. But a watch begins with all that is there: where nothing
was heard of an object, everything is listed again soon.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable

from rljob_api.constants import LABEL_JOB_UID
from rljob_operator.controller.loop import JobKey
from rljob_operator.handlers.news import News
from rljob_operator.kube.cache import ObjectCache
from rljob_operator.kube.errors import ForbiddenError, KubeError, ResourceTypeMissingError
from rljob_operator.kube.objects import CLUSTERS, JOBS, PODS, KubeObjects, ResourceType
from rljob_operator.kube.server_clock import Ages
from rljob_operator.metrics import Metrics
from rljob_operator.raw_json import JsonObject, text_at

SECOND_SECONDS = 5.0
"""After the first listing: in this time the watches begin."""
RELIST_SECONDS = 60.0
OBJECTS_PER_SECOND = 100.0
"""With more than six thousand objects, all are listed less often."""
INCOMPLETE_SECONDS = 5.0
"""Where a kind is not installed, or may not be listed."""
AFTER_FAILURE_SECONDS = 5.0
FIRST_FAILURE_SECONDS = 1.0
"""Nothing is worked on before everything was listed once."""

logger = logging.getLogger(__name__)


class Relist:
    """`on_new_kind` is called when there are RLJobs or RayClusters now, which there were not before: no watch
    begins by itself for a kind that the API server did not know."""

    def __init__(
        self,
        objects: KubeObjects,
        namespaces: tuple[str | None, ...],
        cache: ObjectCache,
        ages: Ages,
        news: News,
        on_new_kind: Callable[[], None],
        metrics: Metrics,
    ) -> None:
        self._objects = objects
        self._namespaces = namespaces
        self._cache = cache
        self._ages = ages
        self._news = news
        self._on_new_kind = on_new_kind
        self._metrics = metrics
        self._missing: set[ResourceType] = set()
        self._forbidden: set[tuple[ResourceType, str | None]] = set()

    async def run(self) -> None:
        """Relists until it is cancelled."""
        is_first = True
        while True:
            try:
                await self.once()
                if is_first:
                    is_first = False
                    await asyncio.sleep(SECOND_SECONDS)
                    if not self._news.has_heard_of_all():
                        continue
                await asyncio.sleep(self._pause_seconds())
            except KubeError as error:
                logger.warning("relist: %s", error)
                await asyncio.sleep(AFTER_FAILURE_SECONDS if self._cache.is_complete else FIRST_FAILURE_SECONDS)

    async def once(self) -> None:
        """One look at everything. Raises KubeError."""
        missing_before = set(self._missing)
        gone: list[JsonObject] = []
        # What belongs to jobs first: what is listed has its job listed after it, if there is one.
        gone += await self._list(PODS, LABEL_JOB_UID)
        gone += await self._list(CLUSTERS, LABEL_JOB_UID)
        gone_jobs = await self._list(JOBS)
        self._ages.keep_only(self._cache.uids())
        jobs = self._cache.jobs()
        self._metrics.set_jobs(Counter(text_at(job, "status", "phase") or "New" for job in jobs))
        if missing_before - self._missing:
            self._on_new_kind()
        if not self._cache.is_complete:
            return
        for job in gone_jobs:
            self._news.on_gone(JobKey(text_at(job, "metadata", "namespace"), text_at(job, "metadata", "name")))
        for part in gone:
            self._news.on_part(part)
        for job in jobs:
            self._news.on_listed(job)
        self._news.on_listed_clusters()

    def _pause_seconds(self) -> float:
        if self._missing or self._forbidden:
            return INCOMPLETE_SECONDS
        return max(RELIST_SECONDS, self._cache.num_objects / OBJECTS_PER_SECOND)

    async def _list(self, kind: ResourceType, labels: str = "") -> list[JsonObject]:
        """Brings the cache up to date with a kind; returns what was in it and is gone."""
        gone: list[JsonObject] = []
        for namespace in self._namespaces:
            try:
                listing = await self._objects.listing(kind, namespace, labels=labels)
            except ResourceTypeMissingError:
                self._note_missing(kind)
                return []
            except ForbiddenError as error:
                if (kind, namespace) not in self._forbidden:
                    logger.error(
                        "%s cannot be listed: %s; give the operator the rights of its chart", kind.plural, error
                    )
                self._forbidden.add((kind, namespace))
                self._cache.note_forbidden(kind, namespace, str(error))
                continue
            self._forbidden.discard((kind, namespace))
            gone += self._cache.replace(kind, namespace, listing.items, listing.version)
        if kind in self._missing:
            logger.info("there is a resource %s now", kind.plural)
        self._missing.discard(kind)
        return gone

    def _note_missing(self, kind: ResourceType) -> None:
        if kind not in self._missing:
            logger.warning("there is no resource %s; jobs wait until it is installed", kind.plural)
        self._missing.add(kind)
        self._cache.note_missing(kind)
