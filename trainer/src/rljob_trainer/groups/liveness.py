"""Watches worker processes while nobody waits for them, so that a death is known within seconds.

A call that is under way learns of the death of its own ranks from Ray. The watch is for all others: a call to one group
should not go on for minutes when a process of another group is gone. Ray learns of a process at once, of a node that is
lost or frozen by its health checks (see `session`).
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
"""(rank, what Ray says) -> the error that names the rank, where it ran, and the cause."""


def end_watches() -> None:
    """Closes all watches of this process, before the connection to Ray is closed: their calls would open another."""
    for watch in list(_RUNNING):
        watch.close()


class LivenessWatch:
    """One thread with a call under way to every process: it is answered between two other calls, or fails."""

    def __init__(self, handles: list[ActorHandle], error_of: MakeError) -> None:
        self._handles = handles
        self._error_of = error_of
        self._is_closed = threading.Event()
        self._error: WorkerDiedError | None = None
        self._thread = threading.Thread(target=self._run, name="liveness", daemon=True)
        _RUNNING.add(self)
        self._thread.start()

    def raise_if_dead(self) -> None:
        """Raises WorkerDiedError for the process whose death was seen first."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Stops watching. What dies from here on is not reported."""
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
                    # It does not answer now. Whether it is gone is for Ray to find out: it is asked again until then.
                    continue
                except RayError as error:
                    self._error = self._error or self._error_of(rank, error)
            self._is_closed.wait(INTERVAL_SECONDS)
