"""Lists objects periodically: a watch event may be lost, but an unfinished job must not be forgotten.

Each minute the operator lists the jobs that are not cleaned up, their clusters and pods; all jobs only rarely, because
there may be many finished ones. Each page of a listing is stored in the cache before the next one is requested, so that
one page at a time is in memory.

Listings fill the cache, and the operator starts to work after the first one, which has only the jobs that are not
cleaned up. If an object is deleted between the first listing and the start of the watches, no event reports the
deletion. But a watch first reports all objects that exist. So if an object of the first listing was not reported within
`SECOND_LISTING_AFTER_SECONDS`, everything is listed again. If the watches start even later, the next regular listing
finds the deletion.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

from rljob_api.conditions import ALARMS, Reason
from rljob_api.constants import LABEL_JOB_UID, PHASE_BEFORE_STATUS
from rljob_api.v1alpha1.pools import QUEUE_LABEL
from rljob_operator.controller.reconcile_loop import JobKey
from rljob_operator.handlers.watch_events import WatchEventRouter
from rljob_operator.kube.allowed_calls import (
    CLUSTERS,
    JOBS,
    NETWORK_POLICIES,
    PODS,
    WORKLOADS,
    KubeObjects,
    ResourceType,
)
from rljob_operator.kube.cache import DELETED, ObjectCache
from rljob_operator.kube.errors import (
    ExpiredError,
    ForbiddenError,
    KubeError,
    NotFoundError,
    RefusedError,
    ResourceTypeMissingError,
)
from rljob_operator.kube.projections import LABEL_CLUSTER_UID, job_uid
from rljob_operator.kube.server_clock import Ages
from rljob_operator.kube.server_history import ServerHistory
from rljob_operator.manifests.naming import companion_name
from rljob_operator.metrics import Metrics
from rljob_operator.raw_json import JsonObject, at, text_at

SECOND_LISTING_AFTER_SECONDS = 5.0
"""Seconds from the first listing to the check whether a second one is needed. Usually the watches have started by then.
"""
RELIST_SECONDS = 60.0
"""Seconds between two listings."""
ALL_JOBS_SECONDS = 900.0
"""Seconds between two listings of all jobs, if the API server can list only the jobs that are not cleaned up."""
NOT_CLEANED_UP = "status.result.cleanedUpAt="
"""Field selector for jobs that are not cleaned up: the field is empty or absent. API servers before 1.31 have no
field selectors for RLJobs, and reject it."""
OBJECTS_PER_SECOND = 100.0
"""Limit of listed objects per second: if a listing has more than 6,000 objects, the next one is later."""
JOBS_PER_REQUEST = 50
"""For how many jobs network policies are listed in one request: the selector has their UIDs, and URLs are limited."""
INCOMPLETE_SECONDS = 5.0
"""Seconds between two listings while a kind is not installed or may not be listed; more with more than 500 objects."""
AFTER_FAILURE_SECONDS = 5.0
"""Pause after a failed listing."""
FIRST_FAILURE_SECONDS = 1.0
"""Pause after a failed listing as long as none has succeeded. It is shorter, because the operator does nothing before
the first listing."""

logger = logging.getLogger(__name__)


class Relist:
    """Lists jobs, clusters and pods, with `kueue` also Kueue's workloads, and with `network_policies` the names of the
    policies of jobs that have a cluster. `on_new_kind` is called when a kind can be listed and its
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
        *,
        kueue: bool = False,
        network_policies: bool = True,
    ) -> None:
        self._objects = objects
        self._namespaces = namespaces
        self._cache = cache
        self._ages = ages
        self._events = events
        self._on_new_kind = on_new_kind
        self._metrics = metrics
        self._history = history
        self._kueue = kueue
        self._network_policies = network_policies
        self._missing: set[ResourceType] = set()
        self._forbidden: set[tuple[ResourceType, str | None]] = set()
        self._all_jobs_due_at = float("-inf")
        """When to list all jobs the next time (time of the event loop)."""
        self._are_policies_unknown = False
        """Whether the last listing of network policies has failed."""
        self._num_listed = 0
        """Number of objects in the newest listings of all kinds."""

    async def run(self) -> None:
        """Lists objects again and again, until this call is cancelled."""
        is_first = True
        while True:
            try:
                await self.once()
                if is_first:
                    is_first = False
                    await asyncio.sleep(SECOND_LISTING_AFTER_SECONDS)
                    are_all_listed = asyncio.get_running_loop().time() < self._all_jobs_due_at
                    if not self._events.have_reported_all() or not are_all_listed:
                        continue
                await asyncio.sleep(self._pause_seconds())
            except KubeError as error:
                pause = AFTER_FAILURE_SECONDS if self._cache.is_complete else FIRST_FAILURE_SECONDS
                logger.warning("cannot list all objects: %s; retry in %.0f s", error, pause)
                await asyncio.sleep(pause)

    async def once(self) -> None:
        """Lists once, updates the cache, and queues the jobs that need a pass once the cache is complete. Raises
        KubeError."""
        missing_before = set(self._missing)
        self._num_listed = 0
        if self._kueue:
            await self._list_workloads()
        # List pods and clusters before jobs: a job exists before its pods and clusters, so the listing of jobs has it.
        await self._list(PODS, LABEL_JOB_UID)
        await self._list(CLUSTERS, LABEL_JOB_UID)
        are_all_listed, deleted_jobs = await self._list_jobs()
        if self._network_policies:
            await self._find_deleted_policies()
        self._ages.keep_only(self._cache.uids())
        jobs = self._cache.jobs()
        self._metrics.set_jobs(Counter(text_at(job, "status", "phase") or PHASE_BEFORE_STATUS for job in jobs))
        self._metrics.set_alarms(Counter(reason for job in jobs for reason in _alarms_of(job)))
        if missing_before - self._missing:
            self._on_new_kind()
        if not self._cache.is_complete:
            return
        for job in deleted_jobs:
            self._events.on_job_deleted(_key(job))
        for job in jobs if are_all_listed else self._cache.unfinished_jobs():
            self._events.on_listed_job(job)
        self._events.on_listed_clusters()

    def _pause_seconds(self) -> float:
        is_incomplete = any(kind != WORKLOADS for kind in (*self._missing, *(kind for kind, _ in self._forbidden)))
        seconds = INCOMPLETE_SECONDS if is_incomplete else RELIST_SECONDS
        return max(seconds, self._num_listed / OBJECTS_PER_SECOND)

    async def _list_jobs(self) -> tuple[bool, list[JsonObject]]:
        """Lists the jobs that are not cleaned up, or all jobs if this is due, or if there is no other way. Returns
        whether all were listed, and the jobs that no longer exist."""
        now = asyncio.get_running_loop().time()
        may_be_unlisted = JOBS in self._missing or any(kind == JOBS for kind, _ in self._forbidden)
        # After the start, the jobs that need the operator come first, however many have finished.
        if not may_be_unlisted and (now < self._all_jobs_due_at or not self._cache.is_complete):
            # The listing of all jobs reports these two errors.
            with suppress(RefusedError, ResourceTypeMissingError):
                return False, await self._list_jobs_not_cleaned_up()
        deleted = await self._list(JOBS)
        self._all_jobs_due_at = now + max(ALL_JOBS_SECONDS, self._num_listed / OBJECTS_PER_SECOND)
        return True, deleted

    async def _list_jobs_not_cleaned_up(self) -> list[JsonObject]:
        """Updates the cache with the jobs that are not cleaned up. Returns the jobs that no longer exist."""
        deleted: list[JsonObject] = []
        for namespace in self._namespaces:
            found, version = await self._list_pages(JOBS, namespace, fields=NOT_CLEANED_UP)
            self._cache.note_unfinished_jobs_listed(namespace)
            for job in self._cache.unlisted_jobs(namespace, found, version):
                # It was deleted, or cleaned up a moment ago.
                try:
                    self._cache.store(JOBS, "", await self._objects.get(JOBS, *_key(job)))
                except NotFoundError:
                    if self._cache.store(JOBS, DELETED, job):
                        deleted.append(job)
        return deleted

    async def _list_workloads(self) -> None:
        """Lists Kueue's workloads. Jobs do not depend on them: a failure is logged and the last listing stays."""
        try:
            await self._list(WORKLOADS, LABEL_CLUSTER_UID)
        except KubeError as error:
            logger.warning("cannot list Kueue's workloads: %s; jobs in a queue show an older state", error)

    async def _find_deleted_policies(self) -> None:
        """Finds the RayClusters whose network policy was deleted. Lists only the policies of jobs that have a cluster:
        those of finished jobs exist, too. If this fails, the policies count as existing."""
        # A policy is created before its cluster, so the policies of these clusters exist when they are listed.
        clusters = [raw for raw in self._cache.clusters() if not text_at(raw, "metadata", "deletionTimestamp")]
        found: set[tuple[str, str]] = set()
        try:
            for namespace in self._namespaces:
                jobs = sorted({job_uid(raw) for raw in clusters if namespace in (None, _key(raw)[0])} - {""})
                for start in range(0, len(jobs), JOBS_PER_REQUEST):
                    selector = f"{LABEL_JOB_UID} in ({','.join(jobs[start : start + JOBS_PER_REQUEST])})"
                    pages = self._objects.pages(NETWORK_POLICIES, namespace, labels=selector, only_metadata=True)
                    async for page in pages:
                        found |= {_key(raw) for raw in page.items}
        except KubeError as error:
            if not self._are_policies_unknown:
                logger.warning("cannot list the network policies of jobs: %s; deleted ones are restored later", error)
            self._are_policies_unknown = True
            return
        self._are_policies_unknown = False
        self._cache.note_clusters_without_policy(
            text_at(raw, "metadata", "uid")
            for raw in clusters
            if (_key(raw)[0], companion_name(_key(raw)[1], job_uid(raw))) not in found
        )

    async def _list(self, kind: ResourceType, labels: str = "") -> list[JsonObject]:
        """Updates the cache with listings of a kind in all namespaces. Returns the objects that it removed from the
        cache because they are no longer listed; none if the kind is not installed. `labels`: a label selector."""
        deleted: list[JsonObject] = []
        for namespace in self._namespaces:
            try:
                found, version = await self._list_pages(kind, namespace, labels)
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
            deleted += self._cache.complete_listing(kind, namespace, found, version)
        if kind in self._missing:
            logger.info("the resource %s is now installed", kind.plural)
        self._missing.discard(kind)
        return deleted

    async def _list_pages(
        self, kind: ResourceType, namespace: str | None, labels: str = "", fields: str = ""
    ) -> tuple[set[tuple[str, str]], str]:
        """Stores the pages of a listing in the cache. Returns the namespaces and names of the listed objects, and the
        resource version of the listing."""
        for is_last_try in (False, True):
            found: set[tuple[str, str]] = set()
            version = problem = ""
            try:
                async for page in self._objects.pages(kind, namespace, labels=labels, fields=fields):
                    problem = problem or self._history.contradiction(kind, namespace, page.items, page.version)
                    found |= self._cache.add_listed(kind, page.items)
                    version = page.version
                    del page
            except ExpiredError:
                # The listing took longer than the server keeps its snapshot.
                if is_last_try:
                    raise
                continue
            break
        self._history.record(kind, namespace, version, problem)
        self._num_listed += len(found)
        return found, version

    def _note_missing(self, kind: ResourceType) -> None:
        if kind == WORKLOADS and kind not in self._missing:
            logger.warning(
                "Kueue is not installed, or older than 0.15 (the API server does not serve %s); jobs with the label %s"
                " wait until it is installed, all others run; install Kueue, or set kueue.enabled=false in the values"
                " of the operator's Helm chart",
                kind.path(None),
                QUEUE_LABEL,
            )
        elif kind not in self._missing:
            logger.warning(
                "the resource %s is not installed; jobs wait until KubeRay and the CustomResourceDefinition of RLJobs"
                " are installed",
                kind.plural,
            )
        self._missing.add(kind)
        self._cache.note_missing(kind)


def _alarms_of(job: JsonObject) -> set[str]:
    """The alarms of a job that trains: one that waits or has finished keeps its alarms, but nobody needs to act.
    Unknown alarms count as OtherAlarm: trainers are not trusted, and each name would become a label of a metric."""
    found = at(job, "status", "alarms")
    if not isinstance(found, list) or text_at(job, "status", "phase") != "Running":
        return set()
    return {reason if reason in ALARMS else Reason.OTHER_ALARM.value for reason in found}


def _key(raw: JsonObject) -> JobKey:
    """Namespace and name of a job or another object."""
    return JobKey(text_at(raw, "metadata", "namespace"), text_at(raw, "metadata", "name"))
