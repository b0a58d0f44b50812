"""Adds the keys of jobs to the work queue when watch events or listings arrive.

Events after which a pass would change nothing are ignored.
"""

from __future__ import annotations

from datetime import datetime

from rljob_api.constants import ANNOTATION_RETRY, ANNOTATION_STOP, LABEL_JOB
from rljob_api.v1alpha1.pools import PRIORITY_CLASS_LABEL, QUEUE_LABEL
from rljob_operator.controller.reconcile_loop import JobKey
from rljob_operator.kube.allowed_calls import CLUSTERS, JOBS, WORKLOADS, ResourceType
from rljob_operator.kube.cache import DELETED, ObjectCache, is_finished_and_cleaned_up
from rljob_operator.kube.observed_objects import time_at
from rljob_operator.kube.projections import cluster_uid, job_uid
from rljob_operator.kube.server_clock import ServerClock
from rljob_operator.raw_json import JsonObject, integer_at, object_at, optional_text_at, text_at
from rljob_operator.workqueue import WorkQueue

MAX_EXTRA_REPORTED = 1000
"""The router forgets the reported UIDs of deleted objects when it remembers more UIDs than twice the number of cached
objects plus this number."""


class JobVersions:
    """Distinguishes changes of a job that need a pass from other changes, such as a status that the operator wrote."""

    def __init__(self) -> None:
        self._known: dict[JobKey, tuple[str, int, bool, str, str, str, str]] = {}
        """For each job: UID, generation of the spec, whether it is being deleted, stop request, retry request, and the
        labels for Kueue."""

    def needs_reconcile(self, key: JobKey, event_type: str, job: JsonObject) -> bool:
        """Whether this is the first event for the job, or the job was deleted, or since the last event its spec, a
        request in its annotations or a label for Kueue has changed, or its deletion was requested."""
        if event_type == DELETED:
            self.forget(key)
            return True
        metadata = object_at(job, "metadata")
        annotations, labels = object_at(metadata, "annotations"), object_at(metadata, "labels")
        version = (
            text_at(metadata, "uid"),
            integer_at(metadata, "generation") or 0,
            optional_text_at(metadata, "deletionTimestamp") is not None,
            text_at(annotations, ANNOTATION_STOP),
            text_at(annotations, ANNOTATION_RETRY),
            text_at(labels, QUEUE_LABEL),
            text_at(labels, PRIORITY_CLASS_LABEL),
        )
        known = self._known.get(key)
        self._known[key] = version
        return known != version

    def forget(self, key: JobKey) -> None:
        """Forgets a job that was deleted."""
        self._known.pop(key, None)


class WatchEventRouter:
    """Adds jobs to the work queue when events or listings arrive. For use in one event loop."""

    def __init__(self, cache: ObjectCache, queue: WorkQueue[JobKey], clock: ServerClock) -> None:
        self._cache = cache
        self._queue = queue
        self._clock = clock
        self._versions = JobVersions()
        self._clusters_of_finished: set[str] = set()
        """UIDs of the clusters of finished jobs (such as kept clusters) in the last listing. Their jobs had a pass."""
        self._reported: set[str] | None = set()
        """UIDs of the objects that the watches have reported; None once `have_reported_all` was called."""

    def on_event(self, kind: ResourceType, event_type: str, raw: JsonObject) -> None:
        """Handles a watch event. `event_type` is empty for an object that existed when the watch started."""
        has_changed = self._cache.store(kind, event_type, raw)
        if self._reported is not None:
            self._reported.add(text_at(raw, "metadata", "uid"))
            if len(self._reported) > 2 * self._cache.num_objects + MAX_EXTRA_REPORTED:
                # Forget the UIDs of deleted objects: the first listing may fail for hours, and objects come and go.
                self._reported.intersection_update(self._cache.uids())
        if kind == JOBS:
            key = _key(raw)
            # Until everything has been listed once, nothing is queued; this first listing queues every job that needs a
            # pass.
            if self._versions.needs_reconcile(key, event_type, raw) and self._cache.is_complete:
                self._queue_job(key, raw)
        elif has_changed and self._cache.is_complete:
            if kind == WORKLOADS:
                self._on_workload(raw)
            else:
                self._on_cluster_or_pod(kind, event_type, raw)

    def on_listed_job(self, job: JsonObject) -> None:
        """Queues a listed job if it needs a pass, now or later."""
        self._queue_job(_key(job), job)

    def on_listed_clusters(self) -> None:
        """Handles the listed clusters of finished jobs, whose events may have been lost. A finished job gets a pass if
        it has a new cluster, or if it has no cluster but `status.gpus` is not 0."""
        clusters: set[str] = set()
        jobs_with_cluster: set[JobKey] = set()
        for cluster in self._cache.clusters():
            key, uid = _key_of_job(cluster), text_at(cluster, "metadata", "uid")
            job = self._cache.job(*key)
            if job is not None and _belongs_to(cluster, job) and is_finished_and_cleaned_up(job):
                clusters.add(uid)
                jobs_with_cluster.add(key)
                if uid not in self._clusters_of_finished:
                    self._queue.add(key)
        self._clusters_of_finished = clusters
        for job in self._cache.jobs():
            key = _key(job)
            if integer_at(job, "status", "gpus") and is_finished_and_cleaned_up(job) and key not in jobs_with_cluster:
                self._queue.add(key)

    def have_reported_all(self) -> bool:
        """Whether the watches have reported every cached object. Call it once, when the watches should have started."""
        reported, self._reported = self._reported or set(), None
        return reported.issuperset(self._cache.uids())

    def on_job_deleted(self, key: JobKey) -> None:
        """Queues a job that is no longer listed, so that the pass forgets the job."""
        self._versions.forget(key)
        self._queue.add(key)

    def _on_cluster_or_pod(self, kind: ResourceType, event_type: str, raw: JsonObject) -> None:
        key = _key_of_job(raw)
        job = self._cache.job(*key)
        if job is None or not _belongs_to(raw, job):
            return
        # A finished job needs a pass only for its clusters: a former leader that was paused may create one, and a user
        # may delete the kept one.
        was_created_or_deleted = kind == CLUSTERS and event_type in ("", "ADDED", DELETED)
        if was_created_or_deleted or not is_finished_and_cleaned_up(job):
            self._queue.add(key)

    def _on_workload(self, workload: JsonObject) -> None:
        cluster = self._cache.cluster(cluster_uid(workload))
        # The event "MODIFIED" stands for any change of the cluster's state: the cluster itself exists as before. A user
        # can create a workload with the UID of a cluster in another namespace.
        if cluster is not None and _key(cluster)[0] == _key(workload)[0]:
            self._on_cluster_or_pod(CLUSTERS, "MODIFIED", cluster)

    def _queue_job(self, key: JobKey, job: JsonObject) -> None:
        seconds = seconds_until_reconcile(job, self._clock.now())
        if seconds == 0:
            self._queue.add(key)
        elif seconds is not None:
            self._queue.add_after(key, seconds)


def seconds_until_reconcile(job: JsonObject, now: datetime) -> float | None:
    """Seconds until a job needs a pass: 0 if it needs one now; for a finished job until the operator deletes it, or
    None if it will not. `job`: the API object or the cache's trimmed copy. A pass of a finished job with a kept cluster
    decides itself when the next one is due; after a restart, `on_listed_clusters` queues such a job."""
    if not is_finished_and_cleaned_up(job):
        return 0.0
    lifetime = integer_at(job, "spec", "runPolicy", "ttlSecondsAfterFinished")
    ended = time_at(job, "status", "result", "at")
    if lifetime is None or ended is None:
        return None
    return max(0.0, lifetime - (now - ended).total_seconds())


def _key(job: JsonObject) -> JobKey:
    return JobKey(text_at(job, "metadata", "namespace"), text_at(job, "metadata", "name"))


def _key_of_job(part: JsonObject) -> JobKey:
    """The key of the job that a cluster or a pod belongs to, by its label."""
    return JobKey(text_at(part, "metadata", "namespace"), text_at(object_at(part, "metadata", "labels"), LABEL_JOB))


def _belongs_to(part: JsonObject, job: JsonObject) -> bool:
    """Whether a cluster or a pod belongs to this job, and not to an earlier or later job with the same name."""
    return job_uid(part) == text_at(job, "metadata", "uid")
