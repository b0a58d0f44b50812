"""Leading, in a thread with a loop and a connection of its own: however much work waits, the Lease is renewed."""

from __future__ import annotations

import asyncio
import logging
import threading
from contextlib import suppress

from rljob_operator.handlers.leadership import Leadership, LeadershipLostError
from rljob_operator.kube.client import KubeClient
from rljob_operator.kube.connection import load_connection
from rljob_operator.kube.objects import KubeObjects
from rljob_operator.kube.server_clock import ServerClock
from rljob_operator.metrics import Metrics
from rljob_operator.settings import Settings

RELEASE_SECONDS = 5.0

logger = logging.getLogger(__name__)


class LeaseThread:
    """For the loop that makes it, but for `may_act`, which any thread may ask."""

    def __init__(self, settings: Settings, metrics: Metrics, clock: ServerClock) -> None:
        self._settings = settings
        self._metrics = metrics
        self._clock = clock
        self._ours = asyncio.get_running_loop()
        self._leads: asyncio.Future[None] = self._ours.create_future()
        self._ended: asyncio.Future[None] = self._ours.create_future()
        self._leadership: Leadership | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._told: asyncio.Event | None = None
        self._is_stopped = False

    def start(self) -> None:
        """Begins to wait for leadership."""
        # A daemon: a request that hangs must not keep the process from its end.
        threading.Thread(target=self._live, name="lease", daemon=True).start()

    async def acquired(self) -> None:
        """Returns when this replica leads. Raises what keeps the thread from its work."""
        await asyncio.wait([self._leads, self._ended], return_when=asyncio.FIRST_COMPLETED)
        if not self._leads.done():
            await self._ended

    async def lost(self) -> None:
        """Raises LeadershipLostError when it does not lead any more."""
        await asyncio.shield(self._ended)

    def may_act(self) -> bool:
        """Whether this replica leads for sure."""
        return self._leadership is not None and self._leadership.is_certain

    async def stop(self) -> None:
        """Gives the Lease back, if this replica holds it. Only when nothing works any more here."""
        self._is_stopped = True
        if self._loop is not None and self._told is not None:
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._told.set)
            await asyncio.wait([self._ended], timeout=RELEASE_SECONDS)

    def _live(self) -> None:
        error: BaseException | None = None
        try:
            asyncio.run(self._lead())
        except LeadershipLostError as lost:
            error = lost
        except Exception as mistake:
            logger.exception("the lease is not renewed any more")
            error = mistake
        self._tell(self._ended, error)

    async def _lead(self) -> None:
        self._loop, self._told = asyncio.get_running_loop(), asyncio.Event()
        if self._is_stopped:
            return
        settings = self._settings
        connection = await load_connection(settings.kubeconfig)
        async with KubeClient(connection, self._metrics, self._clock) as client:
            objects = KubeObjects(client)
            leadership = Leadership(
                objects, self._clock, settings.pod_namespace, settings.lease_name, settings.pod_name
            )
            work = asyncio.create_task(self._hold(leadership))
            waiter = asyncio.create_task(self._told.wait())
            await asyncio.wait([work, waiter], return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                waiter.cancel()
                await work
                return
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            await leadership.release()

    async def _hold(self, leadership: Leadership) -> None:
        await leadership.acquire()
        self._leadership = leadership
        self._tell(self._leads, None)
        await leadership.hold()

    def _tell(self, future: asyncio.Future[None], error: BaseException | None) -> None:
        def settle() -> None:
            if future.done():
                return
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)

        # Nobody waits any more where the process is about to end.
        with suppress(RuntimeError):
            self._ours.call_soon_threadsafe(settle)
