"""Whether the operator is well: the parts that must not end, and the pages that probes and Prometheus read."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine

from rljob_operator.handlers.http_pages import Reply
from rljob_operator.metrics import Metrics

logger = logging.getLogger(__name__)


class Parts:
    """The tasks that must not end while the operator works."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def start(self, name: str, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Runs a part; how it ends is logged at once."""
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(self._ended)
        self._tasks[name] = task
        return task

    def dead(self) -> list[str]:
        """Names of parts that have ended."""
        return [name for name, task in self._tasks.items() if task.done()]

    async def stop(self, name: str, patience_seconds: float = 0.0) -> None:
        """Ends a part: by itself within its patience, else it is cancelled."""
        task = self._tasks.pop(name, None)
        if task is None:
            return
        if patience_seconds:
            await asyncio.wait([task], timeout=patience_seconds)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.get_name() in self._tasks:
            logger.error("%s ended, but must not", task.get_name(), exc_info=task.exception())


def health_pages(parts: Parts) -> dict[str, Callable[[], Reply]]:
    """Answers to probes: well while no part has ended."""

    def health() -> Reply:
        dead = parts.dead()
        return Reply(503, f"ended: {', '.join(dead)}\n".encode()) if dead else Reply(200, b"ok\n")

    # A replica that waits to lead is ready too: it is what takes over.
    return {"/healthz": health, "/readyz": health}


def metrics_pages(metrics: Metrics) -> dict[str, Callable[[], Reply]]:
    """What Prometheus reads."""
    return {"/metrics": lambda: Reply(200, metrics.exposition())}
