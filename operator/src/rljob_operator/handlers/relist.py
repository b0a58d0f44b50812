"""Lists all objects periodically: a watch event may be lost, but an unfinished job must not be forgotten.

Listings fill the cache, and the operator starts to work after the first one. If an object is deleted between the first
listing and the start of the watches, no event reports the deletion. But a watch first reports all objects that exist.
So if an object of the first listing was not reported within `SECOND_LISTING_AFTER_SECONDS`, everything is listed again.
If the watches start even later, the next regular listing finds the deletion.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable

from rljob_api.constants import LABEL_JOB_UID, PHASE_BEFORE_STATUS
from rljob_operator.controller.reconcile_loop import JobKey
from rljob_operator.handlers.watch_events import WatchEventRouter
from rljob_operator.kube.allowed_calls import CLUSTERS, JOBS, PODS, KubeObjects, ResourceType
from rljob_operator.kube.cache import ObjectCache
from rljob_operator.kube.errors import ForbiddenError, KubeError, ResourceTypeMissingError
from rljob_operator.kube.server_clock import Ages
from rljob_operator.kube.server_history import ServerHistory
from rljob_operator.metrics import Metrics
from rljob_operator.raw_json import JsonObject, text_at

SECOND_LISTING_AFTER_SECONDS = 5.0
"""Seconds from the first listing to the check whether a second one is needed. Usually the watches have started by then.
"""
RELIST_SECONDS = 60.0
"""Seconds between two listings."""
OBJECTS_PER_SECOND = 100.0
"""Limit of listed objects per second: with more than 6,000 objects, listings are less frequent."""
INCOMPLETE_SECONDS = 5.0
"""Seconds between two listings while a kind is not installed or may not be listed; more with more than 500 objects."""
AFTER_FAILURE_SECONDS = 5.0
"""Pause after a failed listing."""
FIRST_FAILURE_SECONDS = 1.0
"""Pause after a failed listing as long as none has succeeded. It is shorter, because the operator does nothing before
the first listing."""

logger = logging.getLogger(__name__)


class Relist:
    """Lists jobs, clusters and pods. `on_new_kind` is called when RLJobs or RayClusters can be listed and their
    CustomResourceDefinition was missing before: no watch starts by itself for a kind that is installed later."""

    def __init__(
        self,
        objects: KubeObjects,
        namespaces: tuple[str | None, ...],
        cache: ObjectCache,
        ages: Ages,
        events: WatchEventRouter,
        on_new_kind: Callable[[], None],
        metrics: Metrics,
        history: ServerHistory,
    ) -> None:
        self._objects = objects
        self._namespaces = namespaces
        self._cache = cache
        self._ages = ages
        self._events = events
        self._on_new_kind = on_new_kind
        self._metrics = metrics
        self._history = history
        self._missing: set[ResourceType] = set()
        self._forbidden: set[tuple[ResourceType, str | None]] = set()

    async def run(self) -> None:
        """Lists everything again and again, until this call is cancelled."""
        is_first = True
        while True:
            try:
                await self.once()
                if is_first:
                    is_first = False
                    await asyncio.sleep(SECOND_LISTING_AFTER_SECONDS)
                    if not self._events.have_reported_all():
                        continue
                await asyncio.sleep(self._pause_seconds())
            except KubeError as error:
                pause = AFTER_FAILURE_SECONDS if self._cache.is_complete else FIRST_FAILURE_SECONDS
                logger.warning("cannot list all objects: %s; retry in %.0f s", error, pause)
                await asyncio.sleep(pause)

    async def once(self) -> None:
        """Lists everything once, updates the cache, and queues the jobs that need a pass once the cache is complete.
        Raises KubeError."""
        missing_before = set(self._missing)
        # List pods and clusters before jobs: a job exists before its pods and clusters, so the listing of jobs has it.
        await self._list(PODS, LABEL_JOB_UID)
        await self._list(CLUSTERS, LABEL_JOB_UID)
        deleted_jobs = await self._list(JOBS)
        self._ages.keep_only(self._cache.uids())
        jobs = self._cache.jobs()
        self._metrics.set_jobs(Counter(text_at(job, "status", "phase") or PHASE_BEFORE_STATUS for job in jobs))
        if missing_before - self._missing:
            self._on_new_kind()
        if not self._cache.is_complete:
            return
        for job in deleted_jobs:
            self._events.on_job_deleted(JobKey(text_at(job, "metadata", "namespace"), text_at(job, "metadata", "name")))
        for job in jobs:
            self._events.on_listed_job(job)
        self._events.on_listed_clusters()

    def _pause_seconds(self) -> float:
        seconds = INCOMPLETE_SECONDS if self._missing or self._forbidden else RELIST_SECONDS
        return max(seconds, self._cache.num_objects / OBJECTS_PER_SECOND)

    async def _list(self, kind: ResourceType, labels: str = "") -> list[JsonObject]:
        """Updates the cache with listings of a kind in all namespaces. Returns the objects that it removed from the
        cache because they are no longer listed; none if the kind is not installed. `labels`: a label selector."""
        deleted: list[JsonObject] = []
        for namespace in self._namespaces:
            try:
                listing = await self._objects.listing(kind, namespace, labels=labels)
            except ResourceTypeMissingError:
                self._note_missing(kind)
                return []
            except ForbiddenError as error:
                if (kind, namespace) not in self._forbidden:
                    logger.error(
                        "%s cannot be listed: %s; give the operator the role of its Helm chart", kind.plural, error
                    )
                self._forbidden.add((kind, namespace))
                self._cache.note_forbidden(kind, namespace, str(error))
                continue
            self._forbidden.discard((kind, namespace))
            self._history.check(kind, namespace, listing.items, listing.version)
            deleted += self._cache.replace(kind, namespace, listing.items, listing.version)
        if kind in self._missing:
            logger.info("the resource %s is now installed", kind.plural)
        self._missing.discard(kind)
        return deleted

    def _note_missing(self, kind: ResourceType) -> None:
        if kind not in self._missing:
            logger.warning(
                "the resource %s is not installed; jobs wait until KubeRay and the CustomResourceDefinition of RLJobs"
                " are installed",
                kind.plural,
            )
        self._missing.add(kind)
        self._cache.note_missing(kind)
