"""The objects of all jobs as the watches and the relists bring them, so that a look at a job costs no request.

Events come twice, late, in the wrong order, or not at all: of two states of one object the newer one stays, and a
listing repairs what was missed. The numbers of versions are compared, as Kubernetes allows for objects of one kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rljob_api.constants import ANNOTATION_RETRY, LABEL_JOB_UID
from rljob_operator.kube.errors import UnavailableError
from rljob_operator.kube.objects import CLUSTERS, JOBS, PODS, ResourceType
from rljob_operator.raw_json import JsonObject, at, object_at, optional_text_at, text_at

KINDS = (JOBS, CLUSTERS, PODS)
DELETED = "DELETED"
KEPT_METADATA = ("name", "namespace", "uid", "resourceVersion", "generation", "creationTimestamp", "deletionTimestamp")
KEPT_STATUS = ("observedGeneration", "phase", "result", "handledRequests")
"""What is kept of a job that is settled: there may be many."""


@dataclass(frozen=True)
class _Deleted:
    """An object that is gone, remembered until a listing no longer has it."""

    kind: ResourceType
    namespace: str
    version: int


class ObjectCache:
    """For one event loop. `namespaces`: those that are listed, None for all."""

    def __init__(self, namespaces: Sequence[str | None]) -> None:
        self._objects: dict[ResourceType, dict[tuple[str, str], JsonObject]] = {kind: {} for kind in KINDS}
        self._of_jobs: dict[tuple[ResourceType, str, str], dict[str, JsonObject]] = {}
        """Clusters and pods by name, by kind, namespace and the UID of their job."""
        self._deleted: dict[str, _Deleted] = {}
        self._unlisted = {(kind, namespace) for kind in KINDS for namespace in namespaces}
        self._remnants: set[tuple[str, str]] = set()
        """Jobs of which not all is here."""
        self._missing: set[ResourceType] = set()
        self._forbidden: dict[tuple[ResourceType, str | None], str] = {}

    @property
    def is_complete(self) -> bool:
        """Whether everything was listed once. Before that nothing can be said to be absent."""
        return not self._unlisted

    def job(self, namespace: str, name: str) -> JsonObject | None:
        """A job, or what is kept of one that is settled; None where there is none."""
        return self._objects[JOBS].get((namespace, name))

    def is_remnant(self, namespace: str, name: str) -> bool:
        """Whether the job is settled, so that the API server has more of it."""
        return (namespace, name) in self._remnants

    def jobs(self) -> tuple[JsonObject, ...]:
        """All jobs."""
        return tuple(self._objects[JOBS].values())

    def clusters(self) -> tuple[JsonObject, ...]:
        """All RayClusters of jobs."""
        return tuple(self._objects[CLUSTERS].values())

    def of_job(self, kind: ResourceType, namespace: str, uid: str) -> tuple[JsonObject, ...]:
        """All clusters or pods that carry a job's UID, by name."""
        found = self._of_jobs.get((kind, namespace, uid), {})
        return tuple(found[name] for name in sorted(found))

    def newest_of_job(self, kind: ResourceType, namespace: str, uid: str) -> int:
        """The newest version of a job's clusters or pods; -1 where none is known. What is asked for after this must be
        as new."""
        return max((_version(raw) for raw in self.of_job(kind, namespace, uid)), default=-1)

    def version_of_job(self, namespace: str, name: str) -> int:
        """The version of a job; -1 where it is not known."""
        return _version(self._objects[JOBS].get((namespace, name), {}))

    def is_missing(self, kind: ResourceType) -> bool:
        """Whether the API server does not know this kind of object."""
        return kind in self._missing

    def forbidden(self, namespace: str) -> str | None:
        """Why what is here of a namespace is no longer kept up to date, in the API server's words."""
        found = [words for (_, where), words in self._forbidden.items() if where in (None, namespace)]
        return found[0] if found else None

    @property
    def num_objects(self) -> int:
        """Of all kinds."""
        return sum(map(len, self._objects.values()))

    def uids(self) -> Iterator[str]:
        """Of everything that is here."""
        for objects in self._objects.values():
            for raw in objects.values():
                yield _uid(raw)

    def note(self, kind: ResourceType, event_type: str, raw: JsonObject) -> bool:
        """Takes one state of an object, of an event or an answer. Says whether it is news."""
        key, uid, version = _key(raw), _uid(raw), _version(raw)
        known = self._objects[kind].get(key)
        if event_type == DELETED:
            self._deleted[uid] = _Deleted(kind, key[0], version)
            if known is None or _uid(known) != uid:
                return False
            self._remove(kind, known)
            return True
        gone = self._deleted.get(uid)
        if gone is not None and _is_as_old(version, gone.version):
            return False
        if known is not None and _is_as_old(version, _version(known)):
            return False
        if known is not None:
            self._remove(kind, known)
        self._put(kind, raw)
        return True

    def replace(
        self, kind: ResourceType, namespace: str | None, listed: Iterable[JsonObject], version: str
    ) -> tuple[JsonObject, ...]:
        """Takes a listing of a kind in a namespace (None: in all), made at this version. What is newer than the listing
        stays as it is. Returns what was here and is gone."""
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
            self.note(kind, "", raw)
        self._deleted = {
            uid: gone
            for uid, gone in self._deleted.items()
            if gone.kind != kind or namespace not in (None, gone.namespace) or not _is_as_old(gone.version, listed_at)
        }
        self._missing.discard(kind)
        self._forbidden.pop((kind, namespace), None)
        self._unlisted.discard((kind, namespace))
        return tuple(removed)

    def note_missing(self, kind: ResourceType) -> None:
        """The API server does not know this kind of object, so there are none."""
        for known in list(self._objects[kind].values()):
            self._remove(kind, known)
        self._missing.add(kind)
        self._forbidden = {place: words for place, words in self._forbidden.items() if place[0] != kind}
        self._unlisted = {place for place in self._unlisted if place[0] != kind}

    def note_forbidden(self, kind: ResourceType, namespace: str | None, words: str) -> None:
        """The operator may not list this kind there: what is known stays, and counts as old."""
        self._forbidden[kind, namespace] = words
        self._unlisted.discard((kind, namespace))

    def _put(self, kind: ResourceType, raw: JsonObject) -> None:
        # Who wrote which field is as long as the fields, and of no use here.
        metadata = {name: value for name, value in object_at(raw, "metadata").items() if name != "managedFields"}
        kept: JsonObject = {**raw, "metadata": metadata}
        if kind == JOBS and is_settled(raw):
            kept = _remnant(raw)
            self._remnants.add(_key(raw))
        self._objects[kind][_key(raw)] = kept
        if kind != JOBS:
            self._of_jobs.setdefault(_place(kind, raw), {})[_key(raw)[1]] = kept

    def _remove(self, kind: ResourceType, known: JsonObject) -> None:
        del self._objects[kind][_key(known)]
        if kind == JOBS:
            self._remnants.discard(_key(known))
        of_job = self._of_jobs.get(_place(kind, known))
        if of_job is not None:
            of_job.pop(_key(known)[1], None)
            if not of_job:
                del self._of_jobs[_place(kind, known)]


def job_uid(raw: JsonObject) -> str:
    """UID of the job that a cluster or a pod belongs to; empty where it says none."""
    return text_at(object_at(raw, "metadata", "labels"), LABEL_JOB_UID)


def is_settled(job: JsonObject) -> bool:
    """Whether it has ended and was seen to have left nothing, and nobody has changed it since."""
    metadata, status = object_at(job, "metadata"), object_at(job, "status")
    is_going = optional_text_at(metadata, "deletionTimestamp") is not None
    is_seen = at(status, "observedGeneration") == at(metadata, "generation")
    return bool(text_at(status, "result", "cleanedUpAt")) and is_seen and not is_going and not _is_to_be_tried(job)


def require_news(what: str, version: str, known: int) -> None:
    """Raises UnavailableError for an answer of a version older than one that was known before it was asked for: what
    is missing in it is not gone."""
    if 0 <= version_number(version) < known:
        raise UnavailableError(f"{what}: the answer is of version {version}, older than {known}, which was seen before")


def version_number(version: str) -> int:
    """-1 for a resource version that is no number, which is nothing that Kubernetes promises, and what all its servers
    do."""
    return int(version) if version.isascii() and version.isdecimal() else -1


def _remnant(job: JsonObject) -> JsonObject:
    """What has to be known of a job that is settled: who it is, how it ended, and when it is to be deleted."""
    metadata, status = object_at(job, "metadata"), object_at(job, "status")
    return {
        "metadata": {name: metadata[name] for name in KEPT_METADATA if name in metadata},
        "spec": {"runPolicy": dict(object_at(job, "spec", "runPolicy"))},
        "status": {name: status[name] for name in KEPT_STATUS if name in status},
    }


def _is_to_be_tried(job: JsonObject) -> bool:
    """Whether somebody has asked for another attempt that nobody has seen to yet."""
    request = text_at(object_at(job, "metadata", "annotations"), ANNOTATION_RETRY)
    return bool(request) and request != text_at(job, "status", "handledRequests", "retry")


def _place(kind: ResourceType, raw: JsonObject) -> tuple[ResourceType, str, str]:
    return kind, _key(raw)[0], job_uid(raw)


def _key(raw: JsonObject) -> tuple[str, str]:
    return text_at(raw, "metadata", "namespace"), text_at(raw, "metadata", "name")


def _uid(raw: JsonObject) -> str:
    return text_at(raw, "metadata", "uid")


def _version(raw: JsonObject) -> int:
    return version_number(text_at(raw, "metadata", "resourceVersion"))


def _is_as_old(version: int, other: int) -> bool:
    """Whether a state is the other one, or an older one. Of versions that cannot be compared, what came last is new."""
    return 0 <= version <= other
