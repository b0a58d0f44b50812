"""Whether a kubelet is still there, by the Lease that it renews every ten seconds."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from rljob_operator.kube.errors import ForbiddenError, KubeError, NotFoundError
from rljob_operator.kube.objects import LEASES, KubeObjects
from rljob_operator.kube.server_clock import ServerClock
from rljob_operator.raw_json import text_at

NODE_LEASES_NAMESPACE = "kube-node-lease"
FORGET_SECONDS = 60.0
"""A lease that was not looked at for so long counts from the next look on: what happened between is not known."""
SAME_LOOK_SECONDS = 2.0
"""Jobs of one node share a look at its lease."""

logger = logging.getLogger(__name__)


@dataclass
class _SeenLease:
    renewed: str
    """When, by the kubelet's clock; only compared for equality."""
    since: float
    """When it was first seen with this time of renewal."""
    looked_at: float


class NodeLeases:
    """What this process has seen of the leases of nodes."""

    def __init__(self, objects: KubeObjects, clock: ServerClock) -> None:
        self._objects = objects
        self._clock = clock
        self._seen: dict[str, _SeenLease] = {}
        self._has_complained = False

    async def silent_seconds(self, node: str) -> float:
        """For how long the node's kubelet was not seen to renew its lease, from the first look on; 0 where that cannot
        be looked at."""
        seen = self._seen.get(node)
        if seen is not None and self._clock.monotonic() - seen.looked_at < SAME_LOOK_SECONDS:
            return self._clock.monotonic() - seen.since
        try:
            lease = await self._objects.get(LEASES, NODE_LEASES_NAMESPACE, node)
        except (ForbiddenError, NotFoundError) as error:
            if not self._has_complained:
                logger.warning("lease of node %s: %s; a lost node is only noticed when Kubernetes says so", node, error)
            self._has_complained = True
            return 0.0
        except KubeError as error:
            logger.info("lease of node %s: %s", node, error)
            return 0.0
        return self._note(node, text_at(lease, "spec", "renewTime"))

    def _note(self, node: str, renewed: str) -> float:
        now = self._clock.monotonic()
        self._seen = {each: seen for each, seen in self._seen.items() if now - seen.looked_at < FORGET_SECONDS}
        seen = self._seen.get(node)
        if seen is None or seen.renewed != renewed:
            seen = self._seen[node] = _SeenLease(renewed, now, now)
        seen.looked_at = now
        return now - seen.since
