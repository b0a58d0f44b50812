"""Rules on where roles run, and on uniqueness."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rljob_api.v1alpha1.advantage import AdvantageType
from rljob_api.v1alpha1.policy_loss import LossType
from rljob_api.v1alpha1.recipes import may_need_critic, may_need_critic_cel
from rljob_api.v1alpha1.reward_model_rules import has_reward_model, has_reward_model_cel
from rljob_api.v1alpha1.roles import TRAIN_ROLES, TrainRole, pool_of_cel
from rljob_api.v1alpha1.rollout import RolloutEngine
from rljob_api.v1alpha1.rule import Path, Rule, cel_text, rule, unique_rule, wire_name
from rljob_api.v1alpha1.spec import Metadata, RLJobSpec

MAX_NAME_LENGTH = 46
_NAME = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"
_ROLES = ("actor", "rollout", "ref", "critic", "rewardModel")
_FUNCTIONS = ("self.training.algorithm.advantage", "self.training.algorithm.loss")
_PARALLEL = "self.roles.rollout.tensorParallel"


def _tensor_parallel_fits(spec: RLJobSpec) -> bool:
    name = spec.placed_roles()["rollout"]
    return all(p.gpus_per_node % spec.roles.rollout.tensor_parallel == 0 for p in spec.pools if p.name == name)


def _are_there(spec: RLJobSpec, roles: Iterable[str]) -> bool:
    """Whether there are the pools that these roles name; where not, that is said and nothing that follows from it."""
    names, placed = {pool.name for pool in spec.pools}, spec.placed_roles()
    return all(placed[role] in names for role in roles)


def _is_there_cel(role: str) -> str:
    return f"(!has(self.roles.{role}.pool) || self.pools.exists(p, p.name == self.roles.{role}.pool))"


def _role_pool_rule(role: str) -> Rule:
    return rule(
        RLJobSpec,
        f"RLJobSpec.{role}Pool",
        field=f".roles.{role}.pool",
        cel=_is_there_cel(role),
        wrong="there is no pool of this name",
        advice="leave it out for the first, or name one of spec.pools",
        holds=lambda spec: _are_there(spec, [role]),
        choices=lambda spec, _: [pool.name for pool in spec.pools],
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


@dataclass(frozen=True)
class OptionalRole:
    """A role that only some jobs have."""

    name: str
    is_there: Callable[[RLJobSpec], bool]
    is_there_cel: str
    wrong: str
    advice: str


OPTIONAL_ROLES = (
    OptionalRole(
        "ref",
        may_need_reference,
        MAY_NEED_REFERENCE_CEL,
        "there is no reference model with training.algorithm.kl.coefficient 0",
        "set a coefficient above 0 (or choose a function that needs ref_logprobs)",
    ),
    OptionalRole(
        "critic",
        lambda spec: may_need_critic(spec.training.algorithm),
        may_need_critic_cel("self.training.algorithm"),
        "the algorithm that the job chooses has no critic",
        "choose an advantage that needs a critic (algorithm.type: PPO)",
    ),
    OptionalRole(
        "rewardModel",
        lambda spec: has_reward_model(spec.training),
        has_reward_model_cel("self.training"),
        "no reward is of type RewardModel",
        "add such a reward to training.rewards",
    ),
)


def absent_roles(spec: RLJobSpec) -> list[str]:
    """Roles that only some jobs have, and this one has not."""
    return [role.name for role in OPTIONAL_ROLES if not role.is_there(spec)]


def reference_is_the_actor(spec: RLJobSpec) -> bool:
    """Whether a reference is the actor's model with its adapters off, in the actor's layout."""
    placed, place = spec.placed_roles(), spec.roles.ref
    is_beside = placed["ref"] == placed["actor"] and place.shard_size is None and place.sequence_parallel is None
    return spec.training.model.lora is not None and is_beside


REFERENCE_IS_THE_ACTOR_CEL = (
    f"has(self.training.model.lora) && {pool_of_cel('ref')} == {pool_of_cel('actor')}"
    " && !has(self.roles.ref.shardSize) && !has(self.roles.ref.sequenceParallel)"
)


def _unused_pool_rule(role: OptionalRole) -> Rule:
    """A pool for a role that the job does not have."""
    name, pool = role.name, f"self.roles.{role.name}.pool"

    def holds(spec: RLJobSpec) -> bool:
        return spec.roles.train_role(name).pool is None or role.is_there(spec) or not _are_there(spec, [name])

    return rule(
        RLJobSpec,
        f"RLJobSpec.{name}Used",
        field=f".roles.{name}.pool",
        cel=f"!has({pool}) || {role.is_there_cel} || !{_is_there_cel(name)}",
        wrong=f"{role.wrong}, and its pool would be ignored",
        advice=f"remove it, or {role.advice}",
        holds=holds,
    )


def _unused_layout_rule(role: OptionalRole) -> Rule:
    """A layout of a role that the job does not have would be ignored."""
    name, place = role.name, f"self.roles.{role.name}"

    def holds(spec: RLJobSpec) -> bool:
        asked = spec.roles.train_role(name)
        return (asked.shard_size is None and asked.sequence_parallel is None) or role.is_there(spec)

    return rule(
        RLJobSpec,
        f"RLJobSpec.{name}LayoutUsed",
        field=f".roles.{name}",
        cel=f"!has({place}.shardSize) && !has({place}.sequenceParallel) || {role.is_there_cel}",
        wrong=f"{role.wrong}, and its layout would be ignored",
        advice=f"remove it, or {role.advice}",
        holds=holds,
    )


def _idle_pools(spec: RLJobSpec) -> list[Path]:
    """The names of pools without a role, below `pools`."""
    placed, absent = spec.placed_roles(), absent_roles(spec)
    # A pool that a role names is that role's, although the job has no such role: that is another fault.
    used = {pool for role, pool in placed.items() if role not in absent or spec.roles.train_role(role).pool is not None}
    return [(index, "name") for index, pool in enumerate(spec.pools) if pool.name not in used]


_ALL_IN_USE_CEL = (
    "self.pools.all(p, "
    + " || ".join(
        (
            f"p.name == {pool_of_cel('actor')}",
            f"p.name == {pool_of_cel('rollout')}",
            *(
                f"(has(self.roles.{role.name}.pool) && p.name == self.roles.{role.name}.pool)"
                f" || (p.name == {pool_of_cel(role.name)} && ({role.is_there_cel}))"
                for role in OPTIONAL_ROLES
            ),
        )
    )
    + ")"
)


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
        cel=f"{pool_of_cel('actor')} == {pool_of_cel('rollout')}"
        f" || !{_is_there_cel('actor')} || !{_is_there_cel('rollout')}",
        wrong="actor and rollout must be on one pool, because they hand over weights within each GPU",
        advice="name the same pool for both, or none (ref and critic may have pools of their own)",
        holds=lambda spec: (
            spec.placed_roles()["actor"] == spec.placed_roles()["rollout"] or not _are_there(spec, ("actor", "rollout"))
        ),
    ),
    *(_unused_pool_rule(role) for role in OPTIONAL_ROLES),
    *(_unused_layout_rule(role) for role in OPTIONAL_ROLES),
    rule(
        RLJobSpec,
        "RLJobSpec.noIdlePool",
        field=".pools",
        cel=f"{_ALL_IN_USE_CEL} || " + " || ".join(f"!{_is_there_cel(role)}" for role in _ROLES),
        wrong="there is a pool without a role, whose GPUs would stay idle",
        advice="remove it, or put a role there",
        holds=lambda spec: not _idle_pools(spec) or not _are_there(spec, _ROLES),
        places=_idle_pools,
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
