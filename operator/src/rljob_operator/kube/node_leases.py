"""Measures for how long a node has not responded, by the Lease that its kubelet renews every ten seconds."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from rljob_operator.kube.allowed_calls import LEASES, KubeObjects
from rljob_operator.kube.errors import ForbiddenError, KubeError, NotFoundError
from rljob_operator.kube.server_clock import ServerClock
from rljob_operator.raw_json import text_at

NODE_LEASES_NAMESPACE = "kube-node-lease"
FORGOTTEN_AFTER_SECONDS = 60.0
"""What this process remembers of a Lease is dropped if the Lease was not read for this long. The time without a renewal
then counts from the next read, because the operator does not know whether the Lease was renewed in between."""
REUSED_SECONDS = 2.0
"""How long one read of a Lease is used, so that the jobs on a node share it."""

logger = logging.getLogger(__name__)


@dataclass
class _SeenLease:
    """A Lease as last read."""

    renewed: str
    """Time of the last renewal by the kubelet's clock; only compared for equality."""
    first_seen_at: float
    """When this renewal was first seen (monotonic seconds)."""
    read_at: float
    """When the Lease was last read (monotonic seconds)."""


class NodeLeases:
    """Reads the Leases of nodes, and remembers when it first saw the newest renewal of each."""

    def __init__(self, objects: KubeObjects, clock: ServerClock) -> None:
        self._objects = objects
        self._clock = clock
        self._seen: dict[str, _SeenLease] = {}
        """By name of the node."""
        self._has_warned = False

    async def seconds_since_renewal(self, node: str) -> float:
        """Seconds since this process first saw the newest renewal of the node's Lease; 0 if it could not be read."""
        seen = self._seen.get(node)
        if seen is not None and self._clock.monotonic() - seen.read_at < REUSED_SECONDS:
            return self._clock.monotonic() - seen.first_seen_at
        try:
            lease = await self._objects.get(LEASES, NODE_LEASES_NAMESPACE, node)
        except (ForbiddenError, NotFoundError) as error:
            if not self._has_warned:
                logger.warning(
                    "cannot read the lease of node %s: %s; lost nodes are noticed only when Kubernetes reports them",
                    node,
                    error,
                )
            self._has_warned = True
            return 0.0
        except KubeError as error:
            logger.info("cannot read the lease of node %s: %s", node, error)
            return 0.0
        return self._record(node, text_at(lease, "spec", "renewTime"))

    def _record(self, node: str, renewed: str) -> float:
        now = self._clock.monotonic()
        self._seen = {each: seen for each, seen in self._seen.items() if now - seen.read_at < FORGOTTEN_AFTER_SECONDS}
        seen = self._seen.get(node)
        if seen is None or seen.renewed != renewed:
            seen = self._seen[node] = _SeenLease(renewed, now, now)
        seen.read_at = now
        return now - seen.first_seen_at
