"""Reads Kubernetes events that explain why pods do not start or are not created.

If they cannot be read, messages have less detail, and the job goes on.
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
"""How long a response is remembered, to be returned if later requests fail."""
TIMEOUT_SECONDS = 5.0
LOG_INTERVAL_SECONDS = 60.0
"""Failures are logged at most once in this time."""
WARNINGS_ABOUT_PODS = "involvedObject.kind=Pod,type=Warning"

logger = logging.getLogger(__name__)


@dataclass
class _Answer:
    """The cached response to one query in one namespace."""

    events: tuple[JsonObject, ...] = ()
    asked_at: float = float("-inf")
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class ExplainingEvents:
    """Reads events for one process. If a request fails, the events of the last response are returned."""

    def __init__(self, objects: KubeObjects, clock: ServerClock) -> None:
        self._objects = objects
        self._clock = clock
        self._answers: dict[tuple[str, str], _Answer] = {}
        self._logged_at = float("-inf")

    async def of_pods(self, namespace: str) -> tuple[JsonObject, ...]:
        """All Warning events about pods of a namespace."""
        return await self._list(namespace, WARNINGS_ABOUT_PODS)

    async def of_cluster(self, namespace: str, uid: str) -> tuple[JsonObject, ...]:
        """All events about one RayCluster."""
        return await self._list(namespace, f"involvedObject.uid={uid}")

    async def _list(self, namespace: str, fields: str) -> tuple[JsonObject, ...]:
        now = self._clock.monotonic()
        self._answers = {
            key: answer
            for key, answer in self._answers.items()
            if answer.lock.locked() or _is_younger_than(answer, now, FORGOTTEN_AFTER_SECONDS)
        }
        answer = self._answers.setdefault((namespace, fields), _Answer())
        async with answer.lock:
            if not _is_younger_than(answer, self._clock.monotonic(), REUSED_SECONDS):
                try:
                    async with asyncio.timeout(TIMEOUT_SECONDS):
                        answer.events = await self._objects.list_all(CORE_EVENTS, namespace, fields=fields)
                except (KubeError, TimeoutError) as error:
                    self._log_failure(namespace, str(error) or f"timed out after {TIMEOUT_SECONDS:g} s")
                answer.asked_at = self._clock.monotonic()
            return answer.events

    def _log_failure(self, namespace: str, error: str) -> None:
        now = self._clock.monotonic()
        if now - self._logged_at >= LOG_INTERVAL_SECONDS:
            self._logged_at = now
            logger.warning(
                "cannot read the events of namespace %s: %s; messages about pods that do not start have less detail",
                namespace,
                error,
            )


def _is_younger_than(answer: _Answer, now: float, seconds: float) -> bool:
    return now - answer.asked_at < seconds


def by_pod(events: tuple[JsonObject, ...]) -> dict[str, list[JsonObject]]:
    """The events of each pod, by its UID."""
    found: dict[str, list[JsonObject]] = {}
    for event in events:
        found.setdefault(text_at(event, "involvedObject", "uid"), []).append(event)
    return found
