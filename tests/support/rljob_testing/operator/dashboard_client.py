"""The operator's client of Ray dashboards, for tests."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rljob_operator.metrics import Metrics
from rljob_operator.ray.client import Dashboard, RayClient
from rljob_operator.ray.run_watcher import RunWatcher
from rljob_operator.reconcile.observed import ObservedRay

TOKEN = "a" * 64


@asynccontextmanager
async def connected(port: int, *tokens: str) -> AsyncIterator[Dashboard]:
    """The client of a dashboard on a port of this machine."""
    async with RayClient(Metrics()) as client:
        yield client.dashboard(f"http://127.0.0.1:{port}", tokens)


async def observe_without_memory(found: Dashboard, submission_id: str | None) -> ObservedRay:
    """Observes a dashboard without the memory of earlier polls."""
    return await RunWatcher(time.monotonic).observe("job", found, submission_id)
