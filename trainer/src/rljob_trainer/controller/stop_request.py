"""Asking a run to stop. Before training begins a signal stops at once, for nothing would be lost; afterwards SIGINT or
SIGTERM once finishes the step and saves, and SIGINT twice stops at once."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType

SECONDS_TO_TRY_AGAIN = 0.05

UnraisableHook = Callable[["sys.UnraisableHookArgs"], object]


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
        sys.unraisablehook = self._hook_after(sys.unraisablehook)

    def raise_if_requested(self) -> None:
        """Raises KeyboardInterrupt where the one that the signal raised was lost in somebody else's code."""
        if self.is_requested:
            raise KeyboardInterrupt

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        at_once = not self.is_training or (self.is_requested and number == signal.SIGINT)
        self.is_requested = True
        if at_once:
            raise KeyboardInterrupt

    def _hook_after(self, others: UnraisableHook) -> UnraisableHook:
        """Python drops what is raised while it runs a callback (of a fork, of an object's end): the stop then comes
        again a moment later, when it runs something else."""

        def hook(lost: sys.UnraisableHookArgs) -> None:
            if issubclass(lost.exc_type, KeyboardInterrupt) and self.is_requested:
                threading.Timer(SECONDS_TO_TRY_AGAIN, _interrupt_main_thread).start()
            else:
                others(lost)

        return hook


def _interrupt_main_thread() -> None:
    """Also where it waits in a system call."""
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
