"""One replica works, the others wait: leadership by a Lease.

kubernetes.aio's own election is not used (37.0.2): it ends for good when the API server cannot be reached once, waits
for requests without a limit, so that two replicas can believe to lead, and does not give the Lease back.
"""

from __future__ import annotations

import asyncio
import logging
import math

from rljob_operator.errors import OperatorError
from rljob_operator.kube.errors import KubeError
from rljob_operator.kube.lease import LeaseRecord, read_lease, write_lease
from rljob_operator.kube.objects import KubeObjects
from rljob_operator.kube.server_clock import ServerClock

LEASE_SECONDS = 15
"""A holder that has not renewed for so long is taken for dead."""
RENEW_SECONDS = 10.0
"""A leader that could not renew for so long stops; others wait longer than that."""
RETRY_SECONDS = 2.0

logger = logging.getLogger(__name__)


class LeadershipLostError(OperatorError):
    """Another replica may lead by now."""


class Leadership:
    """This replica's part. `identity`: its pod's name, so that a container that is restarted goes on at once."""

    def __init__(self, objects: KubeObjects, clock: ServerClock, namespace: str, name: str, identity: str) -> None:
        self._objects = objects
        self._clock = clock
        self._namespace = namespace
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
                logger.warning("lease: %s", error or "no answer in time")
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
                logger.warning("lease: %s", error or "no answer in time")
            if not self.is_certain:
                raise LeadershipLostError(f"lease {self._name}: could not be renewed for {RENEW_SECONDS:g} s")

    async def release(self) -> None:
        """Lets another replica lead at once. Only when nothing works any more here."""
        try:
            before = await read_lease(self._objects, self._namespace, self._name)
            if before is not None and before.holder == self._identity:
                await write_lease(self._objects, self._namespace, self._name, "", 1, before, self._clock.now())
        except KubeError as error:
            logger.warning("lease: not given back: %s", error)

    async def _try(self) -> bool:
        """Whether this replica holds the Lease now, after taking or renewing it where that is allowed."""
        found = await read_lease(self._objects, self._namespace, self._name)
        now = self._clock.monotonic()
        if found is None or found != self._seen:
            self._seen, self._seen_at = found, now
        if found is not None and found.holder not in ("", self._identity) and now - self._seen_at < LEASE_SECONDS:
            return False
        moment = self._clock.now()
        if not await write_lease(
            self._objects, self._namespace, self._name, self._identity, LEASE_SECONDS, found, moment
        ):
            return False
        self._renewed_at = now
        return True
