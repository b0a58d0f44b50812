"""Checks the claim of a job, and chooses the nodes on which a pod can mount it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rljob.cluster import Cluster
from rljob.errors import NotAllowedError, ObjectNotFoundError, ResultsError
from rljob.kubernetes_models import Json
from rljob.stored_job import StoredJob

_SHARED_MODES = ("ReadWriteMany", "ReadOnlyMany")
_PAGE_SIZE, _MAX_PAGES = 500, 8
"""Pods in one response, and the number of responses that are read of a namespace at most."""


@dataclass(frozen=True)
class Placement:
    """Where the pod may run."""

    nodes: Sequence[str] = ()
    """Nodes that have the volume mounted; they also have the job's image."""
    is_required: bool = False
    """Whether only these nodes can mount it."""
    tolerations: Sequence[object] = ()
    """The tolerations of the pods on the required nodes."""

    def pod_fields(self) -> Json:
        """Fields of the pod's spec."""
        if not self.nodes:
            return {}
        terms = [{"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]} for node in self.nodes]
        if self.is_required:
            rule: Json = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
            return {"affinity": {"nodeAffinity": rule}, "tolerations": list(self.tolerations)}
        preferred = [{"weight": 100, "preference": term} for term in terms[:10]]
        return {"affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}}


def placement_of(cluster: Cluster, job: StoredJob) -> Placement:
    """Where a pod can mount the job's claim. A ReadWriteOnce claim can be mounted on one node only: the node of the
    pods that use it, if there are any.

    Raises:
        ResultsError: the claim does not exist, or has no volume.
    """
    storage = job.storage
    if storage is None:
        raise ResultsError(f"{job.where}: has no checkpoint.storage, so it has no results on the cluster")
    claim = storage.persistent_volume_claim
    assert claim is not None, "results in a bucket are read without a pod"
    modes = _access_modes(cluster, job, claim)
    using = _running_pods_with(cluster, job.metadata.namespace, claim)
    nodes = sorted({str(node) for spec in using if (node := spec.get("nodeName"))})
    is_required = len(nodes) == 1 if modes is None else not any(mode in _SHARED_MODES for mode in modes)
    if not is_required:
        return Placement(nodes)
    tolerations: list[object] = []
    for spec in using:
        found = spec.get("tolerations")
        tolerations += [each for each in found if each not in tolerations] if isinstance(found, list) else []
    return Placement(nodes, True, tolerations)


def _access_modes(cluster: Cluster, job: StoredJob, claim: str) -> Sequence[str] | None:
    """The access modes of a claim that is bound to a volume; None without permission to read claims."""
    path = f"/api/v1/namespaces/{job.metadata.namespace}/persistentvolumeclaims/{claim}"
    try:
        found = cluster.request("GET", path)
    except NotAllowedError:
        return None
    except ObjectNotFoundError:
        raise ResultsError(
            f"{job.where}: its claim {claim} does not exist any more; if the volume still exists, create a claim of"
            " this name for it"
        ) from None
    status, spec = _mapping(found.get("status")), _mapping(found.get("spec"))
    phase = status.get("phase", "Pending")
    if phase != "Bound":
        raise ResultsError(
            f"{job.where}: its claim {claim} has no volume (phase: {phase}); see `kubectl describe pvc {claim} -n"
            f" {job.metadata.namespace}`"
        )
    modes = spec.get("accessModes")
    return [str(mode) for mode in modes] if isinstance(modes, list) else []


def _running_pods_with(cluster: Cluster, namespace: str, claim: str) -> list[Mapping[str, object]]:
    """The specs of the running pods that mount the claim."""
    path, token, found = f"/api/v1/namespaces/{namespace}/pods", "", []
    for _ in range(_MAX_PAGES):
        query = [("fieldSelector", "status.phase=Running"), ("limit", str(_PAGE_SIZE)), ("continue", token)]
        page = cluster.request("GET", path, query)
        items = page.get("items")
        specs = [_mapping(_mapping(item).get("spec")) for item in (items if isinstance(items, list) else [])]
        found += [spec for spec in specs if claim in _claims(spec)]
        token = str(_mapping(page.get("metadata")).get("continue") or "")
        if not token:
            break
    return found


def _claims(pod_spec: Mapping[str, object]) -> list[object]:
    volumes = pod_spec.get("volumes")
    each = [_mapping(volume) for volume in volumes] if isinstance(volumes, list) else []
    return [_mapping(volume.get("persistentVolumeClaim")).get("claimName") for volume in each]


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, dict) else {}
