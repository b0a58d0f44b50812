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
from rljob_operator.kube.pods import LABEL_CLUSTER, is_head, is_ready, needs_events, pod_view
from rljob_operator.kube.views import JobObject, cluster_view, controller_uid, time_at
from rljob_operator.manifests.naming import cluster_name, submission_id
from rljob_operator.manifests.objects import JobIdentity
from rljob_operator.manifests.secrets import derived_token, key_id
from rljob_operator.raw_json import JsonObject, text_at
from rljob_operator.ray.client import Dashboard, RayClient
from rljob_operator.ray.look import look
from rljob_operator.reconcile.observed import (
    Answer,
    ClusterView,
    EffectFailure,
    JobView,
    Observed,
    PodView,
    RayView,
)
from rljob_operator.settings import Settings, read_token_keys
from rljob_operator.workqueue import Slots

CLUSTER_PATIENCE = timedelta(seconds=5)
"""How long a RayCluster may be without pods before its events are read."""
NOT_ASKED = RayView(Answer.NOT_ASKED)


@dataclass(frozen=True)
class Sight:
    """What was seen, and the dashboard through which Ray can be told something; None where there is no cluster."""

    observed: Observed
    dashboard: Dashboard | None


def identity(job: JobView) -> JobIdentity:
    """Who the job is, for its manifests."""
    return JobIdentity(job.namespace, job.name, job.uid)


def is_finished(job: JobView) -> bool:
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

    async def observe(self, job: JobObject, failure: EffectFailure | None) -> Sight:
        """Everything `reconcile` asks for. Raises KubeError; what a dashboard does never raises."""
        view = job.view
        attempt = view.status.attempts[-1] if view.status.attempts else None
        # Before the first attempt only whether KubeRay is there matters.
        name = attempt.cluster if attempt is not None else cluster_name(view.name, 1)
        try:
            cluster = await self._cluster(view.namespace, name)
        except ResourceTypeMissingError:
            return Sight(Observed(view, False, None, (), NOT_ASKED, failure), None)
        if attempt is None:
            return Sight(Observed(view, True, None, (), NOT_ASKED, failure), None)
        pods = await self._objects.list_all(PODS, view.namespace, labels=f"{LABEL_CLUSTER}={name}")
        seen = await self._cluster_view(view.namespace, cluster, pods) if cluster is not None else None
        pod_views = await self._pod_views(view.namespace, pods)
        dashboard = self._dashboard(view, cluster) if cluster is not None and _is_ours(seen, view) else None
        ray = NOT_ASKED
        if dashboard is not None and seen is not None and not is_finished(view) and _has_ready_head(pods, seen.uid):
            async with self._slots.aside():
                ray = await look(dashboard, _newest_submission(view, attempt))
        return Sight(Observed(view, True, seen, pod_views, ray, failure), dashboard)

    async def _cluster(self, namespace: str, name: str) -> JsonObject | None:
        try:
            return await self._objects.get(CLUSTERS, namespace, name)
        except NotFoundError:
            return None

    async def _cluster_view(self, namespace: str, raw: JsonObject, pods: Sequence[JsonObject]) -> ClusterView:
        view = cluster_view(raw)
        created = time_at(raw, "metadata", "creationTimestamp")
        if pods or view.pod_creation_error or created is None or self._now() - created < CLUSTER_PATIENCE:
            return view
        about = f"involvedObject.uid={view.uid}"
        return cluster_view(raw, await self._objects.list_all(CORE_EVENTS, namespace, fields=about))

    async def _pod_views(self, namespace: str, pods: Sequence[JsonObject]) -> tuple[PodView, ...]:
        now = self._now()
        unclear = {text_at(pod, "metadata", "uid") for pod in pods if needs_events(pod, now)}
        events: dict[str, list[JsonObject]] = {}
        if unclear:
            # One request for all pods: a large job that lacks a volume would otherwise send one for each.
            about = "involvedObject.kind=Pod,type=Warning"
            for event in await self._objects.list_all(CORE_EVENTS, namespace, fields=about):
                events.setdefault(text_at(event, "involvedObject", "uid"), []).append(event)
        return tuple(
            pod_view(pod, now, events.get(uid, ()) if (uid := text_at(pod, "metadata", "uid")) in unclear else ())
            for pod in pods
        )

    def _dashboard(self, job: JobView, cluster: JsonObject) -> Dashboard:
        """With the token of the key that the cluster was made with first, if the operator still has it."""
        name = text_at(cluster, "metadata", "name")
        made_with = text_at(cluster, "metadata", "annotations", ANNOTATION_TOKEN_KEY)
        keys = sorted(read_token_keys(self._settings.token_keys_folder).keys, key=lambda key: key_id(key) != made_with)
        url = self._settings.dashboard_url.format(cluster=name, namespace=job.namespace)
        return self._ray.dashboard(url, [derived_token(key, identity(job), name) for key in keys])


def _is_ours(cluster: ClusterView | None, job: JobView) -> bool:
    return cluster is not None and cluster.owner_uid == job.uid


def _has_ready_head(pods: Sequence[JsonObject], cluster_uid: str) -> bool:
    """Pods of a former cluster of this name may still be there."""
    return any(is_head(pod) and is_ready(pod) and controller_uid(pod) == cluster_uid for pod in pods)


def _newest_submission(job: JobView, attempt: Attempt) -> str | None:
    if attempt.submissions == 0:
        return None
    return submission_id(job.name, attempt.number, attempt.submissions)
