"""Reads Kubernetes events that explain why pods do not start or are not created.

If the events cannot be read, messages about the job have less detail, and the job continues.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

from rljob_operator.kube.allowed_calls import CORE_EVENTS, KubeObjects
from rljob_operator.kube.errors import KubeError
from rljob_operator.kube.server_clock import ServerClock
from rljob_operator.raw_json import JsonObject, text_at

REUSED_SECONDS = 5.0
"""How long a response, or the failure of a request, is reused: all jobs of a namespace share one request."""
FORGOTTEN_AFTER_SECONDS = 60.0
"""How long a response is kept after the last request for the same events, to be returned if the next request fails."""
TIMEOUT_SECONDS = 5.0
LOG_INTERVAL_SECONDS = 60.0
"""Failures are logged at most once in this time."""
WARNINGS_ABOUT_PODS = "involvedObject.kind=Pod,type=Warning"
"""Field selector for events of type Warning about pods."""

logger = logging.getLogger(__name__)


@dataclass
class _CachedEvents:
    """The newest response with one field selector in one namespace."""

    events: tuple[JsonObject, ...] = ()
    request_ended_at: float = float("-inf")
    """When the newest request succeeded or failed (monotonic seconds)."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held during a request, so that all jobs of a namespace wait for the same request."""


class ExplainingEvents:
    """Reads events for one process. If a request fails, the events of the last response are returned; none if there was
    no response."""

    def __init__(self, objects: KubeObjects, clock: ServerClock) -> None:
        self._objects = objects
        self._clock = clock
        self._cached: dict[tuple[str, str], _CachedEvents] = {}
        """By namespace and field selector."""
        self._logged_at = float("-inf")

    async def of_pods(self, namespace: str) -> tuple[JsonObject, ...]:
        """All Warning events about pods of a namespace."""
        return await self._list(namespace, WARNINGS_ABOUT_PODS)

    async def of_cluster(self, namespace: str, uid: str) -> tuple[JsonObject, ...]:
        """All events about one RayCluster."""
        return await self._list(namespace, f"involvedObject.uid={uid}")

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
                        cached.events = await self._objects.list_all(CORE_EVENTS, namespace, fields=fields)
                except (KubeError, TimeoutError) as error:
                    self._log_failure(namespace, str(error) or f"timed out after {TIMEOUT_SECONDS:g} s")
                cached.request_ended_at = self._clock.monotonic()
            return cached.events

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
