"""The fields under `spec` and `metadata` of a job, and the pool of each role."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated

from pydantic import Field, StrictStr

from rljob_api.base import WireModel
from rljob_api.rule import cel_text, key_rule, rule, unique_rule
from rljob_api.scalars import (
    RELEASE,
    AnnotationKey,
    DnsLabel,
    DnsName,
    Flag,
    ImageName,
    LabelKey,
    LabelMap,
    LabelValue,
    PositiveCount,
    ShortText,
)
from rljob_api.v1alpha1.checkpoint import Checkpoint
from rljob_api.v1alpha1.model import ReferenceModel
from rljob_api.v1alpha1.pod_environment import Code, EnvFrom, EnvVar, LocalObjectReference, Volume
from rljob_api.v1alpha1.pools import Head, Pool, owned_labels_rule
from rljob_api.v1alpha1.run_policy import RunPolicy
from rljob_api.v1alpha1.training import Training

MAX_NAME_LENGTH = 46
_NAME = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"
TRAIN_ROLES = ("actor", "ref", "critic", "rewardModel")


class TrainRole(WireModel):
    """Pool and layout of a model: actor, reference, critic or reward model. A layout changes speed and memory, not the
    training result."""

    pool: DnsLabel | None = None
    """Name of an entry of spec.pools, for example `main`; the first pool when unset."""
    shard_size: PositiveCount | None = None
    """Number of GPUs that together hold one copy of parameters, gradients and optimizer state. Must divide the number
    of GPUs of the pool, which is the value when unset (full sharding).

    With a smaller value (hybrid sharding) the pool holds several copies, which sum their gradients once per update: 8
    on a pool of 4 nodes with 8 GPUs each gives four copies, each within one node."""
    sequence_parallel: PositiveCount | None = None
    """Number of GPUs that share the tokens of each sequence (Ulysses), for sequences too long for one GPU. Must divide
    the number of GPUs of the pool and the model's attention heads. 1 when unset."""

    @property
    def num_sequence_ranks(self) -> int:
        """Number of GPUs that share each sequence; 1 when `sequence_parallel` is unset."""
        return self.sequence_parallel or 1


class ActorRole(TrainRole):
    """Pool and layout of the policy in training."""

    defer_gradient_reduction: Flag = False
    """Reduce gradients across GPUs once per update instead of once per micro-batch.

    This needs less communication, but each GPU keeps unsharded float32 gradients (4 bytes per parameter) until the last
    micro-batch."""


class RefRole(TrainRole):
    """Pool, layout and weights of the reference model, which a KL term or Distillation needs."""

    model: ReferenceModel | None = None
    """Other weights, such as those of a teacher; the policy's at step 0 when unset.

    It has the policy's precision; training.model.offload.reference offloads it. It is never trained, and checkpoints
    do not contain it."""


class RolloutRole(WireModel):
    """Pool of the rollout engines, which generate responses, and the number of GPUs per engine."""

    pool: DnsLabel | None = None
    """Name of an entry of spec.pools; the first pool when unset. Must be the actor's pool."""
    tensor_parallel: PositiveCount = 1
    """Number of GPUs that together hold one copy of the policy during generation. Must divide gpusPerNode: 2 on a node
    with 8 GPUs gives four engines."""


class Roles(WireModel):
    """Pool and layout of each role. Roles on one pool share its GPUs. Actor and rollout are always on the same pool
    (hybrid engine); ref, critic and rewardModel may have separate pools."""

    actor: ActorRole = Field(default_factory=ActorRole)
    rollout: RolloutRole = Field(default_factory=RolloutRole)
    ref: RefRole = Field(default_factory=RefRole)
    critic: TrainRole = Field(default_factory=TrainRole)
    """Pool and layout of the critic, which PPO (GAE) needs."""
    reward_model: TrainRole = Field(default_factory=TrainRole)
    """Pool and layout of the reward model, for a reward of type RewardModel."""

    def train_role(self, name: str) -> TrainRole:
        """The role of this name, one of TRAIN_ROLES."""
        roles = {"actor": self.actor, "ref": self.ref, "critic": self.critic, "rewardModel": self.reward_model}
        return roles[name]


class ManagedBy(StrEnum):
    """Controller that runs the job. Operators skip jobs of another controller."""

    OPERATOR = "rljob.dev/operator"
    MULTIKUEUE = "kueue.x-k8s.io/multikueue"


class Scheduling(WireModel):
    """Settings for the batch scheduler of KubeRay. For a queue of Kueue, set labels of the job instead."""

    gang: Flag = False
    """Start all pods of the job or none. Needs a KubeRay that was installed with a batch scheduler."""
    labels: LabelMap = Field(default_factory=dict)
    """Labels of the RayCluster and of its pods, for example `{kai.scheduler/queue: team-a}`. The operator's
    installation must allow their prefixes."""


class RLJobSpec(WireModel):
    """The desired training run and its cluster. Immutable after creation, except `suspend` and `runPolicy`."""

    suspend: Flag = False
    """If true, the operator asks the trainer to save a checkpoint and exit, and then deletes the job's pods. Set it to
    false to resume from that checkpoint."""

    managed_by: ManagedBy = ManagedBy.OPERATOR
    image: ImageName | None = None
    """Container image of the trainer, for example `registry.example/team/rljob-trainer:1.2`. The default image of the
    operator's installation when unset."""
    ray_version: Annotated[StrictStr, Field(max_length=32, pattern=RELEASE)] | None = None
    """Version of Ray in the image, for example `2.54.0`. The default version of the operator's installation when
    unset."""
    scheduling: Scheduling = Field(default_factory=Scheduling)
    head: Head = Field(default_factory=Head)
    pools: Annotated[tuple[Pool, ...], Field(min_length=1, max_length=8)]
    """Pools of identical worker pods with GPUs. A job needs at least one pool, and each pool must have at least one
    role."""
    roles: Roles = Field(default_factory=Roles)
    env: Annotated[tuple[EnvVar, ...], Field(max_length=64)] = ()
    """Environment variables of all pods of the job."""
    env_from: Annotated[tuple[EnvFrom, ...], Field(max_length=16)] = ()
    """Secrets and ConfigMaps whose keys become environment variables of all pods of the job."""
    image_pull_secrets: Annotated[tuple[LocalObjectReference, ...], Field(max_length=8)] = ()
    """Secrets with the credentials of a private image registry, for example `[{name: registry-login}]`."""
    service_account_name: DnsName | None = None
    """ServiceAccount of all pods, for cloud identity; must be allowed by the operator's installation."""
    volumes: Annotated[tuple[Volume, ...], Field(max_length=16)] = ()
    """Volumes that are mounted into all pods of the job."""
    code: Code | None = None
    training: Training
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)
    run_policy: RunPolicy = Field(default_factory=RunPolicy)

    def placed_roles(self) -> dict[str, str]:
        """The name of the pool of each role: the first pool if the role names none."""
        roles = self.roles
        named = {
            "actor": roles.actor.pool,
            "rollout": roles.rollout.pool,
            "ref": roles.ref.pool,
            "critic": roles.critic.pool,
            "rewardModel": roles.reward_model.pool,
        }
        return {role: pool or self.pools[0].name for role, pool in named.items()}


class Metadata(WireModel):
    """The fields of Kubernetes metadata that a job file may have."""

    name: ShortText
    """Name of the job: a DNS label of at most 46 characters that begins with a letter. A RayCluster of the job
    is named `<name>-<number of the attempt that created it>`."""
    namespace: DnsLabel | None = None
    """Namespace of the job; the current namespace of the kubeconfig when unset."""
    labels: Annotated[dict[LabelKey, LabelValue], Field(max_length=64)] = Field(default_factory=dict)
    """Labels of the RLJob, for example `{team: research}`."""
    annotations: Annotated[dict[AnnotationKey, StrictStr], Field(max_length=64)] = Field(default_factory=dict)
    """Annotations of the RLJob."""


def sequence_ranks_cel(role: str) -> str:
    """CEL for the number of GPUs that share each sequence of the role."""
    return f"(has(self.roles.{role}.sequenceParallel) ? self.roles.{role}.sequenceParallel : 1)"


def pool_of_cel(role: str) -> str:
    """CEL for the name of a role's pool, for rules on the spec."""
    return f"(has(self.roles.{role}.pool) ? self.roles.{role}.pool : self.pools[0].name)"


METADATA_RULES = (
    rule(
        Metadata,
        "Metadata.name",
        field=".name",
        cel=f"self.metadata.name.size() <= {MAX_NAME_LENGTH} && self.metadata.name.matches({cel_text(_NAME)})",
        wrong=(
            f"must have at most {MAX_NAME_LENGTH} lower case letters, digits and '-', begin with a letter and end with"
            " a letter or digit"
        ),
        advice="choose a shorter or simpler name, because the job's cluster and its services are named after the job",
        holds=lambda metadata: len(metadata.name) <= MAX_NAME_LENGTH and re.fullmatch(_NAME, metadata.name) is not None,
    ),
)

UNIQUE_RULES = (
    unique_rule(RLJobSpec, "pools", "name", lambda spec: [pool.name for pool in spec.pools]),
    unique_rule(RLJobSpec, "env", "name", lambda spec: [variable.name for variable in spec.env]),
    unique_rule(RLJobSpec, "volumes", "name", lambda spec: [volume.name for volume in spec.volumes]),
    unique_rule(RLJobSpec, "volumes", "mountPath", lambda spec: [volume.mount_path for volume in spec.volumes]),
)

SCHEDULING_RULES = (
    owned_labels_rule(Scheduling, lambda scheduling: scheduling.labels),
    key_rule(Scheduling, "labels", lambda scheduling: scheduling.labels),
)
