"""What stands under `spec` and `metadata` of a job."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StrictStr

from rljob_api.base import WireModel
from rljob_api.scalars import (
    RELEASE,
    AbsolutePath,
    AnnotationKey,
    DnsLabel,
    DnsName,
    Flag,
    ImageName,
    LabelKey,
    LabelValue,
    ShortText,
)
from rljob_api.v1alpha1.checkpoint import Checkpoint
from rljob_api.v1alpha1.pools import EnvFrom, EnvVar, Head, LocalObjectReference, Pool, Volume
from rljob_api.v1alpha1.roles import Roles
from rljob_api.v1alpha1.run_policy import RunPolicy
from rljob_api.v1alpha1.training import Training


class Code(WireModel):
    """The user's Python, put on PYTHONPATH of all pods; exactly one source. Locally it is the job file's folder."""

    config_map: DnsName | None = None
    """Each key is a file."""
    persistent_volume_claim: DnsName | None = None
    image_path: AbsolutePath | None = None
    """A folder that is already in the image."""


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
