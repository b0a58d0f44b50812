"""Leader election: one replica works, the others wait, by a Lease.

kubernetes.aio's own election is not used (37.0.2): it ends for good when the API server cannot be reached once, waits
for requests without a limit, so that two replicas can believe to lead, and does not give the Lease back.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from contextlib import suppress
from dataclasses import dataclass

from rljob_operator.errors import OperatorError
from rljob_operator.kube.client import KubeClient
from rljob_operator.kube.connection import load_connection
from rljob_operator.kube.errors import AlreadyExistsError, ConflictError, KubeError, NotFoundError
from rljob_operator.kube.objects import LEASES, KubeObjects
from rljob_operator.kube.server_clock import ServerClock
from rljob_operator.metrics import Metrics
from rljob_operator.raw_json import JsonObject, integer_at, object_at, text_at
from rljob_operator.settings import Settings

LEASE_SECONDS = 15
"""A holder that has not renewed for so long is taken for dead."""
RENEW_SECONDS = 10.0
"""A leader that could not renew for so long stops; others wait longer than that."""
RETRY_SECONDS = 2.0
RELEASE_SECONDS = 5.0

logger = logging.getLogger(__name__)


class LeadershipLostError(OperatorError):
    """Another replica may lead by now."""


class LeaseThread:
    """Leading, in a thread with a loop and a connection of its own: however much work waits, the Lease is renewed. For
    the loop that makes it, but for `may_act`, which any thread may ask."""

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


class Leadership:
    """This replica's part. `identity`: its pod's name, so that a container that is restarted goes on at once."""

    def __init__(self, objects: KubeObjects, clock: ServerClock, namespace: str, name: str, identity: str) -> None:
        self._lease = Lease(objects, clock, namespace, name)
        self._clock = clock
        self._name = name
        self._identity = identity
        self._seen: LeaseRecord | None = None
        self._seen_at = 0.0
        self._renewed_at = -math.inf
        """When the newest renewal that came back was sent."""

    @property
    def is_certain(self) -> bool:
        """Whether no other replica can lead by now. May be asked by any thread; one that was stopped for a while, and
        goes on before the lease is looked at again, is told the truth."""
        return self._clock.monotonic() - self._renewed_at < RENEW_SECONDS

    async def acquire(self) -> None:
        """Waits until this replica leads."""
        told = ""
        while True:
            try:
                if await self._try():
                    logger.info("leading as %s", self._identity)
                    return
                holder = self._seen.holder if self._seen is not None else ""
                if holder != told:
                    told = holder
                    logger.info("waiting: %s leads", holder)
            except (KubeError, TimeoutError) as error:
                logger.warning("lease: %s", str(error) or "no answer in time")
            await asyncio.sleep(RETRY_SECONDS)

    async def hold(self) -> None:
        """Renews for ever. Raises LeadershipLostError when that has not worked for `RENEW_SECONDS`."""
        if self._renewed_at == -math.inf:
            self._renewed_at = self._clock.monotonic()
        while True:
            await asyncio.sleep(RETRY_SECONDS)
            rest = self._renewed_at + RENEW_SECONDS - self._clock.monotonic()
            try:
                async with asyncio.timeout(max(0.0, rest)):
                    if not await self._try() and self._seen is not None and self._seen.holder != self._identity:
                        raise LeadershipLostError(f"lease {self._name}: {self._seen.holder or 'nobody'} holds it")
            except (KubeError, TimeoutError) as error:
                logger.warning("lease: %s", str(error) or "no answer in time")
            if not self.is_certain:
                raise LeadershipLostError(f"lease {self._name}: could not be renewed for {RENEW_SECONDS:g} s")

    async def release(self) -> None:
        """Lets another replica lead at once. Only when nothing works any more here."""
        try:
            before = await self._lease.read()
            if before is not None and before.holder == self._identity:
                await self._lease.write("", 1, before)
        except KubeError as error:
            logger.warning("lease: not given back: %s", error)

    async def _try(self) -> bool:
        """Whether this replica holds the Lease now, after taking or renewing it where that is allowed."""
        found = await self._lease.read()
        now = self._clock.monotonic()
        if found is None or found != self._seen:
            self._seen, self._seen_at = found, now
        if found is not None and found.holder not in ("", self._identity) and now - self._seen_at < LEASE_SECONDS:
            return False
        if not await self._lease.write(self._identity, LEASE_SECONDS, found):
            return False
        self._renewed_at = now
        return True


@dataclass(frozen=True)
class LeaseRecord:
    """A Lease as it stands."""

    holder: str
    """Empty where nobody holds it."""
    renewed: str
    """When, by the holder's clock; only compared for equality, so that clocks need not agree."""
    num_transitions: int
    acquired: str
    version: str


class Lease:
    """The Lease on the API server, written only over the version that was read."""

    def __init__(self, objects: KubeObjects, clock: ServerClock, namespace: str, name: str) -> None:
        self._objects = objects
        self._clock = clock
        self._namespace = namespace
        self._name = name

    async def read(self) -> LeaseRecord | None:
        """The Lease as it stands; None where there is none. Raises KubeError."""
        try:
            raw = await self._objects.get(LEASES, self._namespace, self._name)
        except NotFoundError:
            return None
        spec = object_at(raw, "spec")
        return LeaseRecord(
            holder=text_at(spec, "holderIdentity"),
            renewed=text_at(spec, "renewTime"),
            num_transitions=integer_at(spec, "leaseTransitions") or 0,
            acquired=text_at(spec, "acquireTime"),
            version=text_at(raw, "metadata", "resourceVersion"),
        )

    async def write(self, holder: str, seconds: int, before: LeaseRecord | None) -> bool:
        """Puts the holder in (empty: gives the Lease up), unless somebody has written since `before` was read; then
        False. Raises KubeError."""
        now = self._clock.now().isoformat(timespec="microseconds").replace("+00:00", "Z")
        metadata: dict[str, object] = {"name": self._name, "namespace": self._namespace}
        acquired, num_transitions = now, 0
        if before is not None:
            metadata["resourceVersion"] = before.version
            num_transitions = before.num_transitions
            if before.holder == holder:
                acquired = before.acquired
            elif holder:
                num_transitions += 1
        manifest: JsonObject = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": metadata,
            "spec": {
                "holderIdentity": holder,
                "leaseDurationSeconds": seconds,
                "acquireTime": acquired,
                "renewTime": now,
                "leaseTransitions": num_transitions,
            },
        }
        if before is None:
            return await self._objects.create(LEASES, self._namespace, manifest)
        try:
            await self._objects.replace(LEASES, self._namespace, self._name, manifest)
        except (ConflictError, AlreadyExistsError, NotFoundError):
            return False
        return True
