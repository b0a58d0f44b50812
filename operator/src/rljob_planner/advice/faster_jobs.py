"""Changes of a job that may make its steps shorter, as one writes them into its file: the other way round than
`memory.changes`, which gives up time for memory.

Only such as the contract takes. Whether one helps, and whether it still fits, is worked out by `tuning`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from rljob_planner.memory.changes import MODEL_FIELDS, Change, Changed, own_layouts, with_layout
from rljob_planner.placement import PlacedPool, Placement, RolloutLayout, TrainLayout
from rljob_planner.workload import EngineKind, ModelOffload, Role, TrainModel, Workload


class Price(StrEnum):
    """What a change costs beside memory."""

    NOTHING = "nothing"
    LEARNING = "what is learned changes"
    GPUS = "more GPUs"


@dataclass(frozen=True)
class FasterJob:
    """A job with one field changed."""

    changed: Changed
    section: str
    """Of docs/tuning.md."""
    price: Price = Price.NOTHING


Ladder = Iterator[FasterJob]


def faster_jobs(workload: Workload, placement: Placement) -> Iterator[tuple[FasterJob, ...]]:
    """For each field its values, the nearest to the present one first."""
    for one in (
        _no_checkpointing,
        _micro_batches,
        _sequences_at_once,
        _utilization,
        _tensor_parallel,
        _shard_sizes,
        _sequence_parallel,
        _no_offload,
        _deferred_reduction,
        _half_precision,
        _mini_batches,
        _fewer_syncs,
        _own_pools,
    ):
        found = tuple(one(workload, placement))
        for field in dict.fromkeys(each.changed.change.field for each in found):
            yield tuple(each for each in found if each.changed.change.field == field)


def _no_checkpointing(workload: Workload, placement: Placement) -> Ladder:
    for role, model in _trained(workload):
        if not model.checkpoints_activations:
            continue
        field, nth = f"{MODEL_FIELDS[role]}.gradientCheckpointing", model.checkpoints_every_nth_layer
        # A critic's model has no such field.
        wider = (2, 3, 4, 6, 8) if role is Role.ACTOR else ()
        for every in (each for each in wider if nth < each <= model.shape.num_layers):
            other = replace(model, checkpoints_every_nth_layer=every)
            change = Change(f"{field}EveryNthLayer", str(every), str(nth))
            yield FasterJob(_with_model(change, workload, placement, role, other), "gradient checkpointing")
        if nth == 1:
            # With the other field the contract refuses it.
            other = replace(model, checkpoints_activations=False)
            off = _with_model(Change(field, "false", "true"), workload, placement, role, other)
            yield FasterJob(off, "gradient checkpointing")


def _micro_batches(workload: Workload, placement: Placement) -> Ladder:
    now = workload.max_tokens_per_micro_batch
    for value in (now * 2**power for power in range(1, 6)):
        change = Change("spec.training.maxTokensPerMicroBatch", str(value), str(now))
        other = replace(workload, max_tokens_per_micro_batch=value)
        yield FasterJob(Changed(change, other, placement), "tokens of a micro-batch")


def _sequences_at_once(workload: Workload, placement: Placement) -> Ladder:
    now, layout = workload.rollout.max_sequences, _rollout_pool(placement)[1]
    own = -(-workload.num_requests // layout.num_engines)
    for value in (now * 2**power for power in range(1, 5)):
        if value < 2 * own:
            change = Change("spec.training.rollout.maxNumSequences", str(value), str(now))
            rollout = replace(workload.rollout, max_sequences=value)
            yield FasterJob(Changed(change, replace(workload, rollout=rollout), placement), "sequences at once")


def _utilization(workload: Workload, placement: Placement) -> Ladder:
    pool, rollout = _rollout_pool(placement)[0], workload.rollout
    if rollout.engine is not EngineKind.VLLM:
        return
    if pool.gpu.is_cpu:
        now = rollout.cpu_kv_cache_bytes
        for value in (now * 2, now * 4):
            change = Change("spec.training.rollout.cpuKvCache", f"{value >> 20}Mi", f"{now >> 20}Mi")
            other = replace(workload, rollout=replace(rollout, cpu_kv_cache_bytes=value))
            yield FasterJob(Changed(change, other, placement), "memory of the engine")
        return
    share = rollout.memory_utilization
    for higher in (each / 100 for each in range(10, 95, 5) if each / 100 > share):
        change = Change("spec.training.rollout.gpuMemoryUtilization", f"{higher:g}", f"{share:g}")
        other = replace(workload, rollout=replace(rollout, memory_utilization=higher))
        yield FasterJob(Changed(change, other, placement), "memory of the engine")


def _tensor_parallel(workload: Workload, placement: Placement) -> Ladder:
    pool, layout = _rollout_pool(placement)
    if workload.rollout.engine is not EngineKind.VLLM:
        return
    shape, now = workload.rollout.shape, layout.tensor_parallel
    for value in (each for each in range(1, pool.gpus_per_node + 1) if each != now):
        if pool.gpus_per_node % value == 0 and shape.spreads_over(value):
            change = Change("spec.roles.rollout.tensorParallel", str(value), str(now))
            other = _with_pool(placement, pool, replace(pool, rollout=RolloutLayout(pool.num_gpus, value)))
            yield FasterJob(Changed(change, workload, other), "tensor parallelism")


def _shard_sizes(workload: Workload, placement: Placement) -> Ladder:
    for pool, role, layout in own_layouts(workload, placement):
        sizes = [size for size in range(1, layout.num_gpus + 1) if layout.num_gpus % size == 0]
        offloads_gradients = workload.models[role].offload.gradients
        for size in sizes:
            # Gradients of replicas cannot be offloaded (crds: placement_rules.py).
            if size != layout.shard_size and not (offloads_gradients and size < layout.num_gpus):
                change = Change(f"spec.roles.{role}.shardSize", str(size), str(layout.shard_size))
                other = with_layout(workload, placement, pool, role, replace(layout, shard_size=size))
                yield FasterJob(Changed(change, workload, other), "shard size")


def _sequence_parallel(workload: Workload, placement: Placement) -> Ladder:
    for pool, role, layout in own_layouts(workload, placement):
        now = layout.sequence_parallel
        for value in (each for each in range(1, now) if now % each == 0):
            if workload.mini_batch_size * workload.group_size % (layout.num_gpus // value):
                # Rows of an update are dealt out evenly (crds: batch_size_rules.py).
                continue
            change = Change(f"spec.roles.{role}.sequenceParallel", str(value), str(now))
            other = with_layout(workload, placement, pool, role, replace(layout, sequence_parallel=value))
            yield FasterJob(Changed(change, workload, other), "sequence parallelism")


def _no_offload(workload: Workload, placement: Placement) -> Ladder:
    for role, model in workload.models.items():
        if model.is_actor_without_adapters:
            continue
        for name in ("parameters", "gradients", "optimizer"):
            offload = model.offload
            if not {"parameters": offload.parameters, "gradients": offload.gradients, "optimizer": offload.optimizer}[
                name
            ]:
                continue
            other = ModelOffload(
                parameters=offload.parameters and name != "parameters",
                gradients=offload.gradients and name != "gradients",
                optimizer=offload.optimizer and name != "optimizer",
            )
            change = Change(_offload_field(role, name), "false", "true")
            changed = _with_model(change, workload, placement, role, replace(model, offload=other))
            yield FasterJob(changed, "offload")


def _offload_field(role: Role, name: str) -> str:
    if role is Role.REF:
        return f"{MODEL_FIELDS[role]}.offload.reference"
    if role is Role.REWARD_MODEL:
        return f"{MODEL_FIELDS[role]}.offload"
    return f"{MODEL_FIELDS[role]}.offload.{name}"


def _deferred_reduction(workload: Workload, placement: Placement) -> Ladder:
    actor, layout = workload.models[Role.ACTOR], placement.pool_of(Role.ACTOR).layouts[Role.ACTOR]
    if actor.defers_reduction or actor.offload.gradients or layout.num_gpus == 1:
        return
    change = Change("spec.roles.actor.deferGradientReduction", "true", "false")
    changed = _with_model(change, workload, placement, Role.ACTOR, replace(actor, defers_reduction=True))
    yield FasterJob(changed, "deferred reduction")


def _half_precision(workload: Workload, placement: Placement) -> Ladder:
    if workload.models[Role.ACTOR].compute_bytes == 2 or any(pool.gpu.is_cpu for pool in placement.pools):
        return
    models = {role: replace(model, compute_bytes=2) for role, model in workload.models.items()}
    other = replace(workload, models=models, rollout=replace(workload.rollout, weight_bytes=2))
    change = Change("spec.training.model.dtype", "BFloat16", "Float32")
    yield FasterJob(Changed(change, other, placement), "precision")


def _mini_batches(workload: Workload, placement: Placement) -> Ladder:
    now, batch = workload.mini_batch_size, workload.batch_size
    ranks = [
        layout.num_data_ranks
        for _, role, layout in own_layouts(workload, placement)
        if workload.models[role].is_trained
    ]
    for value in (each for each in range(now + 1, batch + 1) if batch % each == 0):
        if any(value * workload.group_size % num for num in ranks):
            # Rows of an update are dealt out evenly (crds: batch_size_rules.py).
            continue
        change = Change("spec.training.miniBatchSize", str(value), str(now))
        # An only update gives old log-probabilities itself.
        several = value < batch or workload.num_epochs_per_batch > 1
        needs_old = workload.needs_old_logprobs and (several or workload.needs_old_logprobs_in_any_case)
        other = replace(workload, mini_batch_size=value, needs_old_logprobs=needs_old)
        yield FasterJob(Changed(change, other, placement), "updates of a step", Price.LEARNING)


def _fewer_syncs(workload: Workload, placement: Placement) -> Ladder:
    now = workload.rollout.sync_every_steps
    saved_or_asked = (workload.checkpoint_every_steps, workload.evaluation_every_steps)
    for value in (now * 2, now * 4):
        # Saves and evaluations are of the newest weights (crds: rollout_correction_rules.py).
        if all(every is None or every % value == 0 for every in saved_or_asked):
            change = Change("spec.training.rollout.syncEverySteps", str(value), str(now))
            other = replace(workload, rollout=replace(workload.rollout, sync_every_steps=value))
            yield FasterJob(Changed(change, other, placement), "hand-overs of weights", Price.LEARNING)


def _own_pools(workload: Workload, placement: Placement) -> Ladder:
    """A model that is asked or trained beside the actor, on a pool of its own with as many GPUs as one node has."""
    home = placement.pool_of(Role.ACTOR)
    for role in (Role.REF, Role.CRITIC, Role.REWARD_MODEL):
        model = workload.models.get(role)
        if model is None or model.is_actor_without_adapters or role not in home.layouts:
            continue
        num_gpus = home.gpus_per_node
        layout = TrainLayout(num_gpus, num_gpus)
        pool = PlacedPool(role.lower(), 1, num_gpus, home.gpu, {role: layout})
        rest = {each: other for each, other in home.layouts.items() if each is not role}
        pools = tuple(replace(each, layouts=rest) if each is home else each for each in placement.pools)
        change = Change(f"spec.roles.{role}.pool", pool.name, home.name)
        yield FasterJob(
            Changed(change, workload, replace(placement, pools=(*pools, pool))), "pools of their own", Price.GPUS
        )


def _trained(workload: Workload) -> Iterator[tuple[Role, TrainModel]]:
    yield from ((role, model) for role, model in workload.models.items() if model.is_trained)


def _rollout_pool(placement: Placement) -> tuple[PlacedPool, RolloutLayout]:
    pool = placement.pool_of(Role.ROLLOUT)
    assert pool.rollout is not None, "the pool of the rollout has its layout"
    return pool, pool.rollout


def _with_model(change: Change, workload: Workload, placement: Placement, role: Role, model: TrainModel) -> Changed:
    return Changed(change, replace(workload, models={**workload.models, role: model}), placement)


def _with_pool(placement: Placement, old: PlacedPool, new: PlacedPool) -> Placement:
    return replace(placement, pools=tuple(new if pool is old else pool for pool in placement.pools))
