"""Creates the Secret, network policy and RayCluster of an attempt.

First the operator asks the API server, not the cache, whether an earlier cluster with the same name still has pods, for
example the cluster of a deleted job: KubeRay would adopt these pods.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence

from rljob_api.conditions import Reason
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_operator.controller.observe import Observation
from rljob_operator.controller.operator_context import OperatorContext
from rljob_operator.errors import OperatorError
from rljob_operator.kube.allowed_calls import CLUSTERS, NETWORK_POLICIES, PODS, SECRETS, missing_fields
from rljob_operator.kube.errors import (
    AlreadyExistsError,
    ForbiddenError,
    InvalidFieldError,
    NotFoundError,
    RefusedError,
    UnavailableError,
    UnknownFieldError,
)
from rljob_operator.kube.observed_objects import controller_uid
from rljob_operator.kube.pod_problems import LABEL_CLUSTER
from rljob_operator.kube.projections import job_uid
from rljob_operator.manifests.access import asks_for_token, key_id, network_policy, token_secret
from rljob_operator.manifests.ray_cluster import ray_cluster
from rljob_operator.raw_json import JsonObject, text_at
from rljob_operator.reconcile.decision import CreateCluster
from rljob_operator.reconcile.observed import EffectFailure, EffectKind, ObservedJob
from rljob_operator.settings import read_token_keys

_EFFECT_KIND = EffectKind.CREATE_CLUSTER

_INSTALL_KUBERAY = "install KubeRay 1.6 or later with its CustomResourceDefinitions"

_GROUP = r"^spec\.(?:(headGroupSpec)|workerGroupSpecs\[(\d+)\])\.template\."
_GROUP_FIELDS = (
    (r"metadata\.(labels|annotations)\b(.*)", r"template.\1\2"),
    (
        r"spec\.(nodeSelector|tolerations|affinity|priorityClassName|runtimeClassName|schedulerName)\b(.*)",
        r"template.\1\2",
    ),
    (r"spec\.containers\[0\]\.resources\b(.*)", r"resources\1"),
)
"""Fields of a group's pod template, and the field of the job's pool or head from which each of them comes."""
_JOB_FIELDS = (
    (r"spec\.containers\[\d+\]\.(env|envFrom|image)\b.*", r"spec.\1"),
    (r"spec\.(containers\[\d+\]\.volumeMounts|volumes)\b.*", "spec.volumes"),
    (r"spec\.imagePullSecrets\b(.*)", r"spec.imagePullSecrets\1"),
)
"""Fields of a group's pod template, and the field of the job from which each of them comes. The operator adds entries
to these lists, so an index is not that of the job's list."""

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
        """Creates the cluster, or returns why this is not possible. Raises KubeError for failures that are not reported
        in a condition, such as a busy API server."""
        assert observation.is_live, "needs an observation from the API server: the cache may miss earlier objects"
        job = observation.observed.job
        if job.spec is None:
            raise OperatorError(
                f"RLJob {job.namespace}/{job.name}: a RayCluster should be created, but the spec cannot be parsed: this"
                " is a bug in the operator"
            )
        obstacle = await self._obstacle(effect.cluster, job)
        if obstacle is not None:
            return obstacle
        try:
            return await self._create(effect, job, job.spec)
        except InvalidFieldError as error:
            found = _fields_of_job(error.fields)
            from_job = f" (from {', '.join(found)} of the job)" if found else ""
            message = f"the API server rejects an object of the job{from_job}: {error}"
            return EffectFailure(_EFFECT_KIND, Reason.INVALID_SPEC, message)
        except UnavailableError as error:
            # The error may also mean that another replica may be the leader now: then this call raises it again.
            self._require_leadership()
            # With a Retry-After header the API server is only busy. Without it, an admission webhook may be down: this
            # is reported in the status, because it lasts until a person fixes the webhook.
            if error.retry_after_seconds:
                raise
            return EffectFailure(_EFFECT_KIND, Reason.INFRASTRUCTURE_ERROR, str(error))

    async def _create(self, effect: CreateCluster, job: ObservedJob, spec: RLJobSpec) -> EffectFailure | None:
        """Creates the RayCluster after the Secret and the network policy: KubeRay creates pods as soon as it sees the
        RayCluster, and these pods need the Secret."""
        owner = job.identity
        key = read_token_keys(self._settings.token_keys_folder).current
        await self._objects.create(SECRETS, job.namespace, token_secret(owner, effect.cluster, key))
        if self._defaults.network_policy.enabled:
            await self._create_network_policy(job, network_policy(owner, effect.attempt, self._defaults))
        manifest = ray_cluster(owner, spec, effect.attempt, self._defaults, key_id(key), job.queue_labels)
        self._require_leadership()
        try:
            created = await self._objects.create_strictly(CLUSTERS, job.namespace, manifest)
        except AlreadyExistsError:
            return await self._use_existing(effect, job)
        except UnknownFieldError as error:
            return _unknown_fields(error)
        self._cache.store(CLUSTERS, "", created)
        missing = missing_fields(manifest, created)
        return await self._delete_incomplete(created, job, missing[0]) if missing else None

    async def _create_network_policy(self, job: ObservedJob, policy: JsonObject) -> None:
        """Creates the policy. Raises RefusedError, for example if the installer's rules have an unknown field."""
        try:
            try:
                await self._objects.create_strictly(NETWORK_POLICIES, job.namespace, policy)
            except AlreadyExistsError:
                # The existing policy may differ: an operator in another namespace may have created it, or this operator
                # for an earlier attempt (the names of clusters repeat after 1000 attempts).
                self._require_leadership()
                await self._objects.apply(NETWORK_POLICIES, job.namespace, text_at(policy, "metadata", "name"), policy)
        except RefusedError as error:
            # The job has no part in it: whatever is wrong, the installer can fix it while the job waits.
            message = f"the job's network policy is rejected; check jobs.networkPolicy of the operator's chart: {error}"
            raise RefusedError(message) from error

    async def _obstacle(self, name: str, job: ObservedJob) -> EffectFailure | None:
        """Why the cluster cannot be created now; None if it can. If pods of another cluster with this name are left,
        either this cluster still exists (a name conflict), or its pods must terminate first. The job's own pods do not
        matter here: `reconcile` has checked that none of them is left, except lost ones."""
        try:
            pods = await self._objects.list_all(PODS, job.namespace, labels=f"{LABEL_CLUSTER}={name}")
        except ForbiddenError as error:
            return EffectFailure(_EFFECT_KIND, Reason.READ_FORBIDDEN, str(error))
        num_left = sum(job_uid(pod) != job.uid for pod in pods)
        if not num_left:
            return None
        if await self._is_taken(name, job):
            return _conflict(name)
        message = f"waiting until the pods of an earlier RayCluster {name} have terminated (pods left: {num_left})"
        return EffectFailure(_EFFECT_KIND, Reason.CREATING, message)

    async def _use_existing(self, effect: CreateCluster, job: ObservedJob) -> EffectFailure | None:
        """Handles a cluster that already exists: an operator created it for this job before a crash, or the cluster
        does not belong to the job."""
        found = await self._objects.get(CLUSTERS, job.namespace, effect.cluster)
        if controller_uid(found) != job.uid:
            return _conflict(effect.cluster)
        return None if asks_for_token(found) else await self._delete_incomplete(found, job, "spec.authOptions")

    async def _is_taken(self, name: str, job: ObservedJob) -> bool:
        """Whether a cluster that does not belong to the job has the name and is not being deleted."""
        try:
            found = await self._objects.get(CLUSTERS, job.namespace, name)
        except NotFoundError:
            return False
        return controller_uid(found) != job.uid and not text_at(found, "metadata", "deletionTimestamp")

    async def _delete_incomplete(self, cluster: JsonObject, job: ObservedJob, missing_field: str) -> EffectFailure:
        """Deletes a cluster that the API server stored without a field of its manifest. If this field is `authOptions`,
        Ray would accept requests without a token."""
        name, uid = text_at(cluster, "metadata", "name"), text_at(cluster, "metadata", "uid")
        await self._objects.delete(CLUSTERS, job.namespace, name, uid)
        message = (
            f"KubeRay is too old for this operator: RayCluster {name} was stored without {missing_field}, so the"
            f" operator deleted it; {_INSTALL_KUBERAY}"
        )
        return EffectFailure(_EFFECT_KIND, Reason.KUBERAY_TOO_OLD, message)


def _unknown_fields(error: UnknownFieldError) -> EffectFailure:
    """The failure for fields that KubeRay's definition lacks: KubeRay is too old, or, if all of these fields come from
    the job's own settings, the job cannot use them here."""
    found = _fields_of_job(error.fields)
    if found and len(found) == len(error.fields):
        message = (
            f"this KubeRay does not know fields that the job uses ({', '.join(found)}): {error}; remove them from the"
            " job, or install a newer KubeRay with its CustomResourceDefinitions"
        )
        return EffectFailure(_EFFECT_KIND, Reason.INVALID_SPEC, message)
    message = f"KubeRay is too old for this operator: {error}; {_INSTALL_KUBERAY}"
    return EffectFailure(_EFFECT_KIND, Reason.KUBERAY_TOO_OLD, message)


def _fields_of_job(fields: Sequence[str]) -> list[str]:
    """The fields of the job from which fields of a RayCluster come, without those that the operator itself sets. For
    example `spec.pools[0].template.affinity` for `spec.workerGroupSpecs[0].template.spec.affinity`."""
    return [found for field in fields if (found := _field_of_job(field)) is not None]


def _field_of_job(field: str) -> str | None:
    group = re.match(_GROUP, field)
    if group is None:
        return "spec.rayVersion" if field == "spec.rayVersion" else None
    rest, part = field[group.end() :], "spec.head" if group[1] else f"spec.pools[{group[2]}]"
    for pattern, written in _GROUP_FIELDS:
        if found := re.fullmatch(pattern, rest):
            return f"{part}.{found.expand(written)}"
    return next(
        (found.expand(written) for pattern, written in _JOB_FIELDS if (found := re.fullmatch(pattern, rest))), None
    )


def _conflict(cluster: str) -> EffectFailure:
    message = (
        f"RayCluster {cluster} already exists and does not belong to this job; delete this RayCluster or rename the job"
    )
    return EffectFailure(_EFFECT_KIND, Reason.NAME_CONFLICT, message)
