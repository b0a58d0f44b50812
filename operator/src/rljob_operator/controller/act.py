"""Does what a plan says: writes the status, carries out effects, posts events."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from datetime import UTC, datetime

from rljob_api.conditions import Reason
from rljob_api.constants import API_GROUP, API_VERSION, KIND
from rljob_operator.controller.observe import Observation, identity
from rljob_operator.errors import OperatorError
from rljob_operator.kube.errors import KubeError, RefusedError, ResourceTypeMissingError, UnavailableError
from rljob_operator.kube.merge_patch import merge_patch, without_nulls
from rljob_operator.kube.objects import CLUSTERS, EVENTS, NETWORK_POLICIES, SECRETS, KubeObjects
from rljob_operator.kube.observed_objects import JobObject
from rljob_operator.log import about
from rljob_operator.manifests.defaults import Defaults
from rljob_operator.manifests.naming import cluster_name
from rljob_operator.manifests.network_policy import network_policy
from rljob_operator.manifests.ray_cluster import ray_cluster
from rljob_operator.manifests.secrets import derived_token, key_id, token_secret
from rljob_operator.manifests.submission import submission
from rljob_operator.metrics import Metrics
from rljob_operator.raw_json import JsonObject
from rljob_operator.ray.client import Dashboard
from rljob_operator.ray.errors import DashboardUnreachableError, RayError, TokenRejectedError
from rljob_operator.reconcile.observed import EffectFailure, EffectKind, ObservedJob
from rljob_operator.reconcile.plan_types import (
    CreateCluster,
    DeleteCluster,
    Effect,
    EventRecord,
    Plan,
    StopJob,
    SubmitJob,
)
from rljob_operator.settings import Settings, read_token_keys
from rljob_operator.workqueue import Slots

logger = logging.getLogger(__name__)


def kind_of(effect: Effect) -> EffectKind:
    """What sort of effect it is."""
    match effect:
        case CreateCluster():
            return EffectKind.CREATE_CLUSTER
        case SubmitJob():
            return EffectKind.SUBMIT_JOB
        case StopJob():
            return EffectKind.STOP_JOB
        case DeleteCluster():
            return EffectKind.DELETE_CLUSTER


class Actor:
    """For one process; holds nothing of any job. `now`: the time in UTC."""

    def __init__(
        self,
        objects: KubeObjects,
        settings: Settings,
        defaults: Defaults,
        slots: Slots,
        metrics: Metrics,
        now: Callable[[], datetime],
    ) -> None:
        self._objects = objects
        self._settings = settings
        self._defaults = defaults
        self._slots = slots
        self._metrics = metrics
        self._now = now

    async def write_status(self, job: JobObject, plan: Plan) -> None:
        """Writes the plan's status where it differs. Raises ConflictError if the job was changed since it was read."""
        if plan.status == job.observed.status:
            return
        wanted = without_nulls(plan.status.to_wire())
        patch = merge_patch(job.status, wanted) if isinstance(wanted, dict) else {}
        if patch:
            await self._objects.patch_job_status(job.observed.namespace, job.observed.name, patch, job.resource_version)
            self._metrics.status_writes.inc()

    async def carry_out(self, plan: Plan, observation: Observation) -> EffectFailure | None:
        """Does the effects in order, up to the first that fails. Raises KubeError where there is nothing to tell."""
        for effect in plan.effects:
            failure = await self._carry_out(effect, observation)
            kind = kind_of(effect)
            self._metrics.effects.labels(kind.value, "failed" if failure else "done").inc()
            job = f"{observation.observed.job.namespace}/{observation.observed.job.name}"
            if failure is not None:
                logger.warning("%s failed: %s: %s", kind, failure.reason, failure.message, extra=about(job))
                return failure
            logger.info("%s", effect, extra=about(job))
        return None

    async def post(self, plan: Plan, job: ObservedJob) -> None:
        """Posts the events. They are for people: one that cannot be posted is only logged."""
        for event in plan.events:
            try:
                await self._objects.create(EVENTS, job.namespace, self._event(event, job))
            except KubeError as error:
                logger.warning("event %s: %s", event.reason, error, extra=about(f"{job.namespace}/{job.name}"))

    async def _carry_out(self, effect: Effect, observation: Observation) -> EffectFailure | None:
        kind = kind_of(effect)
        try:
            match effect:
                case CreateCluster():
                    await self._create_cluster(effect, observation.observed.job)
                case SubmitJob():
                    await self._submit(effect, observation)
                case StopJob():
                    async with self._slots.aside():
                        await _reached(observation).stop(effect.submission_id)
                case DeleteCluster():
                    await self._objects.delete_cluster(observation.observed.job.namespace, effect.name, effect.uid)
        except RefusedError as error:
            return EffectFailure(kind, Reason.CREATION_REFUSED, str(error))
        except UnavailableError as error:
            # A server that names a time is only busy. Otherwise it may be a dead admission webhook, which lasts until
            # somebody reads of it.
            if kind is not EffectKind.CREATE_CLUSTER or error.retry_after_seconds:
                raise
            return EffectFailure(kind, Reason.CREATION_REFUSED, str(error))
        except ResourceTypeMissingError as error:
            return EffectFailure(kind, Reason.KUBERAY_UNAVAILABLE, str(error))
        except TokenRejectedError as error:
            return EffectFailure(kind, Reason.TOKEN_REJECTED, str(error))
        except DashboardUnreachableError as error:
            return EffectFailure(kind, Reason.DASHBOARD_UNREACHABLE, str(error))
        except RayError as error:
            return EffectFailure(kind, Reason.SUBMISSION_FAILED, str(error))
        return None

    async def _create_cluster(self, effect: CreateCluster, job: ObservedJob) -> None:
        """The RayCluster comes last: KubeRay starts when it sees it, and needs the Secret then."""
        spec = job.spec
        if spec is None:
            raise OperatorError(f"RLJob {job.namespace}/{job.name}: a cluster was planned for a spec that is not valid")
        owner = identity(job)
        name = cluster_name(job.name, effect.attempt)
        key = read_token_keys(self._settings.token_keys_folder).current
        secret = token_secret(owner, name, derived_token(key, owner, name))
        await self._objects.create(SECRETS, job.namespace, secret)
        policy = network_policy(owner, effect.attempt, self._defaults)
        await self._objects.create(NETWORK_POLICIES, job.namespace, policy)
        cluster = ray_cluster(owner, spec, effect.attempt, self._defaults, key_id(key))
        await self._objects.create(CLUSTERS, job.namespace, cluster)

    async def _submit(self, effect: SubmitJob, observation: Observation) -> None:
        """After any error Ray is asked whether it has the job: it may have started before the answer was lost."""
        job, dashboard = observation.observed.job, _reached(observation)
        if job.spec is None:
            raise OperatorError(f"RLJob {job.namespace}/{job.name}: a start was planned for a spec that is not valid")
        async with self._slots.aside():
            try:
                await dashboard.submit(submission(identity(job), job.spec, effect))
            except RayError:
                if await dashboard.job(effect.submission_id) is None:
                    raise

    def _event(self, event: EventRecord, job: ObservedJob) -> JsonObject:
        """As `kubectl describe` shows it. Names must differ; nobody reads them."""
        time = self._now().astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        digest = hashlib.sha256(f"{job.uid} {event.reason} {event.message} {time}".encode()).hexdigest()[:16]
        reference = {
            "apiVersion": f"{API_GROUP}/{API_VERSION}",
            "kind": KIND,
            "namespace": job.namespace,
            "name": job.name,
            "uid": job.uid,
        }
        return {
            "apiVersion": "events.k8s.io/v1",
            "kind": "Event",
            "metadata": {"name": f"{job.name}.{digest}", "namespace": job.namespace},
            "eventTime": time,
            "type": event.type.value,
            "reason": event.reason.value,
            "note": event.message,
            "action": "Reconcile",
            "regarding": reference,
            "reportingController": f"{API_GROUP}/operator",
            "reportingInstance": self._settings.pod_name,
        }


def _reached(observation: Observation) -> Dashboard:
    if observation.dashboard is None:
        raise DashboardUnreachableError("the job has no cluster of its own")
    return observation.dashboard
