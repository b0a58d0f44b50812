"""Rules on where roles run, and on uniqueness."""

from __future__ import annotations

import re
from collections.abc import Callable

from rljob_api.v1alpha1.advantage import AdvantageType
from rljob_api.v1alpha1.critic_rules import may_need_critic, may_need_critic_cel
from rljob_api.v1alpha1.policy_loss import LossType
from rljob_api.v1alpha1.reward_model_rules import has_reward_model, has_reward_model_cel
from rljob_api.v1alpha1.roles import TRAIN_ROLES, TrainRole, pool_of_cel
from rljob_api.v1alpha1.rollout import RolloutEngine
from rljob_api.v1alpha1.rule import Rule, cel_text, rule, unique_rule, wire_name
from rljob_api.v1alpha1.spec import Metadata, RLJobSpec

MAX_NAME_LENGTH = 46
_NAME = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"
_ROLES = ("actor", "rollout", "ref", "critic", "rewardModel")
_OPTIONAL_ROLES = {
    "critic": may_need_critic_cel("self.training"),
    "rewardModel": has_reward_model_cel("self.training"),
}
"""Those that only some jobs have, with the CEL that says which: their default pool does not count for others."""
_FUNCTIONS = ("self.training.algorithm.advantage", "self.training.algorithm.loss")
_PARALLEL = "self.roles.rollout.tensorParallel"


def _tensor_parallel_fits(spec: RLJobSpec) -> bool:
    name = spec.placed_roles()["rollout"]
    return all(p.gpus_per_node % spec.roles.rollout.tensor_parallel == 0 for p in spec.pools if p.name == name)


def _role_pool_rule(role: str) -> Rule:
    def holds(spec: RLJobSpec) -> bool:
        return spec.placed_roles()[role] in {pool.name for pool in spec.pools}

    return rule(
        RLJobSpec,
        f"RLJobSpec.{role}Pool",
        field=f".roles.{role}.pool",
        cel=f"!has(self.roles.{role}.pool) || self.pools.exists(p, p.name == self.roles.{role}.pool)",
        wrong="there is no pool of this name",
        advice="name one of spec.pools, or leave it out for the first",
        holds=holds,
    )


def _layout_rule(role: str, name: str, read: Callable[[TrainRole], int | None]) -> Rule:
    """`shardSize` and `sequenceParallel` of the roles that train or score."""
    wire = wire_name(TrainRole, name)
    value = f"self.roles.{role}.{wire}"

    def holds(spec: RLJobSpec) -> bool:
        pool = spec.placed_roles()[role]
        divisor = read(spec.roles.train_role(role)) or 1
        return all(p.nodes * p.gpus_per_node % divisor == 0 for p in spec.pools if p.name == pool)

    return rule(
        RLJobSpec,
        f"RLJobSpec.{role}.{wire}",
        field=f".roles.{role}.{wire}",
        cel=f"!has({value}) || "
        f"self.pools.all(p, p.name != {pool_of_cel(role)} || p.nodes * p.gpusPerNode % {value} == 0)",
        wrong="must divide nodes * gpusPerNode of the role's pool",
        advice="choose a divisor",
        holds=holds,
    )


def may_need_reference(spec: RLJobSpec) -> bool:
    """Whether there is a KL term, or a function that may ask for the reference's log-probabilities."""
    algorithm = spec.training.algorithm
    has_function = algorithm.advantage.type is AdvantageType.FUNCTION or algorithm.loss.type is LossType.FUNCTION
    return algorithm.kl.coefficient > 0 or has_function


MAY_NEED_REFERENCE_CEL = " || ".join(
    (
        "self.training.algorithm.kl.coefficient > 0.0",
        *(f"(has({part}.type) && {part}.type == 'Function')" for part in _FUNCTIONS),
    )
)


def absent_roles(spec: RLJobSpec) -> list[str]:
    """Roles that only some jobs have, and this one has not."""
    is_there = {"critic": may_need_critic(spec.training), "rewardModel": has_reward_model(spec.training)}
    return [role for role, is_used in is_there.items() if not is_used]


def reference_is_the_actor(spec: RLJobSpec) -> bool:
    """Whether a reference is the actor's model with its adapters off, in the actor's layout."""
    placed, place = spec.placed_roles(), spec.roles.ref
    is_beside = placed["ref"] == placed["actor"] and place.shard_size is None and place.sequence_parallel is None
    return spec.training.model.lora is not None and is_beside


REFERENCE_IS_THE_ACTOR_CEL = (
    f"has(self.training.model.lora) && {pool_of_cel('ref')} == {pool_of_cel('actor')}"
    " && !has(self.roles.ref.shardSize) && !has(self.roles.ref.sequenceParallel)"
)


def _unused_layout_rule(
    role: str, *, is_there: Callable[[RLJobSpec], bool], is_there_cel: str, wrong: str, advice: str
) -> Rule:
    """A layout of a role that the job does not have would be ignored."""
    place = f"self.roles.{role}"

    def holds(spec: RLJobSpec) -> bool:
        asked = spec.roles.train_role(role)
        return (asked.shard_size is None and asked.sequence_parallel is None) or is_there(spec)

    return rule(
        RLJobSpec,
        f"RLJobSpec.{role}LayoutUsed",
        field=f".roles.{role}",
        cel=f"!has({place}.shardSize) && !has({place}.sequenceParallel) || {is_there_cel}",
        wrong=wrong,
        advice=advice,
        holds=holds,
    )


def _reference_is_used(spec: RLJobSpec) -> bool:
    placed = spec.placed_roles()
    return placed["ref"] == placed["actor"] or may_need_reference(spec)


def _all_pools_have_roles(spec: RLJobSpec) -> bool:
    placed = spec.placed_roles()
    for role in absent_roles(spec):
        if spec.roles.train_role(role).pool is None:
            del placed[role]
    return {pool.name for pool in spec.pools} <= set(placed.values())


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


PLACEMENT_RULES = (
    *(_role_pool_rule(role) for role in _ROLES),
    rule(
        RLJobSpec,
        "RLJobSpec.actorWithRollout",
        field=".roles",
        cel=f"{pool_of_cel('actor')} == {pool_of_cel('rollout')}",
        wrong="actor and rollout must be on one pool, because they hand over weights within each GPU",
        advice="name the same pool for both, or none (ref and critic may have pools of their own)",
        holds=lambda spec: spec.placed_roles()["actor"] == spec.placed_roles()["rollout"],
    ),
    rule(
        RLJobSpec,
        "RLJobSpec.refUsed",
        field=".roles.ref.pool",
        cel=f"{pool_of_cel('ref')} == {pool_of_cel('actor')} || {MAY_NEED_REFERENCE_CEL}",
        wrong="there is no reference model with training.algorithm.kl.coefficient 0, and its GPUs would stay idle",
        advice="set a coefficient above 0, name a function that needs ref_logprobs, or remove the pool",
        holds=_reference_is_used,
    ),
    _unused_layout_rule(
        "ref",
        is_there=may_need_reference,
        is_there_cel=MAY_NEED_REFERENCE_CEL,
        wrong="there is no reference model with training.algorithm.kl.coefficient 0, and its layout would be ignored",
        advice="remove it, set a coefficient above 0, or name a function that needs ref_logprobs",
    ),
    _unused_layout_rule(
        "critic",
        is_there=lambda spec: may_need_critic(spec.training),
        is_there_cel=may_need_critic_cel("self.training"),
        wrong="the algorithm that the job chooses has no critic, and its layout would be ignored",
        advice="remove it, or choose an advantage that needs a critic (algorithm.type: PPO)",
    ),
    _unused_layout_rule(
        "rewardModel",
        is_there=lambda spec: has_reward_model(spec.training),
        is_there_cel=has_reward_model_cel("self.training"),
        wrong="no reward is of type RewardModel, and the layout of its model would be ignored",
        advice="remove it, or add such a reward to training.rewards",
    ),
    rule(
        RLJobSpec,
        "RLJobSpec.noIdlePool",
        field=".pools",
        cel="self.pools.all(p, "
        + " || ".join(f"p.name == {pool_of_cel(role)}" for role in _ROLES if role not in _OPTIONAL_ROLES)
        + "".join(
            f" || (has(self.roles.{role}.pool) && p.name == self.roles.{role}.pool)"
            f" || (p.name == {pool_of_cel(role)} && {is_used})"
            for role, is_used in _OPTIONAL_ROLES.items()
        )
        + ")",
        wrong="there is a pool without a role, whose GPUs would stay idle",
        advice="remove it, or put a role there",
        holds=_all_pools_have_roles,
    ),
    *(
        _layout_rule(role, name, read)
        for role in TRAIN_ROLES
        for name, read in (
            ("shard_size", lambda place: place.shard_size),
            ("sequence_parallel", lambda place: place.sequence_parallel),
        )
    ),
    rule(
        RLJobSpec,
        "RLJobSpec.tensorParallel",
        field=".roles.rollout.tensorParallel",
        cel=f"self.pools.all(p, p.name != {pool_of_cel('rollout')} || p.gpusPerNode % {_PARALLEL} == 0)",
        wrong="must divide the gpusPerNode of the rollout's pool",
        advice="choose a divisor, so that one copy of the model stays within a node",
        holds=_tensor_parallel_fits,
    ),
    rule(
        RLJobSpec,
        "RLJobSpec.tensorParallelEngine",
        field=".roles.rollout.tensorParallel",
        cel=f"{_PARALLEL} == 1 || self.training.rollout.engine != 'HuggingFace'",
        wrong="the HuggingFace engine is not spread over GPUs: each would generate the same responses",
        advice="write 1, or training.rollout.engine: VLLM",
        holds=lambda spec: (
            spec.roles.rollout.tensor_parallel == 1 or spec.training.rollout.engine is not RolloutEngine.HUGGING_FACE
        ),
    ),
)

UNIQUE_RULES = (
    unique_rule(RLJobSpec, "pools", "name", lambda spec: [pool.name for pool in spec.pools]),
    unique_rule(RLJobSpec, "env", "name", lambda spec: [variable.name for variable in spec.env]),
    unique_rule(RLJobSpec, "volumes", "name", lambda spec: [volume.name for volume in spec.volumes]),
    unique_rule(RLJobSpec, "volumes", "mountPath", lambda spec: [volume.mount_path for volume in spec.volumes]),
)
