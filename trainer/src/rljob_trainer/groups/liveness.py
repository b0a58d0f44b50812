"""Monitors all worker processes in the background, so that the death of a process is detected within seconds.

For the ranks of a pending call, Ray reports a death itself. The watch is for the processes of the pool that do not take
part in the call: without it, the call could run for minutes after one of them has died. Ray detects a dead process
immediately, and a lost or frozen node later, by its health checks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from weakref import WeakSet

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, RayError

from rljob_trainer.errors import WorkerDiedError

PING_INTERVAL_SECONDS = 1.0
"""The time between two checks of the pending pings."""

_WATCHES: WeakSet[LivenessWatch] = WeakSet()

MakeError = Callable[[int, RayError], WorkerDiedError]
"""(rank, Ray's error) -> an error that names the rank, where it ran, and the cause of its death."""


def end_watches() -> None:
    """Closes all watches of this process. Call it before the connection to Ray is closed: a later ping would open a new
    connection."""
    for watch in list(_WATCHES):
        watch.close()


class LivenessWatch:
    """A thread with one pending ping to each process of a pool. A process answers the ping between two other calls. If
    the process is dead, the ping fails, and the watch ends."""

    def __init__(self, handles: list[ActorHandle], make_error: MakeError) -> None:
        """Starts the watch. `handles`: the Ray actors, by rank."""
        self._handles = handles
        self._make_error = make_error
        self._is_closed = threading.Event()
        self._error: WorkerDiedError | None = None
        self._thread = threading.Thread(target=self._run, name="liveness", daemon=True)
        _WATCHES.add(self)
        self._thread.start()

    def raise_if_dead(self) -> None:
        """Raises WorkerDiedError if a process has died: for the one whose death was detected first."""
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
                    self._error = self._error or self._make_error(rank, error)
            self._is_closed.wait(PING_INTERVAL_SECONDS)
