"""Leader election with a Lease: one replica of the operator works, the others wait.

The leader election of kubernetes.aio (37.0.2) is not used, for three reasons. It ends after one failed request to the
API server. Its requests have no timeout, so two replicas could act as the leader at the same time. And it does not
release the Lease when the leader stops.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from contextlib import suppress
from dataclasses import dataclass

from rljob_operator.errors import OperatorError
from rljob_operator.kube.allowed_calls import LEASES, KubeObjects
from rljob_operator.kube.client import KubeClient
from rljob_operator.kube.connection import load_connection
from rljob_operator.kube.errors import AlreadyExistsError, ConflictError, KubeError, NotFoundError
from rljob_operator.kube.server_clock import ServerClock
from rljob_operator.metrics import Metrics
from rljob_operator.raw_json import JsonObject, integer_at, object_at, text_at
from rljob_operator.settings import Settings

LEASE_SECONDS = 15
"""A holder that has not renewed the Lease for this long counts as dead: another replica may take the Lease."""
RENEW_DEADLINE_SECONDS = 10.0
"""A leader that could not renew the Lease for this long stops. The time is shorter than `LEASE_SECONDS`, so the leader
stops before another replica takes over."""
RETRY_SECONDS = 2.0
"""Pause between two tries to take or renew the Lease, after success and after failure."""
RELEASE_SECONDS = 5.0
"""How long a replica that stops waits at most until the Lease is released."""

logger = logging.getLogger(__name__)


class LeadershipLostError(OperatorError):
    """It is no longer certain that this replica is the leader."""


class LeaseThread:
    """Holds the Lease from a thread with its own event loop and connection, so that the Lease is renewed however busy
    the operator is. Use this object only in the event loop that created it; only `may_act` may be called from any
    thread."""

    def __init__(self, settings: Settings, metrics: Metrics, clock: ServerClock) -> None:
        self._settings = settings
        self._metrics = metrics
        self._clock = clock
        self._main_loop = asyncio.get_running_loop()
        self._leads: asyncio.Future[None] = self._main_loop.create_future()
        """Done when this replica has become the leader."""
        self._ended: asyncio.Future[None] = self._main_loop.create_future()
        """Done when the thread has ended, with the error of the thread if there is one."""
        self._leadership: Leadership | None = None
        """None until this replica has become the leader."""
        self._loop: asyncio.AbstractEventLoop | None = None
        """The event loop of the thread."""
        self._stop_requested: asyncio.Event | None = None
        self._is_stopped = False

    def start(self) -> None:
        """Starts the thread, which waits for leadership."""
        # A daemon thread: a request that hangs must not keep the process from exiting.
        threading.Thread(target=self._run_thread, name="lease", daemon=True).start()

    async def acquired(self) -> None:
        """Waits until this replica is the leader. If the thread ends before that, raises the error of the thread; after
        `stop` there is no error, and the call returns although this replica is not the leader."""
        await asyncio.wait([self._leads, self._ended], return_when=asyncio.FIRST_COMPLETED)
        if not self._leads.done():
            await self._ended

    async def lost(self) -> None:
        """Waits until the thread ends, because this replica is no longer the leader. Raises the error of the thread:
        LeadershipLostError, or any other error if leader election failed with a bug. Returns only after `stop`."""
        await asyncio.shield(self._ended)

    def may_act(self) -> bool:
        """Whether this replica is certainly the leader."""
        return self._leadership is not None and self._leadership.is_certain

    async def stop(self) -> None:
        """Releases the Lease if this replica holds it. All work of this replica must have stopped before."""
        self._is_stopped = True
        if self._loop is not None and self._stop_requested is not None:
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._stop_requested.set)
            await asyncio.wait([self._ended], timeout=RELEASE_SECONDS)

    def _run_thread(self) -> None:
        error: BaseException | None = None
        try:
            asyncio.run(self._run())
        except LeadershipLostError as lost:
            error = lost
        except Exception as unexpected:
            logger.exception("leader election failed: the lease is no longer renewed")
            error = unexpected
        self._resolve(self._ended, error)

    async def _run(self) -> None:
        """Takes and renews the Lease until a stop is requested; then releases the Lease."""
        self._loop, self._stop_requested = asyncio.get_running_loop(), asyncio.Event()
        if self._is_stopped:
            return
        settings = self._settings
        connection = await load_connection(settings.kubeconfig)
        async with KubeClient(connection, self._metrics, self._clock) as client:
            objects = KubeObjects(client)
            leadership = Leadership(
                objects, self._clock, settings.pod_namespace, settings.lease_name, settings.pod_name
            )
            holding = asyncio.create_task(self._acquire_and_hold(leadership))
            stopping = asyncio.create_task(self._stop_requested.wait())
            await asyncio.wait([holding, stopping], return_when=asyncio.FIRST_COMPLETED)
            if holding.done():
                stopping.cancel()
                await holding
                return
            holding.cancel()
            await asyncio.gather(holding, return_exceptions=True)
            await leadership.release()

    async def _acquire_and_hold(self, leadership: Leadership) -> None:
        await leadership.acquire()
        self._leadership = leadership
        self._resolve(self._leads, None)
        await leadership.hold()

    def _resolve(self, future: asyncio.Future[None], error: BaseException | None) -> None:
        """Sets the result of a future of the main event loop: the error, or None for success."""

        def set_outcome() -> None:
            if future.done():
                return
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)

        # RuntimeError: the main event loop is already closed, because the process is about to exit.
        with suppress(RuntimeError):
            self._main_loop.call_soon_threadsafe(set_outcome)


class Leadership:
    """Takes, renews and releases the Lease. `identity`: the pod's name, so that a restarted container of the same pod
    is the leader again immediately."""

    def __init__(self, objects: KubeObjects, clock: ServerClock, namespace: str, name: str, identity: str) -> None:
        self._lease = Lease(objects, clock, namespace, name)
        self._clock = clock
        self._name = name
        self._identity = identity
        self._seen: LeaseRecord | None = None
        """The Lease as last read."""
        self._seen_at = 0.0
        """When this state of the Lease was first seen (monotonic seconds)."""
        self._renewed_at = -math.inf
        """When the newest successful renewal was sent (monotonic seconds)."""

    @property
    def is_certain(self) -> bool:
        """Whether no other replica can be the leader now. May be called from any thread. This compares times, so the
        result is also right in a process that was paused and has not read the Lease since."""
        return self._clock.monotonic() - self._renewed_at < RENEW_DEADLINE_SECONDS

    async def acquire(self) -> None:
        """Waits until this replica is the leader."""
        logged_holder = ""
        while True:
            try:
                if await self._take_or_renew():
                    logger.info("this replica (%s) is the leader", self._identity)
                    return
                holder = self._seen.holder if self._seen is not None else ""
                if holder != logged_holder:
                    logged_holder = holder
                    logger.info("waiting for leadership: %s is the leader", holder)
            except (KubeError, TimeoutError) as error:
                logger.warning("lease %s: %s", self._name, str(error) or "request timed out")
            await asyncio.sleep(RETRY_SECONDS)

    async def hold(self) -> None:
        """Renews the Lease until this call is cancelled. Raises LeadershipLostError when this replica does not hold the
        Lease any more, or when no renewal has succeeded for `RENEW_DEADLINE_SECONDS`."""
        if self._renewed_at == -math.inf:
            # Without `acquire` before, the first renewal has the same time limit as the others.
            self._renewed_at = self._clock.monotonic()
        while True:
            await asyncio.sleep(RETRY_SECONDS)
            remaining = self._renewed_at + RENEW_DEADLINE_SECONDS - self._clock.monotonic()
            try:
                async with asyncio.timeout(max(0.0, remaining)):
                    if (
                        not await self._take_or_renew()
                        and self._seen is not None
                        and self._seen.holder != self._identity
                    ):
                        raise LeadershipLostError(f"lease {self._name}: held by {self._seen.holder or 'nobody'} now")
            except (KubeError, TimeoutError) as error:
                logger.warning("lease %s: %s", self._name, str(error) or "request timed out")
            if not self.is_certain:
                raise LeadershipLostError(f"lease {self._name}: could not be renewed for {RENEW_DEADLINE_SECONDS:g} s")

    async def release(self) -> None:
        """Releases the Lease if this replica holds it, so that another one can lead immediately. All work of this
        replica must have stopped before."""
        try:
            before = await self._lease.read()
            if before is not None and before.holder == self._identity:
                await self._lease.write("", 1, before)
        except KubeError as error:
            logger.warning(
                "lease %s: could not be released: %s; another replica waits until the lease has expired",
                self._name,
                error,
            )

    async def _take_or_renew(self) -> bool:
        """Takes or renews the Lease if no other replica holds it. Returns whether this replica holds it now."""
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
    """The content of a Lease."""

    holder: str
    """Identity of the holder; empty if nobody holds it."""
    renewed: str
    """Time of the last renewal by the holder's clock. Only compared for equality, so clocks need not agree."""
    num_transitions: int
    """How often the holder has changed."""
    acquired: str
    """When the holder took the Lease, by its clock."""
    version: str
    """The resource version."""


class Lease:
    """Reads and writes the Lease on the API server. A write fails if the Lease was changed since it was read."""

    def __init__(self, objects: KubeObjects, clock: ServerClock, namespace: str, name: str) -> None:
        self._objects = objects
        self._clock = clock
        self._namespace = namespace
        self._name = name

    async def read(self) -> LeaseRecord | None:
        """The current Lease; None if there is none. Raises KubeError."""
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
        """Writes the holder into the Lease, for `seconds`; an empty holder releases the Lease. Returns False if the
        Lease was created, changed or deleted since `before` was read. Raises KubeError."""
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
