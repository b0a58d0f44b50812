"""Caches all jobs and their clusters, pods and Kueue workloads, from watches and relists, so that most passes need no
read request.

Events can arrive twice, late, in the wrong order, or not at all: the cache keeps the newer of two states of an object,
and a listing repairs missed events. Resource versions of the same kind are compared as numbers (`version_number`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass

from rljob_api.constants import ANNOTATION_RETRY
from rljob_api.requests import as_recorded
from rljob_operator.kube.allowed_calls import CLUSTERS, JOBS, PODS, WORKLOADS, ResourceType
from rljob_operator.kube.errors import UnavailableError
from rljob_operator.kube.projections import (
    cluster_uid,
    is_of_ray_cluster,
    job_uid,
    projected,
    projected_job,
    trimmed_job,
)
from rljob_operator.raw_json import JsonObject, at, object_at, optional_text_at, text_at

REQUIRED_KINDS = (JOBS, CLUSTERS, PODS)
"""Without these kinds, the operator cannot decide what to do. Workloads only explain why a job waits."""
DELETED = "DELETED"
"""Type of a watch event about the deletion of an object."""


@dataclass(frozen=True)
class _Deleted:
    """A deleted object. It is remembered until a listing is as new as the deletion, so that late events are ignored."""

    kind: ResourceType
    namespace: str
    version: int
    """Resource version of the deletion."""


class ObjectCache:
    """The cache, for one event loop. `namespaces`: the namespaces that are listed; `(None,)` for all."""

    def __init__(self, namespaces: Sequence[str | None]) -> None:
        self._objects: dict[ResourceType, dict[tuple[str, str], JsonObject]] = {
            kind: {} for kind in (*REQUIRED_KINDS, WORKLOADS)
        }
        self._of_jobs: dict[tuple[ResourceType, str, str], dict[str, JsonObject]] = {}
        """For each kind, namespace and UID of a job: its clusters or pods, by name. For workloads: the UID of the
        RayCluster instead of the job's."""
        self._clusters: dict[str, JsonObject] = {}
        """RayClusters by UID."""
        self._deleted: dict[str, _Deleted] = {}
        """Deleted objects that are still remembered, by UID."""
        self._unlisted = {(kind, namespace) for kind in REQUIRED_KINDS for namespace in namespaces}
        """Kinds and namespaces that no listing has covered yet."""
        self._without_policy: frozenset[str] = frozenset()
        """UIDs of the RayClusters whose network policy was not in the last listing of policies."""
        self._trimmed: set[tuple[str, str]] = set()
        """Namespaces and names of the jobs of which the cache has only a trimmed copy."""
        self._missing: set[ResourceType] = set()
        self._forbidden: dict[tuple[ResourceType, str | None], str] = {}
        """For each kind and namespace that may not be listed: the API server's message."""

    @property
    def is_complete(self) -> bool:
        """Whether each required kind was listed at least once in each namespace, or cannot be listed there. Before
        that, any object may exist without being in the cache; after it, only a finished job that is cleaned up."""
        return not self._unlisted

    def job(self, namespace: str, name: str) -> JsonObject | None:
        """A job, or the trimmed copy of one that is finished and cleaned up; None if there is none."""
        return self._objects[JOBS].get((namespace, name))

    def is_trimmed(self, namespace: str, name: str) -> bool:
        """Whether the cache has only a trimmed copy of the job."""
        return (namespace, name) in self._trimmed

    def jobs(self) -> tuple[JsonObject, ...]:
        """All jobs."""
        return tuple(self._objects[JOBS].values())

    def clusters(self) -> tuple[JsonObject, ...]:
        """All RayClusters of jobs."""
        return tuple(self._objects[CLUSTERS].values())

    def of_job(self, kind: ResourceType, namespace: str, uid: str) -> tuple[JsonObject, ...]:
        """All clusters or pods that carry a job's UID as a label, sorted by name."""
        found = self._of_jobs.get((kind, namespace, uid), {})
        return tuple(found[name] for name in sorted(found))

    def cluster(self, uid: str) -> JsonObject | None:
        """The RayCluster with this UID; None if there is none."""
        return self._clusters.get(uid)

    def workload_of(self, namespace: str, uid: str) -> JsonObject | None:
        """Kueue's workload of the RayCluster with this UID: its metadata and `status.conditions`. None if Kueue does
        not manage the cluster, or if the operator does not read workloads."""
        found = self._of_jobs.get((WORKLOADS, namespace, uid), {})
        return max(found.values(), key=lambda raw: text_at(raw, "metadata", "creationTimestamp"), default=None)

    def lacks_network_policy(self, uid: str) -> bool:
        """Whether the network policy of the RayCluster with this UID was deleted before the last listing of policies,
        and was not applied again since then."""
        return uid in self._without_policy

    def newest_version(self, kind: ResourceType, namespace: str, uid: str) -> int:
        """The newest resource version of a job's clusters or pods; -1 if the job has none. A listing that is requested
        from now on must not be older."""
        return max((_version(raw) for raw in self.of_job(kind, namespace, uid)), default=-1)

    def job_version(self, namespace: str, name: str) -> int:
        """The resource version of a job; -1 if it is not in the cache."""
        return _version(self._objects[JOBS].get((namespace, name), {}))

    def version(self, kind: ResourceType, raw: JsonObject) -> int:
        """The cached resource version of the object with the namespace, name and UID of `raw`; -1 if there is none."""
        known = self._objects[kind].get(_key(raw), {})
        return _version(known) if _uid(known) == _uid(raw) else -1

    def is_missing(self, kind: ResourceType) -> bool:
        """Whether the API server does not know this kind of object."""
        return kind in self._missing

    def forbidden(self, namespace: str) -> str | None:
        """The API server's message if the operator may not list the objects of a namespace, so that the cached ones may
        be stale; else None."""
        found = [
            message
            for (kind, where), message in self._forbidden.items()
            if kind in REQUIRED_KINDS and where in (None, namespace)
        ]
        return found[0] if found else None

    @property
    def num_objects(self) -> int:
        """Number of objects of all kinds."""
        return sum(map(len, self._objects.values()))

    def uids(self) -> Iterator[str]:
        """UIDs of all objects in the cache."""
        for objects in self._objects.values():
            for raw in objects.values():
                yield _uid(raw)

    def store(self, kind: ResourceType, event_type: str, raw: JsonObject) -> bool:
        """Stores the state of an object from an event or a response, or removes a deleted object. Returns whether this
        has changed the cached objects."""
        if kind == WORKLOADS and not is_of_ray_cluster(raw):
            return False
        key, uid, version = _key(raw), _uid(raw), _version(raw)
        known = self._objects[kind].get(key)
        if event_type == DELETED:
            self._deleted[uid] = _Deleted(kind, key[0], version)
            if known is None or _uid(known) != uid:
                return False
            self._remove(kind, known)
            return True
        deleted = self._deleted.get(uid)
        if deleted is not None and _is_not_newer(version, deleted.version):
            return False
        if known is not None and _is_not_newer(version, _version(known)):
            return False
        if known is not None:
            self._remove(kind, known)
        self._put(kind, raw, known)
        return True

    def add_listed(self, kind: ResourceType, listed: Iterable[JsonObject]) -> set[tuple[str, str]]:
        """Stores the objects of a page of a listing. Returns their namespaces and names."""
        found = set()
        for raw in listed:
            found.add(_key(raw))
            self.store(kind, "", raw)
        return found

    def complete_listing(
        self, kind: ResourceType, namespace: str | None, found: Set[tuple[str, str]], version: str
    ) -> tuple[JsonObject, ...]:
        """Ends a listing of a kind in a namespace (None: in all): removes the cached objects that the listing does not
        contain, and returns them. Cached objects that are newer than the listing stay as they are.

        Args:
            found: Namespaces and names of the objects of all pages, after `add_listed` of each page.
            version: The resource version of the listing.
        """
        listed_at = version_number(version)
        removed = [
            known
            for key, known in self._objects[kind].items()
            if namespace in (None, key[0]) and key not in found and not _is_newer(known, listed_at)
        ]
        for known in removed:
            self._remove(kind, known)
        self._deleted = {
            uid: deleted
            for uid, deleted in self._deleted.items()
            if deleted.kind != kind
            or namespace not in (None, deleted.namespace)
            or not _is_not_newer(deleted.version, listed_at)
        }
        self._missing.discard(kind)
        self._forbidden.pop((kind, namespace), None)
        self._unlisted.discard((kind, namespace))
        return tuple(removed)

    def note_unfinished_jobs_listed(self, namespace: str | None) -> None:
        """Records that the cache has all jobs of a namespace (None: of all) for which there is something to do."""
        self._unlisted.discard((JOBS, namespace))

    def unfinished_jobs(self) -> tuple[JsonObject, ...]:
        """All jobs except those that are finished and cleaned up and have nothing new."""
        return tuple(raw for key, raw in self._objects[JOBS].items() if key not in self._trimmed)

    def unlisted_jobs(self, namespace: str | None, found: Set[tuple[str, str]], version: str) -> tuple[JsonObject, ...]:
        """The jobs of a namespace (None: of all) that should be in a listing of the jobs that are not cleaned up, and
        are not. Such a job was deleted, or cleaned up without the cache's knowledge. `found` and `version`: as in
        `complete_listing`."""
        listed_at = version_number(version)
        return tuple(
            raw
            for raw in self.unfinished_jobs()
            if namespace in (None, _key(raw)[0])
            and _key(raw) not in found
            and not text_at(raw, "status", "result", "cleanedUpAt")
            and not _is_newer(raw, listed_at)
        )

    def note_clusters_without_policy(self, uids: Iterable[str]) -> None:
        """Records the result of a listing of network policies."""
        self._without_policy = frozenset(uids)

    def note_policy_applied(self, uid: str) -> None:
        """Records that the network policy of the RayCluster with this UID was applied."""
        self._without_policy -= {uid}

    def note_missing(self, kind: ResourceType) -> None:
        """Records that the API server does not know this kind, so there are no such objects."""
        for known in list(self._objects[kind].values()):
            self._remove(kind, known)
        self._missing.add(kind)
        self._forbidden = {key: message for key, message in self._forbidden.items() if key[0] != kind}
        self._unlisted = {key for key in self._unlisted if key[0] != kind}

    def note_forbidden(self, kind: ResourceType, namespace: str | None, message: str) -> None:
        """Records that the operator may not list this kind in a namespace: its cached objects stay and may be stale."""
        self._forbidden[kind, namespace] = message
        self._unlisted.discard((kind, namespace))

    def _put(self, kind: ResourceType, raw: JsonObject, known: JsonObject | None) -> None:
        """Stores the part of an object that is kept. `known`: the former state of an object of this name."""
        if kind != JOBS:
            kept = projected(kind, raw)
        elif is_finished_and_cleaned_up(raw):
            kept = trimmed_job(raw)
            self._trimmed.add(_key(raw))
        else:
            kept = projected_job(raw, known)
        self._objects[kind][_key(raw)] = kept
        if kind != JOBS:
            self._of_jobs.setdefault(_owner_key(kind, raw), {})[_key(raw)[1]] = kept
        if kind == CLUSTERS:
            self._clusters[_uid(raw)] = kept

    def _remove(self, kind: ResourceType, known: JsonObject) -> None:
        del self._objects[kind][_key(known)]
        if kind == JOBS:
            self._trimmed.discard(_key(known))
        if kind == CLUSTERS:
            self._clusters.pop(_uid(known), None)
        of_owner = self._of_jobs.get(_owner_key(kind, known))
        if of_owner is not None:
            of_owner.pop(_key(known)[1], None)
            if not of_owner:
                del self._of_jobs[_owner_key(kind, known)]


def is_finished_and_cleaned_up(job: JsonObject) -> bool:
    """Whether the job is finished and cleaned up, and nobody has since changed its spec, deleted it or requested a
    retry. The operator has nothing to do for such a job until `ttlSecondsAfterFinished` has passed."""
    metadata, status = object_at(job, "metadata"), object_at(job, "status")
    is_deleting = optional_text_at(metadata, "deletionTimestamp") is not None
    is_spec_observed = at(status, "observedGeneration") == at(metadata, "generation")
    return (
        bool(text_at(status, "result", "cleanedUpAt"))
        and is_spec_observed
        and not is_deleting
        and not _has_new_retry_request(job)
    )


def reject_stale(what: str, version: str, known: int) -> None:
    """Raises UnavailableError if a response is stale: its resource version is older than `known`, which was seen before
    the request. An object that is missing in a stale response may exist."""
    if 0 <= version_number(version) < known:
        raise UnavailableError(f"{what}: stale response (version {version} is older than {known}, seen before)")


def version_number(version: str) -> int:
    """A resource version as a number; -1 if it is not one. Kubernetes does not promise a number, but all its API
    servers use one."""
    return int(version) if version.isascii() and version.isdecimal() else -1


def _has_new_retry_request(job: JsonObject) -> bool:
    """Whether a user has requested a retry that the operator has not handled yet."""
    request = text_at(object_at(job, "metadata", "annotations"), ANNOTATION_RETRY)
    return bool(request) and as_recorded(request) != text_at(job, "status", "handledRequests", "retry")


def _owner_key(kind: ResourceType, raw: JsonObject) -> tuple[ResourceType, str, str]:
    return kind, _key(raw)[0], cluster_uid(raw) if kind == WORKLOADS else job_uid(raw)


def _key(raw: JsonObject) -> tuple[str, str]:
    return text_at(raw, "metadata", "namespace"), text_at(raw, "metadata", "name")


def _uid(raw: JsonObject) -> str:
    return text_at(raw, "metadata", "uid")


def _version(raw: JsonObject) -> int:
    return version_number(text_at(raw, "metadata", "resourceVersion"))


def _is_newer(raw: JsonObject, listed_at: int) -> bool:
    """Whether an object is certainly newer than a listing."""
    return _version(raw) > listed_at >= 0


def _is_not_newer(version: int, other: int) -> bool:
    """Whether a version is not newer than the other. If one of them is not a number (-1), the state that arrives last
    counts as newer."""
    return 0 <= version <= other
