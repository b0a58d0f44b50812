"""Stop requests by signal. Before training starts, a signal stops the run immediately, because nothing would be lost.
During training, the first SIGINT or SIGTERM ends the training with a checkpoint, after the current step has finished or
was abandoned; a second SIGINT stops the run immediately."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType

RESEND_SECONDS = 0.05
"""Pause before a signal is sent again whose KeyboardInterrupt was dropped."""

UnraisableHook = Callable[["sys.UnraisableHookArgs"], object]


class StepAbandonedError(Exception):
    """A stop was requested, and the current step is abandoned before it has changed any state."""


class StopRequest:
    """Records whether a stop was requested."""

    def __init__(self) -> None:
        self.is_requested = False
        self.is_training = False
        """Set by the run when training starts."""

    def install(self) -> None:
        """Installs the handlers for SIGINT and SIGTERM."""
        signal.signal(signal.SIGINT, self._handle)
        signal.signal(signal.SIGTERM, self._handle)
        sys.unraisablehook = self._hook_before(sys.unraisablehook)

    def raise_if_requested(self) -> None:
        """Raises KeyboardInterrupt if a stop was requested. A library may have caught the KeyboardInterrupt of the
        signal handler."""
        if self.is_requested:
            raise KeyboardInterrupt

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        is_immediate = not self.is_training or (self.is_requested and number == signal.SIGINT)
        self.is_requested = True
        if is_immediate:
            raise KeyboardInterrupt

    def _hook_before(self, previous: UnraisableHook) -> UnraisableHook:
        """Returns a hook for exceptions that Python drops, because they were raised in a callback such as a fork hook
        or a finalizer. If a KeyboardInterrupt is dropped, the hook sends the signal again a moment later."""

        def hook(lost: sys.UnraisableHookArgs) -> None:
            if issubclass(lost.exc_type, KeyboardInterrupt) and self.is_requested:
                threading.Timer(RESEND_SECONDS, _interrupt_main_thread).start()
            else:
                previous(lost)

        return hook


def _interrupt_main_thread() -> None:
    """Sends SIGINT to the main thread, which also interrupts a system call there."""
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
