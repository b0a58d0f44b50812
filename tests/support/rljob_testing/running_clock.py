"""Limits of time that a machine which stands still, or is short of cores, does not use up."""

from __future__ import annotations

import threading
import time


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
