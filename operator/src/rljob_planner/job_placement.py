"""Where a job has its roles, and a job that has them elsewhere."""

from __future__ import annotations

from collections.abc import Mapping

from rljob_api.v1alpha1.optional_roles import absent_roles, reference_is_the_actor
from rljob_api.v1alpha1.pools import Pool
from rljob_api.v1alpha1.spec import ActorRole, RLJobSpec, RolloutRole, TrainRole
from rljob_planner.clusters import AMD_LABELS, SELECTORS, Label
from rljob_planner.errors import PlanError
from rljob_planner.gpus import Gpu
from rljob_planner.model_shape import ModelShape
from rljob_planner.workload import TRAIN_ROLES, PlacedPool, Placement, Role, RolloutLayout, TrainLayout, Workload


def placement_of(spec: RLJobSpec, gpus: Mapping[str, Gpu]) -> Placement:
    """The pools of the job as they are, with the kind of GPU of each by its name. A layout that a job leaves open is
    that of the trainer (engines/train/layout.py): all GPUs of the pool hold one copy together.

    Raises PlanError for a pool without a kind, a role whose pool is not there, and a layout that does not divide."""
    placed, absent = spec.placed_roles(), absent_roles(spec)
    names = [pool.name for pool in spec.pools]
    roles = [role for role in Role if role.value not in absent]
    for role in roles:
        if placed[role.value] not in names:
            raise PlanError(
                f"spec.roles.{role.value}.pool: there is no pool of this name (seen {placed[role.value]!r});"
                f" name one of {', '.join(names)}"
            )
    return Placement(tuple(_placed_pool(spec, pool, gpus, roles) for pool in spec.pools))


def spec_with(spec: RLJobSpec, placement: Placement, labels: Mapping[str, Label] | None = None) -> RLJobSpec:
    """The job with these pools and roles. A pool selects nodes of its kind of GPU where `labels` has the kind's name;
    else a pool whose name the job has keeps its other fields. Values equal to their default are left out, but what the
    file says already of a pool's name or of one rank per row stays written. Roles that the job does not have keep their
    fields.

    Raises PlanError for a placement that this version of the trainer cannot run."""
    if not placement.runs_today:
        raise PlanError(
            "the plan: it has actor and rollout on pools of their own, or generates beside training, which this version"
            " cannot run; choose one that has both on one pool"
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
    """The pool without labels of other kinds, and with GPUs of the label's maker."""
    name, value = label
    others = {key: old for key, old in pool.template.node_selector.items() if key not in SELECTORS}
    template = pool.template.model_copy(update={"node_selector": {**others, name: value}})
    maker, other = ("amd.com/", "nvidia.com/") if name in AMD_LABELS else ("nvidia.com/", "amd.com/")
    resource = f"{maker}gpu" if pool.gpu_resource.startswith(other) else pool.gpu_resource
    return pool.model_copy(update={"template": template, "gpu_resource": resource})


def _placed_pool(spec: RLJobSpec, pool: Pool, gpus: Mapping[str, Gpu], roles: list[Role]) -> PlacedPool:
    if pool.name not in gpus:
        raise PlanError(f"spec.pools {pool.name}: its kind of GPU is not known; name it with --gpu NAME or --cluster")
    placed = spec.placed_roles()
    here = [role for role in roles if placed[role.value] == pool.name]
    num_gpus = pool.nodes * pool.gpus_per_node
    layouts = {role: _train_layout(spec, role, num_gpus) for role in here if role in TRAIN_ROLES}
    rollout = None
    if Role.ROLLOUT in here:
        parallel = spec.roles.rollout.tensor_parallel
        _refuse_uneven("rollout", "tensorParallel", parallel, pool.gpus_per_node, "the gpusPerNode of its pool")
        rollout = RolloutLayout(num_gpus, parallel)
    return PlacedPool(pool.name, pool.nodes, pool.gpus_per_node, gpus[pool.name], layouts, rollout)


def _train_layout(spec: RLJobSpec, role: Role, num_gpus: int) -> TrainLayout:
    is_actor = role is Role.REF and reference_is_the_actor(spec)
    place = spec.roles.actor if is_actor else spec.roles.train_role(role.value)
    shard_size, shares = place.shard_size or num_gpus, place.num_sequence_ranks
    _refuse_uneven(role.value, "shardSize", shard_size, num_gpus, "the GPUs of its pool")
    _refuse_uneven(role.value, "sequenceParallel", shares, num_gpus, "the GPUs of its pool")
    return TrainLayout(num_gpus, shard_size, shares, keeps_shard_size=place.shard_size is not None)


def _refuse_uneven(role: str, field: str, value: int, total: int, what: str) -> None:
    if total % value:
        raise PlanError(f"spec.roles.{role}.{field}: must divide {what}, {total} (seen {value}); choose a divisor")


def _role(spec: RLJobSpec, role: Role, pool: PlacedPool, name: str | None) -> TrainRole | RolloutRole:
    if role is Role.ROLLOUT:
        assert pool.rollout is not None, "a pool with this role has its layout"
        return RolloutRole(pool=name, tensor_parallel=pool.rollout.tensor_parallel)
    layout = pool.layouts[role]
    shard_size = None if layout.shard_size == layout.num_gpus else layout.shard_size
    is_written = spec.roles.train_role(role.value).sequence_parallel == 1
    shares = layout.sequence_parallel if is_written or layout.sequence_parallel > 1 else None
    if role is Role.REF and spec.training.model.lora is not None:
        # By what the file says of its layout a reference is the actor's model, or one of its own.
        if reference_is_the_actor(spec):
            return TrainRole(pool=name, sequence_parallel=1 if is_written else None)
        shard_size = layout.shard_size
    if role is Role.ACTOR:
        defers = spec.roles.actor.defer_gradient_reduction
        return ActorRole(pool=name, shard_size=shard_size, sequence_parallel=shares, defer_gradient_reduction=defers)
    return TrainRole(pool=name, shard_size=shard_size, sequence_parallel=shares)


def check_layouts(workload: Workload, placement: Placement) -> None:
    """What no rule of the contract can say, because it takes the model: the heads of attention divide. Raises PlanError
    where they do not (trainer, engines/train/layout.py; vLLM, config/model.py)."""
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
            f" multiple of 64) and the width of its MLPs ({widths}) (seen {size}); choose a power of 2"
        )


def _check_heads(field: str, size: int, shape: ModelShape) -> None:
    if not shape.spreads_over(size):
        raise PlanError(
            f"{field}: must divide the {shape.num_heads} heads of attention of {shape.name}, and divide or be a"
            f" multiple of its {shape.num_kv_heads} heads of keys and values (seen {size}); choose another one"
        )
