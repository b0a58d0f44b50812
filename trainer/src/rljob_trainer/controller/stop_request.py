"""Asking a run to stop: SIGINT or SIGTERM once finishes the step and saves; SIGINT twice stops at once."""

from __future__ import annotations

import signal
from types import FrameType


class StopRequest:
    """Whether the run was asked to stop."""

    def __init__(self) -> None:
        self.is_requested = False

    def install(self) -> None:
        """Takes over SIGINT and SIGTERM of this process."""
        signal.signal(signal.SIGINT, self._handle)
        signal.signal(signal.SIGTERM, self._handle)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.is_requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.is_requested = True
