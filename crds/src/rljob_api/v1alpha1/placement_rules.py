"""Rules on the pools of roles, the layouts of their models, and offloading."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from rljob_api.rule import Path, Rule, rule, wire_name
from rljob_api.v1alpha1.optional_roles import (
    MAY_NEED_REFERENCE_CEL,
    OPTIONAL_ROLES,
    REFERENCE_IS_THE_ACTOR_CEL,
    OptionalRole,
    absent_roles,
    may_need_reference,
    reference_is_the_actor,
)
from rljob_api.v1alpha1.pools import MIG
from rljob_api.v1alpha1.rollout import RolloutEngine
from rljob_api.v1alpha1.spec import TRAIN_ROLES, RefRole, RLJobSpec, TrainRole, pool_of_cel

_ROLES = ("actor", "rollout", "ref", "critic", "rewardModel")
_TENSOR_PARALLEL = "self.roles.rollout.tensorParallel"
_OFFLOAD = "self.training.model.offload"


def _tensor_parallel_fits(spec: RLJobSpec) -> bool:
    name = spec.placed_roles()["rollout"]
    return all(p.gpus_per_node % spec.roles.rollout.tensor_parallel == 0 for p in spec.pools if p.name == name)


def _has_mig_devices(spec: RLJobSpec) -> bool:
    name = spec.placed_roles()["rollout"]
    return any(MIG in pool.gpu_resource for pool in spec.pools if pool.name == name)


def _pools_exist(spec: RLJobSpec, roles: Iterable[str]) -> bool:
    """Whether the pools of these roles exist. If not, only the missing pool is reported, not the faults that follow
    from it."""
    names, placed = {pool.name for pool in spec.pools}, spec.placed_roles()
    return all(placed[role] in names for role in roles)


def _pool_exists_cel(role: str) -> str:
    return f"(!has(self.roles.{role}.pool) || self.pools.exists(p, p.name == self.roles.{role}.pool))"


def _role_pool_rule(role: str) -> Rule:
    return rule(
        RLJobSpec,
        f"RLJobSpec.{role}Pool",
        field=f".roles.{role}.pool",
        cel=_pool_exists_cel(role),
        wrong="is not the name of a pool",
        advice="use a name from spec.pools, or remove this field to use the first pool",
        holds=lambda spec: _pools_exist(spec, [role]),
        details=lambda spec, _: [pool.name for pool in spec.pools],
    )


def _layout_rule(role: str, name: str, read: Callable[[TrainRole], int | None]) -> Rule:
    """The rule that `shardSize` or `sequenceParallel` of a role divides the number of GPUs of its pool."""
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
        wrong="must divide the number of GPUs of the role's pool (nodes * gpusPerNode)",
        advice="choose a divisor",
        holds=holds,
    )


def _unused_pool_rule(role: OptionalRole) -> Rule:
    """The rule that a job sets no pool for a role that the job does not have."""
    name, pool = role.name, f"self.roles.{role.name}.pool"

    def holds(spec: RLJobSpec) -> bool:
        return spec.roles.train_role(name).pool is None or role.is_present(spec) or not _pools_exist(spec, [name])

    return rule(
        RLJobSpec,
        f"RLJobSpec.{name}Used",
        field=f".roles.{name}.pool",
        cel=f"!has({pool}) || {role.is_present_cel} || !{_pool_exists_cel(name)}",
        wrong=f"would be ignored, because {role.wrong}",
        advice=f"remove it, or {role.advice}",
        holds=holds,
    )


def _unused_layout_rule(role: OptionalRole) -> Rule:
    """The rule that a job sets no layout, and no model, for a role that the job does not have."""
    name, role_cel = role.name, f"self.roles.{role.name}"
    fields = ["shardSize", "sequenceParallel", *(["model"] if name == "ref" else [])]

    def holds(spec: RLJobSpec) -> bool:
        layout = spec.roles.train_role(name)
        has_model = isinstance(layout, RefRole) and layout.model is not None
        is_unset = layout.shard_size is None and layout.sequence_parallel is None and not has_model
        return is_unset or role.is_present(spec)

    return rule(
        RLJobSpec,
        f"RLJobSpec.{name}LayoutUsed",
        field=f".roles.{name}",
        cel=" && ".join(f"!has({role_cel}.{field})" for field in fields) + f" || {role.is_present_cel}",
        wrong=f"{' and '.join([', '.join(fields[:-1]), fields[-1]])} would be ignored, because {role.wrong}",
        advice=f"remove them, or {role.advice}",
        holds=holds,
    )


def _idle_pools(spec: RLJobSpec) -> list[Path]:
    """Paths, relative to `pools`, of the names of pools without a role."""
    placed, absent = spec.placed_roles(), absent_roles(spec)
    # A pool that an absent role names counts as used: `_unused_pool_rule` reports that fault.
    used = {pool for role, pool in placed.items() if role not in absent or spec.roles.train_role(role).pool is not None}
    return [(index, "name") for index, pool in enumerate(spec.pools) if pool.name not in used]


_ALL_POOLS_IN_USE_CEL = (
    "self.pools.all(p, "
    + " || ".join(
        (
            f"p.name == {pool_of_cel('actor')}",
            f"p.name == {pool_of_cel('rollout')}",
            *(
                f"(has(self.roles.{role.name}.pool) && p.name == self.roles.{role.name}.pool)"
                f" || (p.name == {pool_of_cel(role.name)} && ({role.is_present_cel}))"
                for role in OPTIONAL_ROLES
            ),
        )
    )
    + ")"
)


def _gradients_of_replicas_rule(
    name: str, role: str, field: str, offloads: Callable[[RLJobSpec], bool], offloads_not_cel: str
) -> Rule:
    """The rule that a role offloads no gradients if its pool holds several copies of the model (hybrid sharding)."""
    shard_size = f"self.roles.{role}.shardSize"

    def has_one_replica(spec: RLJobSpec) -> bool:
        pool, size = spec.placed_roles()[role], spec.roles.train_role(role).shard_size
        return size is None or all(p.nodes * p.gpus_per_node <= size for p in spec.pools if p.name == pool)

    return rule(
        RLJobSpec,
        name,
        field=field,
        cel=f"{offloads_not_cel} || !has({shard_size}) || "
        f"self.pools.all(p, p.name != {pool_of_cel(role)} || p.nodes * p.gpusPerNode <= {shard_size})",
        wrong=f"gradient offload does not work with hybrid sharding (roles.{role}.shardSize below the pool's number of"
        " GPUs)",
        advice=f"set it to false, or remove roles.{role}.shardSize",
        holds=lambda spec: not offloads(spec) or has_one_replica(spec),
    )


PLACEMENT_RULES = (
    *(_role_pool_rule(role) for role in _ROLES),
    rule(
        RLJobSpec,
        "RLJobSpec.actorWithRollout",
        field=".roles",
        cel=f"{pool_of_cel('actor')} == {pool_of_cel('rollout')}"
        f" || !{_pool_exists_cel('actor')} || !{_pool_exists_cel('rollout')}",
        wrong="actor and rollout must be on the same pool, because weights are transferred within each GPU",
        advice="set the same pool for both, or remove the pool of both (ref, critic and rewardModel may have separate"
        " pools)",
        holds=lambda spec: (
            spec.placed_roles()["actor"] == spec.placed_roles()["rollout"]
            or not _pools_exist(spec, ("actor", "rollout"))
        ),
    ),
    *(_unused_pool_rule(role) for role in OPTIONAL_ROLES),
    *(_unused_layout_rule(role) for role in OPTIONAL_ROLES),
    rule(
        RLJobSpec,
        "RLJobSpec.noIdlePool",
        field=".pools",
        cel=f"{_ALL_POOLS_IN_USE_CEL} || " + " || ".join(f"!{_pool_exists_cel(role)}" for role in _ROLES),
        wrong="a pool has no role, and its GPUs would be idle",
        advice="remove the pool, or set it as the pool of a role",
        holds=lambda spec: not _idle_pools(spec) or not _pools_exist(spec, _ROLES),
        fault_paths=_idle_pools,
    ),
    *(
        _layout_rule(role, name, read)
        for role in TRAIN_ROLES
        for name, read in (
            ("shard_size", lambda layout: layout.shard_size),
            ("sequence_parallel", lambda layout: layout.sequence_parallel),
        )
    ),
    rule(
        RLJobSpec,
        "RLJobSpec.tensorParallel",
        field=".roles.rollout.tensorParallel",
        cel=f"self.pools.all(p, p.name != {pool_of_cel('rollout')} || p.gpusPerNode % {_TENSOR_PARALLEL} == 0)",
        wrong="must divide gpusPerNode of the rollout's pool, because a copy of the model stays within one node",
        advice="choose a divisor",
        holds=_tensor_parallel_fits,
    ),
    rule(
        RLJobSpec,
        "RLJobSpec.tensorParallelEngine",
        field=".roles.rollout.tensorParallel",
        cel=f"{_TENSOR_PARALLEL} == 1 || self.training.rollout.engine != 'HuggingFace'",
        wrong="must be 1 with the HuggingFace engine, which does not support tensor parallelism",
        advice="set it to 1, or use training.rollout.engine: VLLM",
        holds=lambda spec: (
            spec.roles.rollout.tensor_parallel == 1 or spec.training.rollout.engine is not RolloutEngine.HUGGING_FACE
        ),
    ),
    rule(
        RLJobSpec,
        "RLJobSpec.tensorParallelOnMig",
        field=".roles.rollout.tensorParallel",
        cel=f"{_TENSOR_PARALLEL} == 1"
        f" || self.pools.all(p, p.name != {pool_of_cel('rollout')} || !p.gpuResource.contains('{MIG}'))",
        wrong="must be 1 on MIG devices, because a process can use only one",
        advice="set it to 1, or use whole GPUs",
        holds=lambda spec: spec.roles.rollout.tensor_parallel == 1 or not _has_mig_devices(spec),
    ),
    _gradients_of_replicas_rule(
        "RLJobSpec.critic.offload.gradientsOfReplicas",
        "critic",
        ".training.critic.model.offload.gradients",
        lambda spec: spec.training.critic is not None and spec.training.critic.model.offload.gradients,
        "!has(self.training.critic) || !self.training.critic.model.offload.gradients",
    ),
)

OFFLOAD_RULES = (
    rule(
        RLJobSpec,
        "RLJobSpec.offload.reference",
        field=".training.model.offload.reference",
        # With adapters, the next rule applies: a coefficient above 0 would not help.
        cel=f"!{_OFFLOAD}.reference || {MAY_NEED_REFERENCE_CEL} || ({REFERENCE_IS_THE_ACTOR_CEL})",
        wrong="must not be true: the job has no reference model, because training.algorithm.kl.coefficient is 0",
        advice="remove it, or set the coefficient above 0 (or use Distillation, or a function that needs ref_logprobs)",
        holds=lambda spec: (
            not spec.training.model.offload.reference or may_need_reference(spec) or reference_is_the_actor(spec)
        ),
    ),
    rule(
        RLJobSpec,
        "RLJobSpec.offload.referenceOfAdapters",
        field=".training.model.offload.reference",
        cel=f"!{_OFFLOAD}.reference || !({REFERENCE_IS_THE_ACTOR_CEL})",
        wrong="must not be true: with model.lora, a reference is the actor's model with its adapters disabled",
        advice="remove it (offload.parameters offloads the actor's model)",
        holds=lambda spec: not spec.training.model.offload.reference or not reference_is_the_actor(spec),
    ),
    rule(
        RLJobSpec,
        "RLJobSpec.offload.gradients",
        field=".training.model.offload.gradients",
        cel=f"!{_OFFLOAD}.gradients || !self.roles.actor.deferGradientReduction",
        wrong="does not work with roles.actor.deferGradientReduction, which keeps unsharded gradients on the GPU",
        advice="set one of the two to false",
        holds=lambda spec: not spec.training.model.offload.gradients or not spec.roles.actor.defer_gradient_reduction,
    ),
    _gradients_of_replicas_rule(
        "RLJobSpec.offload.gradientsOfReplicas",
        "actor",
        ".training.model.offload.gradients",
        lambda spec: spec.training.model.offload.gradients,
        f"!{_OFFLOAD}.gradients",
    ),
)
