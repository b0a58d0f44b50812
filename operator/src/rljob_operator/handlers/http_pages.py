"""A very small HTTP server for probes and metrics. It runs in the loop that does the work: if that hangs, it is
silent, and the probe fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

READ_SECONDS = 5.0
MAX_REQUEST_BYTES = 16 * 1024
PHRASES = {200: "OK", 404: "Not Found", 503: "Service Unavailable"}


@dataclass(frozen=True)
class Reply:
    """What is answered."""

    status: int
    text: bytes


@asynccontextmanager
async def serving(port: int, pages: Mapping[str, Callable[[], Reply]]) -> AsyncIterator[None]:
    """Answers GET requests for the paths of `pages` on all addresses. Raises OSError if the port is taken."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(READ_SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
            writer.write(_response(_reply(head, pages)))
            await writer.drain()
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(answer, None, port, limit=MAX_REQUEST_BYTES)
    try:
        yield
    finally:
        server.close()


def _reply(head: bytes, pages: Mapping[str, Callable[[], Reply]]) -> Reply:
    words = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
    page = pages.get(words[1].partition("?")[0]) if len(words) == 3 and words[0] == "GET" else None
    return page() if page is not None else Reply(404, b"not here\n")


def _response(reply: Reply) -> bytes:
    head = (
        f"HTTP/1.1 {reply.status} {PHRASES[reply.status]}\r\nContent-Type: text/plain; charset=utf-8\r\n"
        f"Content-Length: {len(reply.text)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + reply.text
