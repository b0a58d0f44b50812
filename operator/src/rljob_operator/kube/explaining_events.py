"""Reads Kubernetes events that explain why pods do not start or are not created.

If the events cannot be read, messages about the job have less detail, and the job continues.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass, field

from rljob_operator.kube.allowed_calls import CORE_EVENTS, KubeObjects
from rljob_operator.kube.errors import ExpiredError, KubeError
from rljob_operator.kube.observed_objects import INVALID_CLUSTER_EVENTS, event_time
from rljob_operator.kube.pod_problems import EVENT_REASONS
from rljob_operator.kube.projections import projected
from rljob_operator.kube.server_clock import ServerClock
from rljob_operator.raw_json import JsonObject, text_at

REUSED_SECONDS = 30.0
"""How long a response, or the failure of a request, is reused: all jobs of a namespace share one request."""
FORGOTTEN_AFTER_SECONDS = 60.0
"""How long a response is kept after the last request for the same events, to be returned if the next request fails."""
TIMEOUT_SECONDS = 5.0
LOG_INTERVAL_SECONDS = 600.0
"""Failures are logged at most once in this time."""
WARNINGS_ABOUT_PODS = "involvedObject.kind=Pod,type=Warning"
"""Field selector for events of type Warning about pods."""
WARNINGS_ABOUT_CLUSTERS = "involvedObject.kind=RayCluster,type=Warning"
MAX_PAGES = 8
"""How many pages of a listing are read. Everybody in a namespace may create any number of events."""
REASONS = frozenset((*EVENT_REASONS, *INVALID_CLUSTER_EVENTS))
"""Reasons of the events that are kept."""

logger = logging.getLogger(__name__)


@dataclass
class _CachedEvents:
    """The newest response with one field selector in one namespace."""

    events: tuple[JsonObject, ...] = ()
    """The newest of `REASONS` about each object."""
    request_ended_at: float = float("-inf")
    """When the newest request succeeded or failed (monotonic seconds)."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held during a request, so that all jobs of a namespace wait for the same request."""


class ExplainingEvents:
    """Reads events for one process, for each object the newest one that explains something. If a request fails, the
    events of the last response are returned; none if there was no response."""

    def __init__(self, objects: KubeObjects, clock: ServerClock) -> None:
        self._objects = objects
        self._clock = clock
        self._cached: dict[tuple[str, str], _CachedEvents] = {}
        """By namespace and field selector."""
        self._logged_at = float("-inf")

    async def of_pods(self, namespace: str) -> tuple[JsonObject, ...]:
        """The events that explain problems of pods in a namespace."""
        return await self._list(namespace, WARNINGS_ABOUT_PODS)

    async def of_cluster(self, namespace: str, uid: str) -> tuple[JsonObject, ...]:
        """The event that explains why KubeRay rejects a RayCluster; empty if there is none."""
        events = await self._list(namespace, WARNINGS_ABOUT_CLUSTERS)
        return tuple(event for event in events if text_at(event, "involvedObject", "uid") == uid)

    async def _list(self, namespace: str, fields: str) -> tuple[JsonObject, ...]:
        now = self._clock.monotonic()
        self._cached = {
            key: cached
            for key, cached in self._cached.items()
            if cached.lock.locked() or _is_younger_than(cached, now, FORGOTTEN_AFTER_SECONDS)
        }
        cached = self._cached.setdefault((namespace, fields), _CachedEvents())
        async with cached.lock:
            if not _is_younger_than(cached, self._clock.monotonic(), REUSED_SECONDS):
                try:
                    async with asyncio.timeout(TIMEOUT_SECONDS):
                        cached.events = await self._newest(namespace, fields)
                except (KubeError, TimeoutError) as error:
                    self._log_failure(namespace, str(error) or f"timed out after {TIMEOUT_SECONDS:g} s")
                cached.request_ended_at = self._clock.monotonic()
            return cached.events

    async def _newest(self, namespace: str, fields: str) -> tuple[JsonObject, ...]:
        """The newest event with one of `REASONS` about each object, in the first `MAX_PAGES` pages of a listing."""
        newest: dict[str, JsonObject] = {}
        num_pages = 0
        with suppress(ExpiredError):
            async for page in self._objects.pages(CORE_EVENTS, namespace, fields=fields):
                for event in page.items:
                    uid = text_at(event, "involvedObject", "uid")
                    if text_at(event, "reason") in REASONS and event_time(event) >= event_time(newest.get(uid, {})):
                        newest[uid] = projected(CORE_EVENTS, event)
                num_pages += 1
                if num_pages == MAX_PAGES:
                    break
        return tuple(newest.values())

    def _log_failure(self, namespace: str, error: str) -> None:
        now = self._clock.monotonic()
        if now - self._logged_at >= LOG_INTERVAL_SECONDS:
            self._logged_at = now
            logger.warning(
                "cannot read the events of namespace %s: %s; messages about pods that do not start have less detail",
                namespace,
                error,
            )


def _is_younger_than(cached: _CachedEvents, now: float, seconds: float) -> bool:
    return now - cached.request_ended_at < seconds


def by_pod(events: tuple[JsonObject, ...]) -> dict[str, list[JsonObject]]:
    """The events of each pod, by the UID of the pod."""
    found: dict[str, list[JsonObject]] = {}
    for event in events:
        found.setdefault(text_at(event, "involvedObject", "uid"), []).append(event)
    return found
