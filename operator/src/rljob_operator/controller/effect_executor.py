"""Executes a decision: writes the status, carries out effects, posts events."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable
from datetime import UTC

from rljob_api.conditions import ALARMS, Reason
from rljob_api.constants import API_GROUP, API_VERSION, KIND
from rljob_operator.controller.cluster_creation import ClusterCreation
from rljob_operator.controller.observe import Observation
from rljob_operator.controller.operator_context import OperatorContext
from rljob_operator.errors import OperatorError
from rljob_operator.kube.allowed_calls import (
    CLUSTERS,
    EVENTS,
    JOBS,
    NETWORK_POLICIES,
    merge_patch,
    missing_fields,
    without_nulls,
)
from rljob_operator.kube.errors import (
    DefinitionOutdatedError,
    KubeError,
    RefusedError,
    ResourceTypeMissingError,
    StatusNotWrittenError,
)
from rljob_operator.kube.observed_objects import JobObject
from rljob_operator.log import about
from rljob_operator.manifests.access import network_policy
from rljob_operator.manifests.naming import attempt_in_name
from rljob_operator.manifests.ownership import JobIdentity
from rljob_operator.manifests.ray_submission import stacks_submission, stacks_submission_id, submission
from rljob_operator.raw_json import JsonObject, text_at
from rljob_operator.ray.client import (
    Dashboard,
    DashboardOpenError,
    DashboardUnreachableError,
    RayError,
    TokenRejectedError,
)
from rljob_operator.reconcile.decision import (
    ApplyNetworkPolicy,
    CreateCluster,
    Decision,
    DeleteCluster,
    DeleteJob,
    DumpStacks,
    Effect,
    EventReason,
    EventRecord,
    EventType,
    StopRayJob,
    SubmitRayJob,
    bounded_note,
)
from rljob_operator.reconcile.observed import EffectFailure

POLICY_SECONDS = 60.0
"""Minimum time between two ApplyNetworkPolicy effects for the same cluster."""
ALARM_EVENT_SECONDS = 3600.0
"""Minimum time between two events about the same alarm of a job: a trainer may raise and clear alarms all the time."""

logger = logging.getLogger(__name__)


class EffectExecutor:
    """Executes the decisions of one operator process. It only remembers when it applied network policies again, and
    when it posted events about alarms."""

    def __init__(self, context: OperatorContext) -> None:
        self._objects = context.objects
        self._cache = context.cache
        self._settings = context.settings
        self._defaults = context.defaults
        self._slots = context.slots
        self._metrics = context.metrics
        self._clock = context.clock
        self._require_leadership = context.require_leadership
        self._creation = ClusterCreation(context)
        self._policy_applied_at: dict[str, float] = {}
        """When an ApplyNetworkPolicy effect was last due (monotonic seconds), by the cluster's UID."""
        self._alarm_posted_at: dict[tuple[str, str], float] = {}
        """When an event about an alarm was posted (monotonic seconds), by the job's UID and the alarm. Entries older
        than `ALARM_EVENT_SECONDS` are removed."""

    async def write_status(self, job: JobObject, decision: Decision) -> str:
        """Writes the decision's status if it differs from the job's. Returns the resource version of the job with the
        decision's status.

        Raises ConflictError if the job was changed since it was read, StatusNotWrittenError if the API server rejects
        the status, and DefinitionOutdatedError if the API server dropped fields of the status.
        """
        if decision.status == job.observed.status:
            return job.resource_version
        wanted = without_nulls(decision.status.to_wire())
        patch = merge_patch(without_nulls(job.observed.status.to_wire()), wanted)
        if not patch:
            return job.resource_version
        self._require_leadership()
        namespace, name = job.observed.namespace, job.observed.name
        try:
            written = await self._objects.patch_job_status(namespace, name, patch, job.resource_version)
        except RefusedError as error:
            text = f"RLJob {namespace}/{name}: the API server rejects the new status, so nothing else is done: {error}"
            raise StatusNotWrittenError(text) from error
        self._metrics.status_writes.inc()
        self._cache.store(JOBS, "", written)
        lost = missing_fields({"status": wanted}, written, "status")
        self._metrics.definition_outdated.set(1 if lost else 0)
        if lost:
            raise DefinitionOutdatedError(
                f"CustomResourceDefinition rljobs.rljob.dev is older than this operator (it drops {lost[0]});"
                " apply crds/rljobs.yaml of the operator's version; jobs wait until then"
            )
        return text_at(written, "metadata", "resourceVersion")

    async def execute(
        self, effects: tuple[Effect, ...], observation: Observation, job_version: str
    ) -> EffectFailure | None:
        """Carries out the effects in order and stops at the first failure. Returns this failure; None if there is none.
        Failures for which no condition has a reason are raised as KubeError instead, such as an unreachable API server.

        Args:
            job_version: Resource version of the job for which the effects were decided.
        """
        for effect in effects:
            if isinstance(effect, ApplyNetworkPolicy) and not self._record_policy_if_due(effect, observation):
                continue
            self._require_leadership()
            failure = await self._carry_out(effect, observation, job_version)
            kind = effect.kind
            self._metrics.effects.labels(kind.value, "failed" if failure else "done").inc()
            job = f"{observation.observed.job.namespace}/{observation.observed.job.name}"
            if failure is not None:
                logger.warning("%s failed: %s: %s", kind, failure.reason, failure.message, extra=about(job))
                return failure
            logger.info("%s", effect, extra=about(job))
        await self._restore_policy(observation)
        return None

    async def post(self, events: Iterable[EventRecord], job: JobIdentity) -> None:
        """Posts the events, except those about an alarm that have a recent one. Events only inform users: if one cannot
        be posted, this is logged and not retried."""
        for event in events:
            if not self._claim_event(event, job):
                continue
            try:
                await self._objects.create(EVENTS, job.namespace, self._event(event, job))
            except KubeError as error:
                logger.warning(
                    "event %s was not posted: %s", event.reason, error, extra=about(f"{job.namespace}/{job.name}")
                )

    def _claim_event(self, event: EventRecord, job: JobIdentity) -> bool:
        """Returns False if the event is about an alarm, and the job had one about the same alarm in the last
        `ALARM_EVENT_SECONDS`. Otherwise records that it has one now."""
        if event.reason not in ALARMS and event.reason != Reason.OTHER_ALARM:
            return True
        now, key = self._clock.monotonic(), (job.uid, event.reason)
        posted = {each: at for each, at in self._alarm_posted_at.items() if now < at + ALARM_EVENT_SECONDS}
        self._alarm_posted_at = {key: now} | posted
        return key not in posted

    async def _carry_out(self, effect: Effect, observation: Observation, job_version: str) -> EffectFailure | None:
        kind, job = effect.kind, observation.observed.job
        try:
            match effect:
                case CreateCluster():
                    return await self._creation.execute(effect, observation)
                case SubmitRayJob():
                    await self._submit(effect, observation)
                case StopRayJob():
                    async with self._slots.released():
                        await _require_dashboard(observation).stop(effect.submission_id)
                case DumpStacks():
                    await self._dump_stacks(effect, observation)
                case ApplyNetworkPolicy():
                    await self._apply_policy(effect.cluster, observation)
                case DeleteCluster():
                    if await self._objects.delete(CLUSTERS, job.namespace, effect.name, effect.uid) and effect.event:
                        await self.post([_deletion_event(EventReason.CLUSTER_DELETED, effect.event)], job.identity)
                case DeleteJob():
                    # Before the deletion: an operator that stops between the two repeats both, and the event has the
                    # same name again.
                    await self.post([_deletion_event(EventReason.JOB_DELETED, effect.event)], job.identity)
                    await self._objects.delete(JOBS, job.namespace, job.name, effect.uid, job_version)
        except RefusedError as error:
            return EffectFailure(kind, Reason.CREATION_REJECTED, str(error))
        except ResourceTypeMissingError as error:
            return EffectFailure(kind, Reason.KUBERAY_UNAVAILABLE, str(error))
        except TokenRejectedError as error:
            return EffectFailure(kind, Reason.TOKEN_REJECTED, str(error))
        except DashboardUnreachableError as error:
            return EffectFailure(kind, Reason.DASHBOARD_UNREACHABLE, str(error))
        except DashboardOpenError as error:
            return EffectFailure(kind, Reason.AUTHENTICATION_MISSING, str(error))
        except RayError as error:
            return EffectFailure(kind, Reason.SUBMISSION_FAILED, str(error))
        return None

    def _record_policy_if_due(self, effect: ApplyNetworkPolicy, observation: Observation) -> bool:
        """Returns whether the policy should be applied now: policies are enabled, the cluster exists, and the policy
        was not applied within `POLICY_SECONDS`. If so, records the current time as the time of the application."""
        if not self._defaults.network_policy.enabled:
            return False
        now = self._clock.monotonic()
        self._policy_applied_at = {uid: at for uid, at in self._policy_applied_at.items() if now - at < POLICY_SECONDS}
        uid = text_at(observation.clusters.get(effect.cluster, {}), "metadata", "uid")
        if not uid or uid in self._policy_applied_at:
            return False
        self._policy_applied_at[uid] = now
        return True

    async def _restore_policy(self, observation: Observation) -> None:
        """Applies the policy of the current attempt again if the last listing did not have it. A failure is only
        logged."""
        job = observation.observed.job
        attempt = next(iter(job.status.attempts[-1:]), None)
        cluster = attempt.cluster if attempt is not None and attempt.ended is None else ""
        uid = text_at(observation.clusters.get(cluster, {}), "metadata", "uid")
        if not uid or not self._defaults.network_policy.enabled or not self._cache.lacks_network_policy(uid):
            return
        self._cache.note_policy_applied(uid)
        self._require_leadership()
        try:
            await self._apply_policy(cluster, observation)
        except KubeError as error:
            logger.warning("the network policy was not applied: %s", error, extra=about(f"{job.namespace}/{job.name}"))

    async def _apply_policy(self, cluster: str, observation: Observation) -> None:
        """Applies the policy of a cluster. The cluster may have been created for an earlier attempt than the running
        one; its pods have the number that is in the cluster's name. The label of the cluster could be changed."""
        job = observation.observed.job
        manifest = network_policy(job.identity, attempt_in_name(cluster), self._defaults)
        name = text_at(manifest, "metadata", "name")
        await self._objects.apply(NETWORK_POLICIES, job.namespace, name, manifest)

    async def _submit(self, effect: SubmitRayJob, observation: Observation) -> None:
        """Submits the trainer; raises DashboardOpenError if the dashboard requires no token. After any other error it
        checks whether Ray has the Ray job, and raises the error only if not: Ray may have started the Ray job although
        the response was lost."""
        job, dashboard = observation.observed.job, _require_dashboard(observation)
        if job.spec is None:
            raise OperatorError(
                f"RLJob {job.namespace}/{job.name}: the trainer should be submitted, but the spec cannot be parsed:"
                " this is a bug in the operator"
            )
        async with self._slots.released():
            try:
                await dashboard.submit(
                    submission(
                        job.identity, job.spec, effect.submission_id, effect.attempt, effect.start_number, effect.nodes
                    )
                )
            except DashboardOpenError:
                raise
            except RayError:
                if await dashboard.job(effect.submission_id) is None:
                    raise

    async def _dump_stacks(self, effect: DumpStacks, observation: Observation) -> None:
        """Submits the program that writes the stack traces, unless Ray already has it. If this fails until
        `STACKS_SECONDS` are over, `reconcile` stops the trainer without stack traces."""
        job, dashboard = observation.observed.job, _require_dashboard(observation)
        async with self._slots.released():
            if await dashboard.job(stacks_submission_id(effect.submission_id)) is None:
                await dashboard.submit(stacks_submission(job.identity, effect.submission_id, effect.attempt))

    def _event(self, event: EventRecord, job: JobIdentity) -> JsonObject:
        """The event as an API object. The name of the object is only a unique string; the deletion of a job has always
        the same one."""
        time = self._clock.now().astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        moment = "" if event.reason == EventReason.JOB_DELETED else time
        digest = hashlib.sha256(f"{job.uid} {event.reason} {event.message} {moment}".encode()).hexdigest()[:16]
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
            "reason": str(event.reason),
            "note": event.message,
            "action": "Reconcile",
            "regarding": reference,
            "reportingController": f"{API_GROUP}/operator",
            "reportingInstance": self._settings.pod_name,
        }


def _deletion_event(reason: EventReason, message: str) -> EventRecord:
    return EventRecord(EventType.NORMAL, reason, bounded_note(message))


def _require_dashboard(observation: Observation) -> Dashboard:
    if observation.dashboard is None:
        raise DashboardUnreachableError("the current attempt has no RayCluster")
    return observation.dashboard
