"""From what happens to objects to keys on the work queue: only what may matter becomes one."""

from __future__ import annotations

from datetime import datetime

from rljob_api.constants import ANNOTATION_RETRY, ANNOTATION_STOP, LABEL_JOB
from rljob_operator.controller.loop import JobKey
from rljob_operator.kube.cache import DELETED, ObjectCache, is_settled, job_uid
from rljob_operator.kube.objects import CLUSTERS, JOBS, PODS, ResourceType
from rljob_operator.kube.observed_objects import time_at
from rljob_operator.kube.server_clock import ServerClock
from rljob_operator.raw_json import JsonObject, integer_at, object_at, optional_text_at, text_at
from rljob_operator.workqueue import WorkQueue


class JobVersions:
    """Tells what is new about a job from its status, which nobody but the operator writes."""

    def __init__(self) -> None:
        self._known: dict[JobKey, tuple[str, int, bool, str, str]] = {}

    def is_news(self, key: JobKey, event_type: str, job: JsonObject) -> bool:
        """Whether more than the status has changed since the last event about this job."""
        if event_type == DELETED:
            self._known.pop(key, None)
            return True
        metadata = object_at(job, "metadata")
        annotations = object_at(metadata, "annotations")
        version = (
            text_at(metadata, "uid"),
            integer_at(metadata, "generation") or 0,
            optional_text_at(metadata, "deletionTimestamp") is not None,
            text_at(annotations, ANNOTATION_STOP),
            text_at(annotations, ANNOTATION_RETRY),
        )
        known = self._known.get(key)
        self._known[key] = version
        return known != version


class News:
    """For one event loop."""

    def __init__(self, cache: ObjectCache, queue: WorkQueue[JobKey], clock: ServerClock) -> None:
        self._cache = cache
        self._queue = queue
        self._clock = clock
        self._versions = JobVersions()
        self._late: set[str] = set()
        """UIDs of the clusters of jobs that are over, such as kept ones, that were looked at."""
        self._heard: set[str] | None = set()
        """UIDs of what the watches told of; None once nobody asks any more."""

    def on_event(self, kind: ResourceType, event_type: str, raw: JsonObject) -> None:
        """What a watch tells; the type is empty for what was there when it began."""
        if self._heard is not None:
            self._heard.add(text_at(raw, "metadata", "uid"))
        is_news = self._cache.note(kind, event_type, raw)
        if kind == JOBS:
            key = JobKey(text_at(raw, "metadata", "namespace"), text_at(raw, "metadata", "name"))
            # Before all is listed nothing is worked on; then every job that needs it is.
            if self._versions.is_news(key, event_type, raw) and self._cache.is_complete:
                self._look(key, raw)
        elif is_news and self._cache.is_complete:
            self.on_part(raw, kind, event_type)

    def on_part(self, part: JsonObject, kind: ResourceType = PODS, event_type: str = "MODIFIED") -> None:
        """Something happened to a cluster or a pod, or it is gone."""
        key = JobKey(text_at(part, "metadata", "namespace"), _job_name(part))
        job = self._cache.job(*key)
        if job is None or text_at(job, "metadata", "uid") != job_uid(part):
            return
        # Who led before, and comes back late, may make a cluster for a job that is over.
        is_late = kind == CLUSTERS and event_type in ("", "ADDED")
        if is_late or not is_settled(job):
            self._queue.add(key)

    def on_listed(self, job: JsonObject) -> None:
        """A job was listed."""
        self._look(JobKey(text_at(job, "metadata", "namespace"), text_at(job, "metadata", "name")), job)

    def on_listed_clusters(self) -> None:
        """All clusters were listed: that of a job which is over is looked at once, as if it had just been made."""
        late: set[str] = set()
        for cluster in self._cache.clusters():
            uid = text_at(cluster, "metadata", "uid")
            job = self._cache.job(text_at(cluster, "metadata", "namespace"), _job_name(cluster))
            if job is not None and is_settled(job):
                late.add(uid)
                if uid not in self._late:
                    self.on_part(cluster, CLUSTERS, "ADDED")
        self._late = late

    def has_heard_of_all(self) -> bool:
        """Whether the watches told of everything that is known; to be asked once, when they have begun."""
        heard, self._heard = self._heard or set(), None
        return heard.issuperset(self._cache.uids())

    def on_gone(self, key: JobKey) -> None:
        """A job is no longer listed."""
        self._queue.add(key)

    def _look(self, key: JobKey, job: JsonObject) -> None:
        seconds = seconds_until_look(job, self._clock.now())
        if seconds == 0:
            self._queue.add(key)
        elif seconds is not None:
            self._queue.add_after(key, seconds)


def seconds_until_look(job: JsonObject, now: datetime) -> float | None:
    """0 for a job that needs a look now; None for one that needs none, ever: it has ended, and nothing of it is left.
    Reads a job as it is stored, or what is kept of it."""
    if not is_settled(job):
        return 0.0
    lifetime = integer_at(job, "spec", "runPolicy", "ttlSecondsAfterFinished")
    ended = time_at(job, "status", "result", "at")
    if lifetime is None or ended is None:
        return None
    return max(0.0, lifetime - (now - ended).total_seconds())


def _job_name(part: JsonObject) -> str:
    return text_at(object_at(part, "metadata", "labels"), LABEL_JOB)
