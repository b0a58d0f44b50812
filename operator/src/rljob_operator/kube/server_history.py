"""Notices that the API server's storage was restored from a backup, so the cache has states that no longer exist.

Resource versions only grow, and the cache relies on this: it keeps the newer of two states, and reads that are older
than the cache are rejected. After a restore, both would go wrong for ever. So the operator then ends, and starts again
with an empty cache.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from rljob_operator.errors import OperatorError
from rljob_operator.kube.allowed_calls import ResourceType
from rljob_operator.kube.cache import ObjectCache, version_number
from rljob_operator.raw_json import JsonObject, text_at

CONFIRM_SECONDS = 30.0
"""Shortest time between two contradicting listings until the storage counts as restored. A single one may be a stale
response, for example of a proxy."""

logger = logging.getLogger(__name__)


class StorageRestoredError(OperatorError):
    """The API server's storage was restored from a backup; the operator must start again with an empty cache."""


class ServerHistory:
    """Compares each listing with the cache and the listing before. For one event loop."""

    def __init__(self, cache: ObjectCache) -> None:
        self._cache = cache
        self._newest: dict[tuple[ResourceType, str | None], int] = {}
        """The newest version of a listing, by kind and namespace."""
        self._doubted_since: dict[tuple[ResourceType, str | None], float] = {}
        """When the listings began to contradict the earlier ones, without a break (time of the event loop)."""
        self._restored = asyncio.Event()
        self._message = ""

    def contradiction(
        self, kind: ResourceType, namespace: str | None, listed: Iterable[JsonObject], version: str
    ) -> str:
        """What cannot be true of a page of a listing if no storage was restored; empty if nothing contradicts what was
        seen before. Must be called before the cache stores the page. `version`: the resource version of the listing."""
        newest, listed_at = self._newest.get((kind, namespace), -1), version_number(version)
        if 0 <= listed_at < newest:
            return f"{kind.plural} are listed at version {listed_at}, and were listed at {newest} before"
        for raw in listed:
            # A restore may raise the version of the storage, but not those of its objects.
            known = self._cache.version(kind, raw)
            if version_number(text_at(raw, "metadata", "resourceVersion")) < known <= listed_at:
                name = f"{text_at(raw, 'metadata', 'namespace')}/{text_at(raw, 'metadata', 'name')}"
                return f"{kind.kind} {name} had version {known} before, and is listed at {listed_at} with an older one"
        return ""

    def record(self, kind: ResourceType, namespace: str | None, version: str, problem: str) -> None:
        """Records a whole listing. `problem`: the first contradiction of its pages."""
        where = (kind, namespace)
        self._newest[where] = max(self._newest.get(where, -1), version_number(version))
        if not problem:
            self._doubted_since.pop(where, None)
            return
        now = asyncio.get_running_loop().time()
        since = self._doubted_since.setdefault(where, now)
        logger.warning("stale listing, or the API server's storage was restored from a backup: %s", problem)
        if now - since >= CONFIRM_SECONDS:
            self._message = f"the API server's storage was restored from a backup ({problem}); starting again"
            self._restored.set()

    async def restored(self) -> None:
        """Waits until the storage was certainly restored, then raises StorageRestoredError."""
        await self._restored.wait()
        raise StorageRestoredError(self._message)
