"""Time limits of tests: of a coroutine, and one that is not used up while the machine stands still."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine


def run_with_time_limit(test: Callable[[], Coroutine[None, None, None]], seconds: float = 240.0) -> None:
    """Runs a coroutine in a new event loop. Raises TimeoutError when it takes too long."""

    async def limited() -> None:
        async with asyncio.timeout(seconds):
            await test()

    asyncio.run(limited())


class RunningClock:
    """Counts the seconds in which this process runs, and not those in which the machine stands still."""

    def __init__(self) -> None:
        self.seconds = 0.0
        threading.Thread(target=self._tick, daemon=True).start()

    def _tick(self) -> None:
        while True:
            began = time.monotonic()
            time.sleep(0.1)
            self.seconds += min(0.5, time.monotonic() - began)
