"""The operator's client of Ray dashboards, at work in a test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager

from rljob_operator.metrics import Metrics
from rljob_operator.ray.client import Dashboard, RayClient

TOKEN = "a" * 64


def run(test: Callable[[], Coroutine[None, None, None]]) -> None:
    """In a loop of its own, with a limit."""

    async def limited() -> None:
        async with asyncio.timeout(240):
            await test()

    asyncio.run(limited())


@asynccontextmanager
async def dashboard(port: int, *tokens: str) -> AsyncIterator[Dashboard]:
    """That of a port of this machine."""
    async with RayClient(Metrics()) as client:
        yield client.dashboard(f"http://127.0.0.1:{port}", tokens)
