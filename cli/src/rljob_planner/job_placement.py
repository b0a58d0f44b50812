"""Turns a job's pools and roles into a `Placement`, and writes a placement back into the job's spec."""

from __future__ import annotations

from collections.abc import Mapping

from rljob_api.v1alpha1.optional_roles import absent_roles, reference_is_the_actor
from rljob_api.v1alpha1.pools import Pool
from rljob_api.v1alpha1.spec import ActorRole, RefRole, RLJobSpec, RolloutRole, TrainRole
from rljob_planner.clusters import AMD_LABELS, SELECTORS, Label
from rljob_planner.errors import PlanError
from rljob_planner.gpus import Gpu
from rljob_planner.model_shape import ModelShape
from rljob_planner.workload import TRAIN_ROLES, PlacedPool, Placement, Role, RolloutLayout, TrainLayout, Workload


def placement_of(spec: RLJobSpec, gpus: Mapping[str, Gpu]) -> Placement:
    """The placement that the spec describes. `gpus`: the GPU type of each pool, by the pool's name. A train role
    without a layout in the spec gets the trainer's default (engines/train/layout.py): all GPUs of its pool together
    hold one copy of the model.

    Raises:
        PlanError: a pool has no GPU type, a role names a pool that does not exist, or shardSize, sequenceParallel or
            tensorParallel does not divide the GPUs that it must divide.
    """
    placed, absent = spec.placed_roles(), absent_roles(spec)
    names = [pool.name for pool in spec.pools]
    roles = [role for role in Role if role.value not in absent]
    for role in roles:
        if placed[role.value] not in names:
            raise PlanError(
                f"spec.roles.{role.value}.pool: no pool has this name (seen {placed[role.value]!r});"
                f" use one of {', '.join(names)}"
            )
    return Placement(tuple(_placed_pool(spec, pool, gpus, roles) for pool in spec.pools))


def spec_with(spec: RLJobSpec, placement: Placement, labels: Mapping[str, Label] | None = None) -> RLJobSpec:
    """The spec with the pools and roles of this placement.

    `labels`: a node label for each GPU type, by the type's name. Pools of a type select nodes with its label. A pool
    that the spec already has keeps its other fields. Roles that the job does not use keep their fields. Default values
    are left out, except for a pool's name or a sequenceParallel of 1 that is already in the spec.

    Raises:
        PlanError: this version of the trainer cannot run the placement.
    """
    if not placement.is_supported:
        raise PlanError(
            "the plan: this version cannot run actor and rollout on different pools, or generation and training at the"
            " same time; choose a placement with both on one pool, taking turns"
        )
    before = {pool.name: pool for pool in spec.pools}
    pools: list[Pool] = []
    roles: dict[str, TrainRole | RolloutRole] = {}
    for pool in placement.pools:
        sizes = {"nodes": pool.nodes, "gpus_per_node": pool.gpus_per_node}
        for role in pool.roles:
            field = "reward_model" if role is Role.REWARD_MODEL else role.value
            written = spec.roles.rollout if role is Role.ROLLOUT else spec.roles.train_role(role.value)
            is_named = pools or written.pool == pool.name
            roles[field] = _role(spec, role, pool, pool.name if is_named else None)
        placed = before.get(pool.name, Pool(name=pool.name)).model_copy(update=sizes)
        label = (labels or {}).get(pool.gpu.name)
        pools.append(placed if label is None else _on_nodes_with(label, placed))
    return spec.model_copy(update={"pools": tuple(pools), "roles": spec.roles.model_copy(update=roles)})


def _on_nodes_with(label: Label, pool: Pool) -> Pool:
    """The pool with this label and the GPU resource of the label's vendor, without labels of other GPU types."""
    name, value = label
    others = {key: old for key, old in pool.template.node_selector.items() if key not in SELECTORS}
    template = pool.template.model_copy(update={"node_selector": {**others, name: value}})
    vendor, other = ("amd.com/", "nvidia.com/") if name in AMD_LABELS else ("nvidia.com/", "amd.com/")
    resource = f"{vendor}gpu" if pool.gpu_resource.startswith(other) else pool.gpu_resource
    return pool.model_copy(update={"template": template, "gpu_resource": resource})


def _placed_pool(spec: RLJobSpec, pool: Pool, gpus: Mapping[str, Gpu], roles: list[Role]) -> PlacedPool:
    if pool.name not in gpus:
        raise PlanError(
            f"spec.pools {pool.name}: unknown GPU type (seen none); set --gpu {pool.name}=TYPE or --cluster"
        )
    placed = spec.placed_roles()
    here = [role for role in roles if placed[role.value] == pool.name]
    num_gpus = pool.nodes * pool.gpus_per_node
    layouts = {role: _train_layout(spec, role, num_gpus) for role in here if role in TRAIN_ROLES}
    rollout = None
    if Role.ROLLOUT in here:
        parallel = spec.roles.rollout.tensor_parallel
        _check_divides("rollout", "tensorParallel", parallel, pool.gpus_per_node, "the gpusPerNode of its pool")
        rollout = RolloutLayout(num_gpus, parallel)
    return PlacedPool(pool.name, pool.nodes, pool.gpus_per_node, gpus[pool.name], layouts, rollout)


def _train_layout(spec: RLJobSpec, role: Role, num_gpus: int) -> TrainLayout:
    is_the_actor = role is Role.REF and reference_is_the_actor(spec)
    written = spec.roles.actor if is_the_actor else spec.roles.train_role(role.value)
    shard_size, num_sequence_ranks = written.shard_size or num_gpus, written.num_sequence_ranks
    _check_divides(role.value, "shardSize", shard_size, num_gpus, "the GPUs of its pool")
    _check_divides(role.value, "sequenceParallel", num_sequence_ranks, num_gpus, "the GPUs of its pool")
    is_fixed = written.shard_size is not None
    is_written = is_fixed or written.sequence_parallel is not None
    return TrainLayout(num_gpus, shard_size, num_sequence_ranks, has_fixed_shard_size=is_fixed, is_written=is_written)


def _check_divides(role: str, field: str, value: int, total: int, what: str) -> None:
    if total % value:
        raise PlanError(f"spec.roles.{role}.{field}: must divide {what}, {total} (seen {value}); choose a divisor")


def _role(spec: RLJobSpec, role: Role, pool: PlacedPool, name: str | None) -> TrainRole | RolloutRole:
    """The role of the spec with the layout that it has on this pool. `name`: the value of the role's field `pool`."""
    if role is Role.ROLLOUT:
        assert pool.rollout is not None, "a pool with the rollout has the rollout's layout"
        return RolloutRole(pool=name, tensor_parallel=pool.rollout.tensor_parallel)
    layout = pool.layouts[role]
    shard_size = None if layout.shard_size == layout.num_gpus else layout.shard_size
    writes_one = spec.roles.train_role(role.value).sequence_parallel == 1
    sequence_parallel = layout.sequence_parallel if writes_one or layout.sequence_parallel > 1 else None
    if role is Role.REF:
        own_model = spec.roles.ref.model
        if own_model is None and spec.training.model.lora is not None:
            # With LoRA, a reference without layout fields is the actor's model; with them it is a separate copy.
            if reference_is_the_actor(spec):
                return RefRole(pool=name, sequence_parallel=1 if writes_one else None)
            shard_size = layout.shard_size
        return RefRole(pool=name, shard_size=shard_size, sequence_parallel=sequence_parallel, model=own_model)
    if role is Role.ACTOR:
        defers = spec.roles.actor.defer_gradient_reduction
        return ActorRole(
            pool=name, shard_size=shard_size, sequence_parallel=sequence_parallel, defer_gradient_reduction=defers
        )
    return TrainRole(pool=name, shard_size=shard_size, sequence_parallel=sequence_parallel)


def check_layouts(workload: Workload, placement: Placement) -> None:
    """Checks that sequence or tensor parallelism divides the attention heads of each model, and tensor parallelism also
    its vocabulary and MLPs (trainer, engines/train/layout.py; vLLM, config/model.py). The contract cannot check this,
    because it does not know the model's shape.

    Raises:
        PlanError: a size does not divide the heads, the vocabulary or an MLP.
    """
    for pool in placement.pools:
        for role, layout in pool.layouts.items():
            field = f"spec.roles.{role.value}.sequenceParallel"
            _check_heads(field, layout.sequence_parallel, workload.models[role].shape)
        if pool.rollout is not None:
            field = "spec.roles.rollout.tensorParallel"
            _check_heads(field, pool.rollout.tensor_parallel, workload.rollout.shape)
            _check_sizes(field, pool.rollout.tensor_parallel, workload.rollout.shape)


def _check_sizes(field: str, size: int, shape: ModelShape) -> None:
    if not shape.allows_tensor_parallel(size):
        widths = ", ".join(map(str, dict.fromkeys(shape.mlp_widths)))
        raise PlanError(
            f"{field}: must divide the vocabulary of {shape.name} ({shape.vocabulary_size}, which vLLM pads to a"
            f" multiple of 64) and the width of its MLPs ({widths}) (seen {size}); choose a divisor of all, such as a"
            " power of 2"
        )


def _check_heads(field: str, size: int, shape: ModelShape) -> None:
    if not shape.spreads_over(size):
        possible = [str(each) for each in range(1, shape.num_heads + 1) if shape.spreads_over(each)]
        raise PlanError(
            f"{field}: must divide the {shape.num_heads} attention heads of {shape.name}, and divide its"
            f" {shape.num_kv_heads} key/value heads or be a multiple of them (seen {size});"
            f" choose one of {', '.join(possible)}"
        )
