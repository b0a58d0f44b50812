"""Rules on what leaves the device: an offload that could not do anything, or not together with a layout, is refused."""

from __future__ import annotations

from rljob_api.v1alpha1.placement_rules import (
    MAY_NEED_REFERENCE_CEL,
    REFERENCE_IS_THE_ACTOR_CEL,
    may_need_reference,
    reference_is_the_actor,
)
from rljob_api.v1alpha1.roles import pool_of_cel
from rljob_api.v1alpha1.rule import rule
from rljob_api.v1alpha1.spec import RLJobSpec

_OFFLOAD = "self.training.model.offload"
_SHARD_SIZE = "self.roles.actor.shardSize"


def _has_one_replica(spec: RLJobSpec) -> bool:
    name, shard_size = spec.placed_roles()["actor"], spec.roles.actor.shard_size
    return shard_size is None or all(p.nodes * p.gpus_per_node <= shard_size for p in spec.pools if p.name == name)


OFFLOAD_RULES = (
    rule(
        RLJobSpec,
        "RLJobSpec.offload.reference",
        field=".training.model.offload.reference",
        cel=f"!{_OFFLOAD}.reference || {MAY_NEED_REFERENCE_CEL}",
        wrong="there is no reference model with training.algorithm.kl.coefficient 0",
        advice="leave it out, set a coefficient above 0, or choose an advantage or loss of type Function that needs it",
        holds=lambda spec: not spec.training.model.offload.reference or may_need_reference(spec),
    ),
    rule(
        RLJobSpec,
        "RLJobSpec.offload.referenceOfAdapters",
        field=".training.model.offload.reference",
        cel=f"!{_OFFLOAD}.reference || !({REFERENCE_IS_THE_ACTOR_CEL})",
        wrong="with lora the reference is the actor's own model with its adapters off, and takes no memory",
        advice="leave it out (parameters moves that model)",
        holds=lambda spec: not spec.training.model.offload.reference or not reference_is_the_actor(spec),
    ),
    rule(
        RLJobSpec,
        "RLJobSpec.offload.gradients",
        field=".training.model.offload.gradients",
        cel=f"!{_OFFLOAD}.gradients || !self.roles.actor.deferGradientReduction",
        wrong="with roles.actor.deferGradientReduction there are no shards of gradients before the last micro-batch",
        advice="choose one of the two",
        holds=lambda spec: not spec.training.model.offload.gradients or not spec.roles.actor.defer_gradient_reduction,
    ),
    rule(
        RLJobSpec,
        "RLJobSpec.offload.gradientsOfReplicas",
        field=".training.model.offload.gradients",
        cel=f"!{_OFFLOAD}.gradients || !has({_SHARD_SIZE}) || "
        f"self.pools.all(p, p.name != {pool_of_cel('actor')} || p.nodes * p.gpusPerNode <= {_SHARD_SIZE})",
        wrong="replicas (roles.actor.shardSize) keep what they have added up where it cannot be taken from",
        advice="leave one of the two out",
        holds=lambda spec: not spec.training.model.offload.gradients or _has_one_replica(spec),
    ),
)
