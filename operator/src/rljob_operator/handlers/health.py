"""Reports the operator's health: supervises its background tasks and serves the pages for probes and Prometheus.

The small HTTP server runs in the same event loop as the reconcile passes. If that loop hangs, the probe fails.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from rljob_operator.metrics import Metrics

REQUEST_SECONDS = 5.0
"""Time limit for reading a request."""
MAX_REQUEST_BYTES = 16 * 1024
PHRASES = {200: "OK", 404: "Not Found", 503: "Service Unavailable"}
"""Reason phrase by HTTP status."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Reply:
    """An HTTP response."""

    status: int
    text: bytes


class BackgroundTasks:
    """The background tasks that must not end while the operator is running."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def start(self, name: str, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Starts a task. If the task ends by itself, this is logged immediately."""
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(self._ended)
        self._tasks[name] = task
        return task

    def dead(self) -> list[str]:
        """Names of the tasks that have ended by themselves."""
        return [name for name, task in self._tasks.items() if task.done()]

    async def stop(self, name: str, patience_seconds: float = 0.0) -> None:
        """Ends a task: waits `patience_seconds` for it to end by itself, then cancels it."""
        task = self._tasks.pop(name, None)
        if task is None:
            return
        if patience_seconds:
            await asyncio.wait([task], timeout=patience_seconds)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.get_name() in self._tasks:
            logger.error("the task %s ended unexpectedly", task.get_name(), exc_info=task.exception())


def health_pages(tasks: BackgroundTasks) -> dict[str, Callable[[], Reply]]:
    """The pages for probes. They report success as long as no task has ended by itself."""

    def health() -> Reply:
        dead = tasks.dead()
        return Reply(503, f"ended: {', '.join(dead)}\n".encode()) if dead else Reply(200, b"ok\n")

    # A replica that waits for leadership is ready, too: it takes over when the leader stops.
    return {"/healthz": health, "/readyz": health}


def metrics_pages(metrics: Metrics) -> dict[str, Callable[[], Reply]]:
    """The page that Prometheus scrapes."""
    return {"/metrics": lambda: Reply(200, metrics.exposition())}


@asynccontextmanager
async def serving(port: int, pages: Mapping[str, Callable[[], Reply]]) -> AsyncIterator[None]:
    """Serves the pages, by path, for GET requests on all addresses of the pod; other requests get a 404. Raises OSError
    if the port is in use."""

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
            writer.write(_response(_reply(head, pages)))
            await writer.drain()
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(respond, None, port, limit=MAX_REQUEST_BYTES)
    try:
        yield
    finally:
        server.close()


def _reply(head: bytes, pages: Mapping[str, Callable[[], Reply]]) -> Reply:
    """The reply to a request. `head`: the request line and the headers."""
    words = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
    page = pages.get(words[1].partition("?")[0]) if len(words) == 3 and words[0] == "GET" else None
    return page() if page is not None else Reply(404, b"not found\n")


def _response(reply: Reply) -> bytes:
    head = (
        f"HTTP/1.1 {reply.status} {PHRASES[reply.status]}\r\nContent-Type: text/plain; charset=utf-8\r\n"
        f"Content-Length: {len(reply.text)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + reply.text
