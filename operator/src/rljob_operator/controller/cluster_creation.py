"""Creates the Secret, network policy and RayCluster of an attempt.

First it asks the API server, not the cache, whether pods are left of an earlier cluster with the same name, for example
the cluster of a deleted job: KubeRay would adopt these pods.
"""

from __future__ import annotations

import logging

from rljob_api.conditions import Reason
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_operator.controller.observe import Observation
from rljob_operator.controller.operator_context import OperatorContext
from rljob_operator.errors import OperatorError
from rljob_operator.kube.allowed_calls import CLUSTERS, NETWORK_POLICIES, PODS, SECRETS, missing_fields
from rljob_operator.kube.cache import job_uid
from rljob_operator.kube.errors import (
    AlreadyExistsError,
    ForbiddenError,
    NotFoundError,
    UnavailableError,
    UnknownFieldError,
)
from rljob_operator.kube.observed_objects import controller_uid
from rljob_operator.kube.pod_problems import LABEL_CLUSTER
from rljob_operator.manifests.access import asks_for_token, derived_token, key_id, network_policy, token_secret
from rljob_operator.manifests.ray_cluster import ray_cluster
from rljob_operator.raw_json import JsonObject, text_at
from rljob_operator.reconcile.decision import CreateCluster
from rljob_operator.reconcile.observed import EffectFailure, EffectKind, ObservedJob
from rljob_operator.settings import read_token_keys

KIND = EffectKind.CREATE_CLUSTER

logger = logging.getLogger(__name__)


class ClusterCreation:
    """Carries out CreateCluster effects. It keeps no state about jobs."""

    def __init__(self, context: OperatorContext) -> None:
        self._objects = context.objects
        self._cache = context.cache
        self._settings = context.settings
        self._defaults = context.defaults
        self._require_leadership = context.require_leadership

    async def execute(self, effect: CreateCluster, observation: Observation) -> EffectFailure | None:
        """Creates the cluster, or returns why this is not possible. Raises KubeError for failures that no
        condition reports."""
        assert observation.is_live, "the cache may miss objects of an earlier cluster"
        job = observation.observed.job
        if job.spec is None:
            raise OperatorError(f"RLJob {job.namespace}/{job.name}: a cluster was planned for an invalid spec")
        obstacle = await self._obstacle(effect.cluster, job)
        if obstacle is not None:
            return obstacle
        try:
            return await self._create(effect, job, job.spec)
        except UnavailableError as error:
            self._require_leadership()
            # With Retry-After the server is only busy. Without it, an admission webhook may be down: report that in the
            # status, because it lasts until a person fixes it.
            if error.retry_after_seconds:
                raise
            return EffectFailure(KIND, Reason.CREATION_REJECTED, str(error))

    async def _create(self, effect: CreateCluster, job: ObservedJob, spec: RLJobSpec) -> EffectFailure | None:
        """Creates the RayCluster after the Secret and the network policy: KubeRay starts as soon as it sees the
        RayCluster, and then needs the Secret."""
        owner = job.identity
        key = read_token_keys(self._settings.token_keys_folder).current
        secret = token_secret(owner, effect.cluster, derived_token(key, owner, effect.cluster))
        await self._objects.create(SECRETS, job.namespace, secret)
        policy = network_policy(owner, effect.attempt, self._defaults)
        if not await self._objects.create(NETWORK_POLICIES, job.namespace, policy):
            # An operator in another namespace may have created it, or an earlier attempt: the names repeat after 999
            # attempts.
            self._require_leadership()
            await self._objects.apply(NETWORK_POLICIES, job.namespace, text_at(policy, "metadata", "name"), policy)
        manifest = ray_cluster(owner, spec, effect.attempt, self._defaults, key_id(key))
        self._require_leadership()
        try:
            made = await self._objects.create_strictly(CLUSTERS, job.namespace, manifest)
        except AlreadyExistsError:
            return await self._use_existing(effect, job)
        except UnknownFieldError as error:
            return EffectFailure(KIND, Reason.KUBERAY_TOO_OLD, f"KubeRay is too old for this operator: {error}")
        self._cache.store(CLUSTERS, "", made)
        missing = missing_fields(manifest, made)
        return await self._remove_unguarded(made, job, missing[0]) if missing else None

    async def _obstacle(self, name: str, job: ObservedJob) -> EffectFailure | None:
        """Why the cluster cannot be created yet: pods of another cluster with this name are left; None if there are
        none. If that cluster still exists, it is a name conflict. The decision has made sure that the job itself has no
        pods."""
        try:
            pods = await self._objects.list_all(PODS, job.namespace, labels=f"{LABEL_CLUSTER}={name}")
        except ForbiddenError as error:
            return EffectFailure(KIND, Reason.READ_FORBIDDEN, str(error))
        num_left = sum(job_uid(pod) != job.uid for pod in pods)
        if not num_left:
            return None
        if await self._is_taken(name, job):
            return _conflict(name)
        message = f"waiting until the pods of an earlier RayCluster have terminated (pods left: {num_left})"
        return EffectFailure(KIND, Reason.CREATING, message)

    async def _use_existing(self, effect: CreateCluster, job: ObservedJob) -> EffectFailure | None:
        """Handles a cluster that already exists: this operator created it before a crash, or it is not the job's."""
        found = await self._objects.get(CLUSTERS, job.namespace, effect.cluster)
        if controller_uid(found) != job.uid:
            return _conflict(effect.cluster)
        return None if asks_for_token(found) else await self._remove_unguarded(found, job, "spec.authOptions")

    async def _is_taken(self, name: str, job: ObservedJob) -> bool:
        """Whether a cluster that does not belong to the job has the name and is not being deleted."""
        try:
            found = await self._objects.get(CLUSTERS, job.namespace, name)
        except NotFoundError:
            return False
        return controller_uid(found) != job.uid and not text_at(found, "metadata", "deletionTimestamp")

    async def _remove_unguarded(self, cluster: JsonObject, job: ObservedJob, lost: str) -> EffectFailure:
        """Deletes a cluster of which the API server dropped a field: without `authOptions` Ray needs no token."""
        name, uid = text_at(cluster, "metadata", "name"), text_at(cluster, "metadata", "uid")
        await self._objects.delete(CLUSTERS, job.namespace, name, uid)
        message = (
            f"KubeRay is too old for this operator: RayCluster {name} was stored without {lost}, so it was deleted"
            " again; install KubeRay 1.6 or later with its CustomResourceDefinitions"
        )
        return EffectFailure(KIND, Reason.KUBERAY_TOO_OLD, message)


def _conflict(cluster: str) -> EffectFailure:
    message = f"RayCluster {cluster} already exists and does not belong to this job; delete it or rename the job"
    return EffectFailure(KIND, Reason.NAME_CONFLICT, message)
