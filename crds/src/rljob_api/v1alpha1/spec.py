"""What stands under `spec` and `metadata` of a job, and which role runs on which pool."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field, StrictStr

from rljob_api.base import WireModel
from rljob_api.rule import cel_text, rule, unique_rule
from rljob_api.scalars import (
    RELEASE,
    AnnotationKey,
    DnsLabel,
    Flag,
    ImageName,
    LabelKey,
    LabelValue,
    PositiveCount,
    ShortText,
)
from rljob_api.v1alpha1.checkpoint import Checkpoint
from rljob_api.v1alpha1.environment import Code, EnvFrom, EnvVar, LocalObjectReference, Volume
from rljob_api.v1alpha1.pools import Head, Pool
from rljob_api.v1alpha1.run_policy import RunPolicy
from rljob_api.v1alpha1.training import Training

MAX_NAME_LENGTH = 46
_NAME = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"
TRAIN_ROLES = ("actor", "ref", "critic", "rewardModel")


class TrainRole(WireModel):
    """The place of a model that is trained or scored with, and its layout there. Layouts change speed and memory, not
    what is learned."""

    pool: DnsLabel | None = None
    """Name of the pool; the first pool when unset."""
    shard_size: PositiveCount | None = None
    """GPUs that hold one copy of parameters, gradients and optimizer state together (hybrid shard); the pool's other
    GPUs hold further copies, which add up their gradients once per update. All GPUs of the pool when unset (full
    shard). Must divide them."""
    sequence_parallel: PositiveCount | None = None
    """GPUs that share the tokens of the same rows (Ulysses), for rows that are too long for one; each has rows of its
    own when unset. Must divide the pool's GPUs and the model's heads of attention."""

    @property
    def num_sequence_ranks(self) -> int:
        """1 where each GPU has rows of its own."""
        return self.sequence_parallel or 1


class ActorRole(TrainRole):
    """The place and layout of the model in training."""

    defer_gradient_reduction: Flag = False
    """Gradients are reduced once per update instead of once per micro-batch: less communication, but every GPU keeps
    whole gradients, in 32 bits, until the last micro-batch."""


class RolloutRole(WireModel):
    """The place of generation, and how one model copy is spread over GPUs there."""

    pool: DnsLabel | None = None
    """Name of the pool; the first pool when unset."""
    tensor_parallel: PositiveCount = 1
    """GPUs that hold one copy of the policy together while generating; must divide the GPUs of a node."""


class Roles(WireModel):
    """Roles on one pool share its GPUs. Actor and rollout always do (hybrid engine); ref, critic and rewardModel may
    have pools of their own, or one together."""

    actor: ActorRole = Field(default_factory=ActorRole)
    rollout: RolloutRole = Field(default_factory=RolloutRole)
    ref: TrainRole = Field(default_factory=TrainRole)
    critic: TrainRole = Field(default_factory=TrainRole)
    reward_model: TrainRole = Field(default_factory=TrainRole)

    def train_role(self, name: str) -> TrainRole:
        """That of one of TRAIN_ROLES."""
        places = {"actor": self.actor, "ref": self.ref, "critic": self.critic, "rewardModel": self.reward_model}
        return places[name]


class RLJobSpec(WireModel):
    """What is wanted. Immutable once created, except `suspend` and `runPolicy`."""

    suspend: Flag = False
    """Stops the trainer with a checkpoint and frees its nodes; false again, and the job goes on from there."""

    image: ImageName | None = None
    """Trainer image; the operator's default when unset."""
    ray_version: Annotated[StrictStr, Field(max_length=32, pattern=RELEASE)] | None = None
    """Ray version in the image; the operator's default when unset."""
    head: Head = Field(default_factory=Head)
    pools: Annotated[tuple[Pool, ...], Field(min_length=1, max_length=8)]
    roles: Roles = Field(default_factory=Roles)
    env: Annotated[tuple[EnvVar, ...], Field(max_length=64)] = ()
    env_from: Annotated[tuple[EnvFrom, ...], Field(max_length=16)] = ()
    image_pull_secrets: Annotated[tuple[LocalObjectReference, ...], Field(max_length=8)] = ()
    """Secrets with registry credentials."""
    volumes: Annotated[tuple[Volume, ...], Field(max_length=16)] = ()
    code: Code | None = None
    training: Training
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)
    run_policy: RunPolicy = Field(default_factory=RunPolicy)

    def placed_roles(self) -> dict[str, str]:
        """The pool of each role that a job can place: the first pool where the job names none."""
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
    """The parts of Kubernetes metadata that a job file may carry."""

    name: ShortText
    """A DNS label of at most 46 characters that begins with a letter: clusters are called <name>-<attempt>."""
    namespace: DnsLabel | None = None
    labels: Annotated[dict[LabelKey, LabelValue], Field(max_length=64)] = Field(default_factory=dict)
    annotations: Annotated[dict[AnnotationKey, StrictStr], Field(max_length=64)] = Field(default_factory=dict)


def sequence_ranks_cel(role: str) -> str:
    """CEL for the number of GPUs that share rows."""
    return f"(has(self.roles.{role}.sequenceParallel) ? self.roles.{role}.sequenceParallel : 1)"


def pool_of_cel(role: str) -> str:
    """CEL for the name of a role's pool, in a rule on the spec."""
    return f"(has(self.roles.{role}.pool) ? self.roles.{role}.pool : self.pools[0].name)"


METADATA_RULES = (
    rule(
        Metadata,
        "Metadata.name",
        field=".name",
        cel=f"self.metadata.name.size() <= {MAX_NAME_LENGTH} && self.metadata.name.matches({cel_text(_NAME)})",
        wrong=f"must be a-z, then a-z, 0-9 and '-', no '-' at the end, at most {MAX_NAME_LENGTH} characters",
        advice="choose a shorter or simpler name (clusters and their services are named after it)",
        holds=lambda metadata: len(metadata.name) <= MAX_NAME_LENGTH and re.fullmatch(_NAME, metadata.name) is not None,
    ),
)

UNIQUE_RULES = (
    unique_rule(RLJobSpec, "pools", "name", lambda spec: [pool.name for pool in spec.pools]),
    unique_rule(RLJobSpec, "env", "name", lambda spec: [variable.name for variable in spec.env]),
    unique_rule(RLJobSpec, "volumes", "name", lambda spec: [volume.name for volume in spec.volumes]),
    unique_rule(RLJobSpec, "volumes", "mountPath", lambda spec: [volume.mount_path for volume in spec.volumes]),
)
