"""Changes of a job that need less memory, as one writes them into its file, and the workload and placement with them.

Only such as the contract takes: what must divide divides (crds: placement_rules.py,
batch_size_rules.py). What a change does to memory is worked out anew by `knobs`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from rljob_planner.job_adapters import lora_shape
from rljob_planner.placement import PlacedPool, Placement, RolloutLayout, TrainLayout
from rljob_planner.workload import EngineKind, ModelOffload, Role, TrainModel, Workload

MODEL_FIELDS = {
    Role.ACTOR: "spec.training.model",
    Role.REF: "spec.training.model",
    Role.CRITIC: "spec.training.critic.model",
    Role.REWARD_MODEL: "spec.training.rewards[].rewardModel",
}
LORA_RANK = 16


@dataclass(frozen=True)
class Change:
    """One field of a job's file."""

    field: str
    """`spec.training.model.gradientCheckpointing`."""
    value: str
    """As one writes it."""
    before: str

    @property
    def is_drastic(self) -> bool:
        """Whether it takes more GPUs, or what is learned is not the same any more."""
        return self.field.endswith((".nodes", ".lora"))


@dataclass(frozen=True)
class Changed:
    """A job with one change."""

    change: Change
    workload: Workload
    placement: Placement


def ladders(workload: Workload, placement: Placement) -> Iterator[tuple[Changed, ...]]:
    """For each field that may help, its values from the gentlest on. The fields come in the order of what they cost:
    nothing or little time, more time, more GPUs, another kind of training."""
    for one in (
        _utilization,
        _cpu_cache,
        _micro_batch,
        _max_sequences,
        _shard_sizes,
        _frozen_offload,
        _checkpointing,
        _offload,
        _tensor_parallel,
        _sequence_parallel,
        _more_gpus,
        _lora,
    ):
        yield from (each for each in one(workload, placement) if each)


Ladders = Iterator[tuple[Changed, ...]]


def _utilization(workload: Workload, placement: Placement) -> Ladders:
    pool = placement.pool_of(Role.ROLLOUT)
    if workload.rollout.engine is not EngineKind.VLLM or pool.gpu.is_cpu:
        return
    share = workload.rollout.memory_utilization
    lower = [each / 100 for each in range(90, 5, -5) if each / 100 < share]
    higher = [each / 100 for each in range(10, 95, 5) if each / 100 > share]
    for values in (lower, higher):
        yield tuple(
            Changed(
                Change("spec.training.rollout.gpuMemoryUtilization", f"{value:g}", f"{share:g}"),
                replace(workload, rollout=replace(workload.rollout, memory_utilization=value)),
                placement,
            )
            for value in values
        )


def _cpu_cache(workload: Workload, placement: Placement) -> Ladders:
    pool = placement.pool_of(Role.ROLLOUT)
    if workload.rollout.engine is not EngineKind.VLLM or not pool.gpu.is_cpu:
        return
    now = workload.rollout.cpu_kv_cache_bytes
    lower = [now // 2**power for power in range(1, 8)]
    for values in (lower, [now * 2**power for power in range(1, 8)]):
        yield tuple(
            Changed(
                Change("spec.training.rollout.cpuKvCache", _mebibytes(value), _mebibytes(now)),
                replace(workload, rollout=replace(workload.rollout, cpu_kv_cache_bytes=value)),
                placement,
            )
            for value in values
            if value >= 2**20
        )


def _micro_batch(workload: Workload, placement: Placement) -> Ladders:
    now = workload.max_tokens_per_micro_batch
    shares = [layout.sequence_parallel for pool in placement.pools for layout in pool.layouts.values()]
    # Each role's ranks must hold the longest row together.
    least = -(-workload.lengths.longest_row // min(shares, default=1))
    halves = [now // 2**power for power in range(1, 20) if now // 2**power > least]
    yield tuple(
        Changed(
            Change("spec.training.maxTokensPerMicroBatch", str(value), str(now)),
            replace(workload, max_tokens_per_micro_batch=value),
            placement,
        )
        for value in (*halves, least)
        if value < now
    )


def _max_sequences(workload: Workload, placement: Placement) -> Ladders:
    now = workload.rollout.max_sequences
    yield tuple(
        Changed(
            Change("spec.training.rollout.maxNumSequences", str(value), str(now)),
            replace(workload, rollout=replace(workload.rollout, max_sequences=value)),
            placement,
        )
        for value in (now // 2**power for power in range(1, 8))
        if value >= 4
    )


def _shard_sizes(workload: Workload, placement: Placement) -> Ladders:
    for pool, role, layout in own_layouts(workload, placement):
        larger = [size for size in range(layout.shard_size + 1, layout.num_gpus + 1) if layout.num_gpus % size == 0]
        yield tuple(
            Changed(
                Change(f"spec.roles.{role}.shardSize", str(size), str(layout.shard_size)),
                workload,
                with_layout(workload, placement, pool, role, replace(layout, shard_size=size)),
            )
            for size in larger
        )


def _frozen_offload(workload: Workload, placement: Placement) -> Ladders:
    for role, name in ((Role.REF, "offload.reference"), (Role.REWARD_MODEL, "offload")):
        model = workload.models.get(role)
        if model is None or model.offload.parameters or model.is_actor_without_adapters:
            continue
        field = f"{MODEL_FIELDS[role]}.{name}"
        yield (_switched(workload, placement, role, field, replace(model, offload=ModelOffload(parameters=True))),)


def _checkpointing(workload: Workload, placement: Placement) -> Ladders:
    for role, model in _trained(workload):
        field = f"{MODEL_FIELDS[role]}.gradientCheckpointing"
        if not model.checkpoints_activations:
            yield (_switched(workload, placement, role, field, replace(model, checkpoints_activations=True)),)
        elif model.checkpoints_every_nth_layer > 1:
            change = Change(f"{field}EveryNthLayer", "1", str(model.checkpoints_every_nth_layer))
            yield (Changed(change, _with_model(workload, role, checkpoints_every_nth_layer=1), placement),)


def _offload(workload: Workload, placement: Placement) -> Ladders:
    for role, model in _trained(workload):
        if model.defers_reduction:
            change = Change(f"spec.roles.{role}.deferGradientReduction", "false", "true")
            yield (Changed(change, _with_model(workload, role, defers_reduction=False), placement),)
        layout = placement.pool_of(role).layouts[role]
        can_leave = {
            "optimizer": not model.offload.optimizer,
            "parameters": not model.offload.parameters,
            "gradients": not (model.offload.gradients or model.defers_reduction or layout.num_replicas > 1),
        }
        for name in (name for name, is_possible in can_leave.items() if is_possible):
            offload = ModelOffload(
                parameters=model.offload.parameters or name == "parameters",
                gradients=model.offload.gradients or name == "gradients",
                optimizer=model.offload.optimizer or name == "optimizer",
            )
            field = f"{MODEL_FIELDS[role]}.offload.{name}"
            yield (_switched(workload, placement, role, field, replace(model, offload=offload)),)


def _tensor_parallel(workload: Workload, placement: Placement) -> Ladders:
    pool = placement.pool_of(Role.ROLLOUT)
    assert pool.rollout is not None, "the pool of the rollout has one"
    now, shape = pool.rollout.tensor_parallel, workload.rollout.shape
    if workload.rollout.engine is not EngineKind.VLLM:
        return
    yield tuple(
        Changed(
            Change("spec.roles.rollout.tensorParallel", str(value), str(now)),
            workload,
            _with_pool(placement, pool, replace(pool, rollout=RolloutLayout(pool.num_gpus, value))),
        )
        for value in range(now + 1, pool.gpus_per_node + 1)
        if pool.gpus_per_node % value == 0 and shape.spreads_over(value)
    )


def _sequence_parallel(workload: Workload, placement: Placement) -> Ladders:
    for pool, role, layout in own_layouts(workload, placement):
        shape, now = workload.models[role].shape, layout.sequence_parallel
        yield tuple(
            Changed(
                Change(f"spec.roles.{role}.sequenceParallel", str(value), str(now)),
                workload,
                with_layout(workload, placement, pool, role, replace(layout, sequence_parallel=value)),
            )
            for value in (now * 2, now * 4, now * 8)
            if layout.num_gpus % value == 0 and shape.spreads_over(value)
        )


def _more_gpus(workload: Workload, placement: Placement) -> Ladders:
    for place, pool in enumerate(placement.pools):
        yield tuple(
            Changed(
                Change(f"spec.pools[{place}].nodes", str(pool.nodes * factor), str(pool.nodes)),
                workload,
                _with_pool(placement, pool, larger),
            )
            for factor in (2, 4, 8, 16)
            if _divides(workload, larger := _larger(pool, factor)) and _gradients_may_leave(workload, larger)
        )


def _lora(workload: Workload, placement: Placement) -> Ladders:
    actor = workload.models[Role.ACTOR]
    if actor.lora is not None or actor.shape.has_experts:
        return
    lora = lora_shape(actor.shape, LORA_RANK, None, syncs_alone=_is_vllm_on_gpu(workload, placement))
    models = dict(workload.models)
    models[Role.ACTOR] = replace(actor, lora=lora)
    pool, reference = placement.pool_of(Role.ACTOR), models.get(Role.REF)
    beside = pool.layouts.get(Role.REF)
    if reference is not None and beside is not None and beside.is_left_open:
        if reference.offload.parameters:
            # The contract refuses it: such a reference is the actor's own model.
            return
        models[Role.REF] = replace(reference, lora=lora, is_actor_without_adapters=True)
        layouts = {**pool.layouts, Role.REF: pool.layouts[Role.ACTOR]}
        placement = _with_pool(placement, pool, replace(pool, layouts=layouts))
    rollout = replace(workload.rollout, adapter_rank=LORA_RANK if lora.syncs_alone else None)
    change = Change("spec.training.model.lora", f"{{rank: {LORA_RANK}}}", "none")
    yield (Changed(change, replace(workload, models=models, rollout=rollout), placement),)


def _is_vllm_on_gpu(workload: Workload, placement: Placement) -> bool:
    return workload.rollout.engine is EngineKind.VLLM and not placement.pool_of(Role.ROLLOUT).gpu.is_cpu


def _larger(pool: PlacedPool, factor: int) -> PlacedPool:
    """With so many times as many nodes. A model that all GPUs held together is held by all of them then, unless the
    file says by how many."""
    num_gpus = pool.num_gpus * factor
    layouts = {
        role: replace(
            layout,
            num_gpus=num_gpus,
            shard_size=layout.shard_size if layout.keeps_shard_size or layout.num_replicas > 1 else num_gpus,
        )
        for role, layout in pool.layouts.items()
    }
    rollout = None if pool.rollout is None else RolloutLayout(num_gpus, pool.rollout.tensor_parallel)
    return replace(pool, nodes=pool.nodes * factor, layouts=layouts, rollout=rollout)


def _divides(workload: Workload, pool: PlacedPool) -> bool:
    """Whether the responses of a batch and of an update spread evenly over what is trained here."""
    return all(
        prompts * workload.group_size % layout.num_data_ranks == 0
        for role, layout in pool.layouts.items()
        if workload.models[role].is_trained
        for prompts in (workload.batch_size, workload.mini_batch_size)
    )


def _gradients_may_leave(workload: Workload, pool: PlacedPool) -> bool:
    """Whether each model here whose gradients leave has one copy (placement_rules.py)."""
    return all(
        layout.num_replicas == 1 or not workload.models[role].offload.gradients for role, layout in pool.layouts.items()
    )


def _trained(workload: Workload) -> Iterator[tuple[Role, TrainModel]]:
    yield from ((role, model) for role, model in workload.models.items() if model.is_trained)


def own_layouts(workload: Workload, placement: Placement) -> Iterator[tuple[PlacedPool, Role, TrainLayout]]:
    """Without a reference that is the actor: its layout is that one's."""
    for pool in placement.pools:
        for role, layout in pool.layouts.items():
            if not workload.models[role].is_actor_without_adapters:
                yield pool, role, layout


def _switched(workload: Workload, placement: Placement, role: Role, field: str, model: TrainModel) -> Changed:
    models = {**workload.models, role: model}
    return Changed(Change(field, "true", "false"), replace(workload, models=models), placement)


_Number = int | bool


def _with_model(workload: Workload, role: Role, **changes: _Number) -> Workload:
    change: Callable[..., TrainModel] = replace
    return replace(workload, models={**workload.models, role: change(workload.models[role], **changes)})


def with_layout(
    workload: Workload, placement: Placement, pool: PlacedPool, role: Role, layout: TrainLayout
) -> Placement:
    """With another layout of a role, and of the reference that is the actor with that one's."""
    layouts = {**pool.layouts, role: layout}
    reference = workload.models.get(Role.REF)
    if role is Role.ACTOR and reference is not None and reference.is_actor_without_adapters:
        layouts[Role.REF] = layout
    return _with_pool(placement, pool, replace(pool, layouts=layouts))


def _with_pool(placement: Placement, old: PlacedPool, new: PlacedPool) -> Placement:
    return replace(placement, pools=tuple(new if pool is old else pool for pool in placement.pools))


def _mebibytes(num_bytes: int) -> str:
    return f"{num_bytes >> 30}Gi" if num_bytes % 2**30 == 0 else f"{num_bytes >> 20}Mi"
