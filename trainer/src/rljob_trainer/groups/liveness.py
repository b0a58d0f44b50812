"""Monitors all worker processes in the background, so that a death is detected within seconds.

For the ranks of a pending call Ray reports a death itself. This watch covers all other processes: a call to one group
should not run for minutes after a process of another group has died. Ray detects a dead process immediately, and a lost
or frozen node by its health checks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from weakref import WeakSet

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, RayError

from rljob_trainer.errors import WorkerDiedError

INTERVAL_SECONDS = 1.0

_RUNNING: WeakSet[LivenessWatch] = WeakSet()

MakeError = Callable[[int, RayError], WorkerDiedError]
"""(rank, Ray's error) -> the error that names the rank, where it ran, and the cause."""


def end_watches() -> None:
    """Closes all watches of this process. Call it before closing the connection to Ray: a ping after that would open a
    new connection."""
    for watch in list(_RUNNING):
        watch.close()


class LivenessWatch:
    """A thread that keeps a pending ping to every process. A process responds to the ping between two other calls. If
    the process is dead, the ping fails."""

    def __init__(self, handles: list[ActorHandle], error_of: MakeError) -> None:
        self._handles = handles
        self._error_of = error_of
        self._is_closed = threading.Event()
        self._error: WorkerDiedError | None = None
        self._thread = threading.Thread(target=self._run, name="liveness", daemon=True)
        _RUNNING.add(self)
        self._thread.start()

    def raise_if_dead(self) -> None:
        """Raises WorkerDiedError for the process whose death was detected first."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Stops the watch. Later deaths are not reported."""
        self._is_closed.set()
        self._thread.join()

    def _run(self) -> None:
        pings: dict[ray.ObjectRef, int] = {}
        while not self._is_closed.is_set() and self._error is None and ray.is_initialized():
            waiting = set(pings.values())
            for rank, handle in enumerate(self._handles):
                if rank not in waiting:
                    pings[handle.ping.remote()] = rank
            references = list(pings)
            answered, _ = ray.wait(references, num_returns=len(references), timeout=0, fetch_local=False)
            for reference in answered:
                rank = pings.pop(reference)
                try:
                    ray.get(reference)
                except ActorUnavailableError:
                    # The process does not respond at the moment. Ping again until Ray knows whether it is dead.
                    continue
                except RayError as error:
                    self._error = self._error or self._error_of(rank, error)
            self._is_closed.wait(INTERVAL_SECONDS)
