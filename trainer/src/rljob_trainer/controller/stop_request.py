"""Asking a run to stop. Before training begins a signal stops at once, for nothing would be lost; afterwards SIGINT or
SIGTERM once finishes the step and saves, and SIGINT twice stops at once."""

from __future__ import annotations

import signal
from types import FrameType


class StepAbandonedError(Exception):
    """The run is asked to stop, and what was begun is given up: nothing has been changed by it yet."""


class StopRequest:
    """Whether the run was asked to stop."""

    def __init__(self) -> None:
        self.is_requested = False
        self.is_training = False

    def install(self) -> None:
        """Takes over SIGINT and SIGTERM of this process."""
        signal.signal(signal.SIGINT, self._handle)
        signal.signal(signal.SIGTERM, self._handle)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        at_once = not self.is_training or (self.is_requested and number == signal.SIGINT)
        self.is_requested = True
        if at_once:
            raise KeyboardInterrupt
