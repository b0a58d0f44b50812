"""The Lease by which one replica leads, read and written with the version that was read."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from rljob_operator.kube.errors import AlreadyExistsError, ConflictError, NotFoundError
from rljob_operator.kube.objects import LEASES, KubeObjects
from rljob_operator.raw_json import JsonObject, integer_at, object_at, text_at


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


async def read_lease(objects: KubeObjects, namespace: str, name: str) -> LeaseRecord | None:
    """The Lease; None where there is none. Raises KubeError."""
    try:
        raw = await objects.get(LEASES, namespace, name)
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


async def write_lease(
    objects: KubeObjects,
    namespace: str,
    name: str,
    holder: str,
    seconds: int,
    before: LeaseRecord | None,
    moment: datetime,
) -> bool:
    """Puts the holder in (empty: gives the Lease up), unless somebody has written since `before` was read; then False.
    `moment`: now, in UTC. Raises KubeError."""
    now = moment.isoformat(timespec="microseconds").replace("+00:00", "Z")
    changes_hands = before is None or before.holder != holder
    num_transitions = before.num_transitions if before is not None else 0
    metadata: JsonObject = {"name": name, "namespace": namespace} | (
        {"resourceVersion": before.version} if before is not None else {}
    )
    manifest: JsonObject = {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": metadata,
        "spec": {
            "holderIdentity": holder,
            "leaseDurationSeconds": seconds,
            "acquireTime": now if changes_hands or before is None else before.acquired,
            "renewTime": now,
            "leaseTransitions": num_transitions + (1 if changes_hands and before is not None and holder else 0),
        },
    }
    if before is None:
        return await objects.create(LEASES, namespace, manifest)
    try:
        await objects.replace(LEASES, namespace, name, manifest)
    except (ConflictError, AlreadyExistsError, NotFoundError):
        return False
    return True
