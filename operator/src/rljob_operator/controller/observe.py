"""Observes one job: reads its objects from the cache that watches fill, and polls the Ray dashboard.

Before an effect that cannot be undone, the objects are read again from the API server.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

from rljob_api.conditions import Reason
from rljob_api.constants import ANNOTATION_TOKEN_KEY, LABEL_JOB_UID, STACKS_SECONDS
from rljob_api.v1alpha1.status import Attempt
from rljob_operator.controller.operator_context import OperatorContext
from rljob_operator.kube.allowed_calls import CLUSTERS, JOBS, PODS, ResourceType
from rljob_operator.kube.cache import reject_stale
from rljob_operator.kube.errors import ForbiddenError, NotFoundError, ResourceTypeMissingError
from rljob_operator.kube.explaining_events import ExplainingEvents, by_pod
from rljob_operator.kube.node_leases import NodeLeases
from rljob_operator.kube.observed_objects import JobObject, JobReader, controller_uid, observed_cluster, time_at
from rljob_operator.kube.pod_problems import (
    is_head,
    is_of_ray_cluster,
    is_on_not_ready_node,
    is_ready,
    needs_events,
    observed_pod,
)
from rljob_operator.kube.server_clock import Ages
from rljob_operator.manifests.access import derived_token, key_id
from rljob_operator.manifests.naming import submission_id
from rljob_operator.manifests.ray_submission import stacks_submission_id
from rljob_operator.raw_json import JsonObject, text_at
from rljob_operator.ray.client import Dashboard, RayClient
from rljob_operator.ray.run_watcher import RunWatcher
from rljob_operator.reconcile.observed import (
    EffectFailure,
    Observed,
    ObservedCluster,
    ObservedJob,
    ObservedPod,
    ObservedRay,
    Reachability,
)
from rljob_operator.reconcile.status_draft import moment, seconds_since
from rljob_operator.settings import read_token_keys

CLUSTER_PATIENCE = timedelta(seconds=5)
"""Age that a RayCluster without pods must have before its events are read: KubeRay needs some time to create the
pods."""
NOT_ASKED = ObservedRay(Reachability.NOT_ASKED)
JsonObjects = tuple[JsonObject, ...]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Observation:
    """The observed state of a job, and the objects with which effects are carried out."""

    observed: Observed
    dashboard: Dashboard | None
    """Client for the dashboard of the current attempt's cluster; None if there is no such cluster."""
    clusters: Mapping[str, JsonObject]
    """The RayClusters of the job as API objects, by name."""
    is_live: bool
    """Whether clusters and pods were read from the API server, not from the cache."""
    was_ray_asked: bool = True
    """False if the dashboard has failed for a while and was not polled now: `observed.ray` has its last failure."""


@dataclass(frozen=True)
class _ClustersAndPods:
    """The RayClusters and pods of a job as API objects, and how they were read."""

    clusters: JsonObjects
    pods: JsonObjects
    kuberay_installed: bool
    """Whether the API server knows the kind RayCluster."""
    forbidden: str | None
    """The API server's message if the operator is not allowed to read clusters or pods; else None."""
    are_live: bool
    """Whether they were read from the API server, not from the cache."""


class Observer:
    """Observes the jobs of one operator process. It remembers since when a state has lasted, such as a dashboard that
    does not respond."""

    def __init__(self, context: OperatorContext, ray: RayClient, ages: Ages) -> None:
        self._objects = context.objects
        self._cache = context.cache
        self._settings = context.settings
        self._slots = context.slots
        self._clock = context.clock
        self._ray = ray
        self._ages = ages
        self._watcher = RunWatcher(context.clock.monotonic)
        self._leases = NodeLeases(context.objects, context.clock)
        self._reader = JobReader()
        self._events = ExplainingEvents(context.objects, context.clock)

    async def observe(
        self, job: JobObject, failure: EffectFailure | None, ask_ray_at_once: bool = False
    ) -> Observation:
        """Observes a job through the cache and its dashboard. If the dashboard fails, nothing is raised: the error is
        in the result. `failure`: the newest failure of an effect, which becomes part of the result. `ask_ray_at_once`:
        poll the dashboard even if it has failed for a while."""
        observed_job = job.observed
        parts = _ClustersAndPods(
            _owned(self._cache.of_job(CLUSTERS, observed_job.namespace, observed_job.uid), observed_job),
            _of_clusters(self._cache.of_job(PODS, observed_job.namespace, observed_job.uid)),
            not self._cache.is_missing(CLUSTERS),
            self._cache.forbidden(observed_job.namespace),
            are_live=False,
        )
        observation = await self._observation(observed_job, parts, NOT_ASKED, failure)
        key = f"{observed_job.namespace}/{observed_job.name}"
        if observation.dashboard is None:
            self._watcher.forget(key)
            return observation
        head = _head_to_poll(observed_job, parts)
        if head is None:
            self._watcher.poll_soon(key)
            return observation
        was_ray_asked = ask_ray_at_once or not self._watcher.is_waiting(key)
        async with self._slots.released():
            ray = await self._watcher.observe(
                key,
                observation.dashboard,
                _newest_submission(observed_job),
                _expected_stacks_program(observed_job),
                num_pods=_num_running_pods(observed_job, parts),
                at_once=ask_ray_at_once,
            )
        pods = observation.observed.pods
        if ray.reachability is Reachability.UNREACHABLE:
            pods = _with_silent_node(
                pods, head, await self._leases.seconds_since_renewal(text_at(head, "spec", "nodeName"))
            )
        observed = replace(observation.observed, ray=ray, pods=pods)
        return replace(observation, observed=observed, was_ray_asked=was_ray_asked)

    async def observe_again(
        self, job: JobObject, before: Observation, failure: EffectFailure | None
    ) -> tuple[JobObject, Observation] | None:
        """Observes the job again through the API server, without a new poll of the dashboard. The state of Ray and of
        silent nodes is taken from `before`, if the newest submission is the same and there is still a head pod to poll.
        Returns None if the job was deleted, is being deleted or was created again. Raises KubeError; but if the
        operator is not allowed to read the job, returns `before` with this error as `forbidden`."""
        former = job.observed
        try:
            job = await self.read_job(former.namespace, former.name)
        except NotFoundError:
            return None
        except ForbiddenError as error:
            return job, replace(before, observed=replace(before.observed, forbidden=str(error)))
        if job.observed.uid != former.uid or job.observed.deleting:
            return None
        parts = await self._read_parts(job.observed)
        is_same_run = _newest_submission(job.observed) == _newest_submission(former)
        ray = before.observed.ray if is_same_run and _head_to_poll(job.observed, parts) is not None else NOT_ASKED
        observation = await self._observation(job.observed, parts, ray, failure)
        silent_seconds = {pod.name: pod.node_silent_seconds for pod in before.observed.pods}
        pods = tuple(
            replace(pod, node_silent_seconds=max(pod.node_silent_seconds, silent_seconds.get(pod.name, 0.0)))
            if ray.reachability is Reachability.UNREACHABLE
            else pod
            for pod in observation.observed.pods
        )
        return job, replace(observation, observed=replace(observation.observed, pods=pods))

    def forget(self, namespace: str, name: str) -> None:
        """Forgets a job that was deleted, or is finished and cleaned up."""
        self._reader.forget(namespace, name)
        self._watcher.forget(f"{namespace}/{name}")

    def known_job(self, namespace: str, name: str) -> JobObject | None:
        """The job from the cache; None if the cache has no such job. Raises KubeError if the job's status cannot be
        parsed."""
        raw = self._cache.job(namespace, name)
        return self._reader.read(raw) if raw is not None else None

    async def read_job(self, namespace: str, name: str) -> JobObject:
        """The job from the API server. Raises NotFoundError if it does not exist, and another KubeError if it cannot be
        read or the response is stale."""
        known = self._cache.job_version(namespace, name)
        raw = await self._objects.get(JOBS, namespace, name)
        reject_stale(f"RLJob {namespace}/{name}", text_at(raw, "metadata", "resourceVersion"), known)
        self._cache.store(JOBS, "", raw)
        return self._reader.read(raw)

    async def _read_parts(self, job: ObservedJob) -> _ClustersAndPods:
        """Reads the job's clusters and pods from the API server; if the operator is not allowed to read one of the two
        kinds, takes this kind from the cache."""
        labels = f"{LABEL_JOB_UID}={job.uid}"
        forbidden: str | None = None
        found: dict[ResourceType, JsonObjects] = {}
        is_installed = True
        for kind in (CLUSTERS, PODS):
            known = self._cache.newest_version(kind, job.namespace, job.uid)
            try:
                listing = await self._objects.listing(kind, job.namespace, labels=labels)
                reject_stale(f"{kind.plural} of RLJob {job.namespace}/{job.name}", listing.version, known)
                found[kind] = listing.items
                for raw in found[kind]:
                    self._cache.store(kind, "", raw)
            except ForbiddenError as error:
                forbidden = str(error)
                found[kind] = self._cache.of_job(kind, job.namespace, job.uid)
            except ResourceTypeMissingError:
                found[kind], is_installed = (), False
        return _ClustersAndPods(
            _owned(found[CLUSTERS], job),
            _of_clusters(found[PODS]),
            is_installed,
            forbidden,
            are_live=forbidden is None,
        )

    async def _observation(
        self, job: ObservedJob, parts: _ClustersAndPods, ray: ObservedRay, failure: EffectFailure | None
    ) -> Observation:
        clusters = tuple([await self._observed_cluster(job.namespace, raw, parts.pods) for raw in parts.clusters])
        pods = await self._observed_pods(job.namespace, parts.pods)
        observed = Observed(job, parts.kuberay_installed, clusters, pods, ray, failure, parts.forbidden)
        raw_cluster = _current_cluster(job, parts)
        dashboard = self._dashboard(job, raw_cluster) if raw_cluster is not None else None
        by_name = {text_at(raw, "metadata", "name"): raw for raw in parts.clusters}
        return Observation(observed, dashboard, by_name, parts.are_live)

    async def _observed_cluster(self, namespace: str, raw: JsonObject, pods: Sequence[JsonObject]) -> ObservedCluster:
        """A cluster as observed. The events that explain why it has no pods are only read if it has none and is older
        than `CLUSTER_PATIENCE`, and not suspended."""
        workload = self._cache.workload_of(namespace, text_at(raw, "metadata", "uid"))
        found = observed_cluster(raw, workload)
        created = time_at(raw, "metadata", "creationTimestamp")
        has_pods = any(controller_uid(pod) == found.uid for pod in pods)
        is_young = created is None or self._clock.now() - created < CLUSTER_PATIENCE
        if has_pods or found.pod_creation_error or found.deleting or found.suspended or is_young:
            return found
        async with self._slots.released():
            return observed_cluster(raw, workload, await self._events.of_cluster(namespace, found.uid))

    async def _observed_pods(self, namespace: str, pods: Sequence[JsonObject]) -> tuple[ObservedPod, ...]:
        now = self._clock.now()
        unclear = {text_at(pod, "metadata", "uid") for pod in pods if needs_events(pod, now)}
        events: dict[str, list[JsonObject]] = {}
        if unclear:
            # One request for all pods of the namespace: for a large job with a missing volume, one request for each pod
            # would be too many.
            async with self._slots.released():
                events = by_pod(await self._events.of_pods(namespace))
        return tuple(
            observed_pod(
                pod,
                now,
                self._ages,
                events.get(uid, ()) if (uid := text_at(pod, "metadata", "uid")) in unclear else (),
            )
            for pod in pods
        )

    def _dashboard(self, job: ObservedJob, cluster: JsonObject) -> Dashboard:
        """A client for the dashboard of a cluster. It tries the tokens from all of the operator's keys, first the one
        from the key that the cluster's annotation names."""
        name = text_at(cluster, "metadata", "name")
        annotated = text_at(cluster, "metadata", "annotations", ANNOTATION_TOKEN_KEY)
        keys = sorted(read_token_keys(self._settings.token_keys_folder).keys, key=lambda key: key_id(key) != annotated)
        url = self._settings.dashboard_url.format(cluster=name, namespace=job.namespace)
        return self._ray.dashboard(url, job.namespace, [derived_token(key, job.identity, name) for key in keys])


def _owned(clusters: JsonObjects, job: ObservedJob) -> JsonObjects:
    """The clusters that the job owns. The label with the job's UID is not enough: anybody can copy it."""
    return tuple(raw for raw in clusters if controller_uid(raw) == job.uid)


def _of_clusters(pods: JsonObjects) -> JsonObjects:
    """The pods of RayClusters; see `is_of_ray_cluster`."""
    return tuple(raw for raw in pods if is_of_ray_cluster(raw))


def _current_attempt(job: ObservedJob) -> Attempt | None:
    """The attempt that has not ended yet, in any state from Provisioning to Stopping; None between attempts and after
    the end of the job."""
    attempts = job.status.attempts
    return attempts[-1] if attempts and attempts[-1].ended is None and job.status.result is None else None


def _current_cluster(job: ObservedJob, parts: _ClustersAndPods) -> JsonObject | None:
    """The RayCluster of the current attempt; None if there is none."""
    attempt = _current_attempt(job)
    if attempt is None:
        return None
    for raw in parts.clusters:
        same_uid = attempt.cluster_uid in (None, text_at(raw, "metadata", "uid"))
        if text_at(raw, "metadata", "name") == attempt.cluster and same_uid:
            return raw
    return None


def _head_to_poll(job: ObservedJob, parts: _ClustersAndPods) -> JsonObject | None:
    """The head pod of the current attempt's cluster, if its dashboard should be polled; else None.

    It is polled if the pod is ready, or if its node is not ready: on such a node Kubernetes marks every pod as not
    ready, but Ray may still respond, and then the head is not lost. Pods of an earlier cluster with this name do not
    count."""
    cluster = _current_cluster(job, parts)
    uid = text_at(cluster, "metadata", "uid") if cluster is not None else ""
    heads = (pod for pod in parts.pods if uid and controller_uid(pod) == uid and is_head(pod))
    return next((head for head in heads if is_ready(head) or is_on_not_ready_node(head)), None)


def _num_running_pods(job: ObservedJob, parts: _ClustersAndPods) -> int:
    """The number of running pods of the current attempt's cluster, at most as many as the job requests. Other pods cost
    a user nothing, and a user may create pods with any owner, so they must not increase what the operator reads."""
    cluster = _current_cluster(job, parts)
    uid = text_at(cluster, "metadata", "uid") if cluster is not None else ""
    running = sum(controller_uid(pod) == uid and text_at(pod, "status", "phase") == "Running" for pod in parts.pods)
    pools = job.spec.pools if job.spec is not None else ()
    return min(running, 1 + sum(pool.nodes for pool in pools)) if pools else running


def _newest_submission(job: ObservedJob) -> str | None:
    """The submission id of the current attempt's trainer; None if it was not submitted."""
    attempt = _current_attempt(job)
    if attempt is None or attempt.submissions == 0:
        return None
    return submission_id(job.name, attempt.number, attempt.submissions)


def _expected_stacks_program(job: ObservedJob) -> str | None:
    """Submission id of the program that writes the stack traces; None unless the trainer has stalled and Ray should
    have this program now."""
    submission, attempt = _newest_submission(job), _current_attempt(job)
    stop = attempt.stop if attempt is not None else None
    if submission is None or stop is None or stop.reason != Reason.STALLED or stop.sent_at is None:
        return None
    # For a stalled trainer, `sent_at` is the time from which it may write its stack traces. As long as Ray does not
    # have the program, `reconcile.stops` moves this time, but for at most `STACKS_SECONDS`. Then the operator stops the
    # trainer without stack traces.
    may_restart = seconds_since(stop.requested_at, moment(stop.sent_at)) < STACKS_SECONDS
    return stacks_submission_id(submission) if may_restart else None


def _with_silent_node(pods: tuple[ObservedPod, ...], head: JsonObject, seconds: float) -> tuple[ObservedPod, ...]:
    """The pods. For the pods on the head's node, `node_silent_seconds` becomes at least `seconds`."""
    node = text_at(head, "spec", "nodeName")
    return tuple(
        replace(pod, node_silent_seconds=max(pod.node_silent_seconds, seconds)) if node and pod.node == node else pod
        for pod in pods
    )
