"""Caches all jobs and their clusters and pods, from watches and relists, so that most passes need no read request.

Events can arrive twice, late, in the wrong order, or not at all: the cache keeps the newer of two states of an object,
and a listing repairs missed events. Resource versions of the same kind are compared as numbers (`version_number`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rljob_api.constants import ANNOTATION_RETRY, LABEL_JOB_UID
from rljob_api.requests import as_recorded
from rljob_operator.kube.allowed_calls import CLUSTERS, JOBS, PODS, ResourceType
from rljob_operator.kube.errors import UnavailableError
from rljob_operator.raw_json import JsonObject, at, object_at, optional_text_at, text_at

KINDS = (JOBS, CLUSTERS, PODS)
DELETED = "DELETED"
"""Type of a watch event about the deletion of an object."""
KEPT_METADATA = ("name", "namespace", "uid", "resourceVersion", "generation", "creationTimestamp", "deletionTimestamp")
KEPT_STATUS = ("observedGeneration", "phase", "gpus", "result", "handledRequests")
"""The metadata and status fields that the cache keeps of a job that is finished and cleaned up; there may be many such
jobs. The cache also keeps their `spec.runPolicy`."""


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
        self._objects: dict[ResourceType, dict[tuple[str, str], JsonObject]] = {kind: {} for kind in KINDS}
        self._of_jobs: dict[tuple[ResourceType, str, str], dict[str, JsonObject]] = {}
        """For each kind, namespace and UID of a job: its clusters or pods, by name."""
        self._deleted: dict[str, _Deleted] = {}
        """Deleted objects that are still remembered, by UID."""
        self._unlisted = {(kind, namespace) for kind in KINDS for namespace in namespaces}
        """Kinds and namespaces that no listing has covered yet."""
        self._trimmed: set[tuple[str, str]] = set()
        """Namespaces and names of the jobs of which the cache has only a trimmed copy."""
        self._missing: set[ResourceType] = set()
        self._forbidden: dict[tuple[ResourceType, str | None], str] = {}
        """For each kind and namespace that may not be listed: the API server's message."""

    @property
    def is_complete(self) -> bool:
        """Whether each kind was listed at least once in each namespace, or cannot be listed there. Before that, an
        object that is not in the cache may exist."""
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
        found = [message for (_, where), message in self._forbidden.items() if where in (None, namespace)]
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
        self._put(kind, raw)
        return True

    def replace(
        self, kind: ResourceType, namespace: str | None, listed: Iterable[JsonObject], version: str
    ) -> tuple[JsonObject, ...]:
        """Stores a listing of a kind in a namespace (None: in all), removes the cached objects that the listing does
        not contain, and returns the removed objects. Cached objects that are newer than the listing stay as they are.
        `version`: the resource version of the listing."""
        found = {_key(raw): raw for raw in listed}
        listed_at = version_number(version)
        removed = [
            known
            for key, known in self._objects[kind].items()
            if namespace in (None, key[0]) and key not in found and not _version(known) > listed_at >= 0
        ]
        for known in removed:
            self._remove(kind, known)
        for raw in found.values():
            self.store(kind, "", raw)
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

    def _put(self, kind: ResourceType, raw: JsonObject) -> None:
        # managedFields is as large as the object itself and is not used here.
        metadata = {name: value for name, value in object_at(raw, "metadata").items() if name != "managedFields"}
        kept: JsonObject = {**raw, "metadata": metadata}
        if kind == JOBS and is_finished_and_cleaned_up(raw):
            kept = _trimmed_copy(raw)
            self._trimmed.add(_key(raw))
        self._objects[kind][_key(raw)] = kept
        if kind != JOBS:
            self._of_jobs.setdefault(_job_key(kind, raw), {})[_key(raw)[1]] = kept

    def _remove(self, kind: ResourceType, known: JsonObject) -> None:
        del self._objects[kind][_key(known)]
        if kind == JOBS:
            self._trimmed.discard(_key(known))
        of_job = self._of_jobs.get(_job_key(kind, known))
        if of_job is not None:
            of_job.pop(_key(known)[1], None)
            if not of_job:
                del self._of_jobs[_job_key(kind, known)]


def job_uid(raw: JsonObject) -> str:
    """UID of the job that a cluster or a pod belongs to, by its label; empty if it has no such label."""
    return text_at(object_at(raw, "metadata", "labels"), LABEL_JOB_UID)


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


def _trimmed_copy(job: JsonObject) -> JsonObject:
    """The fields of a finished job that are still needed: its identity, its result, and when to delete it."""
    metadata, status = object_at(job, "metadata"), object_at(job, "status")
    return {
        "metadata": {name: metadata[name] for name in KEPT_METADATA if name in metadata},
        "spec": {"runPolicy": dict(object_at(job, "spec", "runPolicy"))},
        "status": {name: status[name] for name in KEPT_STATUS if name in status},
    }


def _has_new_retry_request(job: JsonObject) -> bool:
    """Whether a user has requested a retry that the operator has not handled yet."""
    request = text_at(object_at(job, "metadata", "annotations"), ANNOTATION_RETRY)
    return bool(request) and as_recorded(request) != text_at(job, "status", "handledRequests", "retry")


def _job_key(kind: ResourceType, raw: JsonObject) -> tuple[ResourceType, str, str]:
    return kind, _key(raw)[0], job_uid(raw)


def _key(raw: JsonObject) -> tuple[str, str]:
    return text_at(raw, "metadata", "namespace"), text_at(raw, "metadata", "name")


def _uid(raw: JsonObject) -> str:
    return text_at(raw, "metadata", "uid")


def _version(raw: JsonObject) -> int:
    return version_number(text_at(raw, "metadata", "resourceVersion"))


def _is_not_newer(version: int, other: int) -> bool:
    """Whether a version is not newer than the other. If one of them is not a number (-1), the state that arrives last
    counts as newer."""
    return 0 <= version <= other
