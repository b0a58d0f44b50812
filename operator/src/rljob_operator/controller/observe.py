"""Looks at everything that matters for one job, on the API server and at its Ray dashboard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from rljob_api.conditions import ConditionType
from rljob_api.constants import ANNOTATION_TOKEN_KEY
from rljob_api.v1alpha1.status import Attempt, ConditionStatus
from rljob_operator.kube.errors import NotFoundError, ResourceTypeMissingError
from rljob_operator.kube.objects import CLUSTERS, CORE_EVENTS, PODS, KubeObjects
from rljob_operator.kube.observed_objects import JobObject, controller_uid, observed_cluster, time_at
from rljob_operator.kube.pod_problems import LABEL_CLUSTER, is_head, is_ready, needs_events, observed_pod
from rljob_operator.manifests.naming import cluster_name, submission_id
from rljob_operator.manifests.objects import JobIdentity
from rljob_operator.manifests.secrets import derived_token, key_id
from rljob_operator.raw_json import JsonObject, text_at
from rljob_operator.ray.client import Dashboard, RayClient
from rljob_operator.ray.observe_dashboard import observe_dashboard
from rljob_operator.reconcile.observed import (
    EffectFailure,
    Observed,
    ObservedCluster,
    ObservedJob,
    ObservedPod,
    ObservedRay,
    Reachability,
)
from rljob_operator.settings import Settings, read_token_keys
from rljob_operator.workqueue import Slots

CLUSTER_PATIENCE = timedelta(seconds=5)
"""How long a RayCluster may be without pods before its events are read."""
NOT_ASKED = ObservedRay(Reachability.NOT_ASKED)


@dataclass(frozen=True)
class Observation:
    """What was seen, and the dashboard through which Ray can be told something; None where there is no cluster."""

    observed: Observed
    dashboard: Dashboard | None


def identity(job: ObservedJob) -> JobIdentity:
    """Who the job is, for its manifests."""
    return JobIdentity(job.namespace, job.name, job.uid)


def is_finished(job: ObservedJob) -> bool:
    """Whether it is Complete or Failed for good."""
    latched = (ConditionType.COMPLETE, ConditionType.FAILED)
    return any(each.type in latched and each.status is ConditionStatus.TRUE for each in job.status.conditions)


class Observer:
    """For one process; holds nothing of any job. `now`: the time in UTC."""

    def __init__(
        self, objects: KubeObjects, ray: RayClient, settings: Settings, slots: Slots, now: Callable[[], datetime]
    ) -> None:
        self._objects = objects
        self._ray = ray
        self._settings = settings
        self._slots = slots
        self._now = now

    async def observe(self, job: JobObject, failure: EffectFailure | None) -> Observation:
        """Everything `reconcile` asks for. Raises KubeError; what a dashboard does never raises."""
        about = job.observed
        attempt = about.status.attempts[-1] if about.status.attempts else None
        # Before the first attempt only whether KubeRay is there matters.
        name = attempt.cluster if attempt is not None else cluster_name(about.name, 1)
        try:
            cluster = await self._cluster(about.namespace, name)
        except ResourceTypeMissingError:
            return Observation(Observed(about, False, None, (), NOT_ASKED, failure), None)
        if attempt is None:
            return Observation(Observed(about, True, None, (), NOT_ASKED, failure), None)
        pods = await self._objects.list_all(PODS, about.namespace, labels=f"{LABEL_CLUSTER}={name}")
        seen = await self._observed_cluster(about.namespace, cluster, pods) if cluster is not None else None
        observed_pods = await self._observed_pods(about.namespace, pods)
        dashboard = self._dashboard(about, cluster) if cluster is not None and _is_ours(seen, about) else None
        ray = NOT_ASKED
        if dashboard is not None and seen is not None and not is_finished(about) and _has_ready_head(pods, seen.uid):
            async with self._slots.aside():
                ray = await observe_dashboard(dashboard, _newest_submission(about, attempt))
        return Observation(Observed(about, True, seen, observed_pods, ray, failure), dashboard)

    async def _cluster(self, namespace: str, name: str) -> JsonObject | None:
        try:
            return await self._objects.get(CLUSTERS, namespace, name)
        except NotFoundError:
            return None

    async def _observed_cluster(self, namespace: str, raw: JsonObject, pods: Sequence[JsonObject]) -> ObservedCluster:
        found = observed_cluster(raw)
        created = time_at(raw, "metadata", "creationTimestamp")
        if pods or found.pod_creation_error or created is None or self._now() - created < CLUSTER_PATIENCE:
            return found
        about = f"involvedObject.uid={found.uid}"
        return observed_cluster(raw, await self._objects.list_all(CORE_EVENTS, namespace, fields=about))

    async def _observed_pods(self, namespace: str, pods: Sequence[JsonObject]) -> tuple[ObservedPod, ...]:
        now = self._now()
        unclear = {text_at(pod, "metadata", "uid") for pod in pods if needs_events(pod, now)}
        events: dict[str, list[JsonObject]] = {}
        if unclear:
            # One request for all pods: a large job that lacks a volume would otherwise send one for each.
            about = "involvedObject.kind=Pod,type=Warning"
            for event in await self._objects.list_all(CORE_EVENTS, namespace, fields=about):
                events.setdefault(text_at(event, "involvedObject", "uid"), []).append(event)
        return tuple(
            observed_pod(pod, now, events.get(uid, ()) if (uid := text_at(pod, "metadata", "uid")) in unclear else ())
            for pod in pods
        )

    def _dashboard(self, job: ObservedJob, cluster: JsonObject) -> Dashboard:
        """With the token of the key that the cluster was made with first, if the operator still has it."""
        name = text_at(cluster, "metadata", "name")
        made_with = text_at(cluster, "metadata", "annotations", ANNOTATION_TOKEN_KEY)
        keys = sorted(read_token_keys(self._settings.token_keys_folder).keys, key=lambda key: key_id(key) != made_with)
        url = self._settings.dashboard_url.format(cluster=name, namespace=job.namespace)
        return self._ray.dashboard(url, [derived_token(key, identity(job), name) for key in keys])


def _is_ours(cluster: ObservedCluster | None, job: ObservedJob) -> bool:
    return cluster is not None and cluster.owner_uid == job.uid


def _has_ready_head(pods: Sequence[JsonObject], cluster_uid: str) -> bool:
    """Pods of a former cluster of this name may still be there."""
    return any(is_head(pod) and is_ready(pod) and controller_uid(pod) == cluster_uid for pod in pods)


def _newest_submission(job: ObservedJob, attempt: Attempt) -> str | None:
    if attempt.submissions == 0:
        return None
    return submission_id(job.name, attempt.number, attempt.submissions)
