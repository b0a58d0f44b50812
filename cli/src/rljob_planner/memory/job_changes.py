"""Changes of single fields of a job file, each with the job that has the change.

`smaller_jobs` lists changes that may need less memory (for `proposals`). `faster_jobs` lists changes that may make
steps shorter (for `advice.tuning`). The contract accepts all of these jobs: sizes divide where they must (crds:
placement_rules.py, batch_size_rules.py). The caller computes memory and time of each changed job.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain

from rljob_planner.job_workload import lora_shape
from rljob_planner.workload import (
    MASTER_BYTES,
    ModelOffload,
    PlacedPool,
    Placement,
    Role,
    RolloutLayout,
    RolloutWork,
    TrainLayout,
    TrainModel,
    Workload,
)

MODEL_FIELDS = {
    Role.ACTOR: "spec.training.model",
    Role.REF: "spec.training.model",
    Role.CRITIC: "spec.training.critic.model",
    Role.REWARD_MODEL: "spec.training.rewards[].rewardModel",
}
"""The field of the job file that has the settings of the role's model."""
LORA_RANK = 16
"""Rank of the adapters if LoRA is proposed."""
_MAX_SEQUENCE_PARALLEL_FACTOR = 8
"""The largest factor by which sequence parallelism is increased."""
Job = tuple[Workload, Placement]
"""A changed job."""


@dataclass(frozen=True)
class Change:
    """A new value for one field of a job file. Values are text, as they are written in the file."""

    field: str
    value: str
    before: str
    """The present value; `none` for a job without LoRA."""

    @property
    def is_drastic(self) -> bool:
        """Whether the change adds nodes to a pool, or turns on LoRA."""
        return self.field.endswith((".nodes", ".lora"))


@dataclass(frozen=True)
class ChangedJob:
    """A change, and the job with this change."""

    change: Change
    workload: Workload
    placement: Placement
    section: str = ""
    """The section of docs/tuning.md that explains the change; empty if there is none."""
    changes_training: bool = False
    """Whether the change affects what the model learns."""
    direction: int = 0
    """If a field may go down or up, such as gpuMemoryUtilization: 0 for lower values, 1 for higher ones. Else 0."""


def smaller_jobs(workload: Workload, placement: Placement) -> Iterator[tuple[ChangedJob, ...]]:
    """Changes that may need less memory. For each field, and for each direction of its values, there is a ladder: a
    list of changes, the smallest change first. Fields are ordered by their cost: first those that cost little time,
    then those that cost more time, then more nodes, then LoRA."""
    for setting in _settings(workload, placement):
        yield from (setting.changed(values, at) for at, values in enumerate(setting.smaller) if values)


def faster_jobs(workload: Workload, placement: Placement) -> Iterator[tuple[ChangedJob, ...]]:
    """Changes that may make steps shorter: for each field its values, the nearest to the present one first."""
    for setting in _settings(workload, placement):
        if setting.faster:
            yield setting.changed(sorted(setting.faster, key=setting.distance))


def model_layouts(workload: Workload, placement: Placement) -> Iterator[tuple[PlacedPool, Role, TrainLayout]]:
    """Each train role with its pool and its layout. A reference that is the actor's model is left out, because it has
    the actor's layout."""
    for pool in placement.pools:
        for role, layout in pool.layouts.items():
            if not workload.models[role].is_actor_without_adapters:
                yield pool, role, layout


def offload_changes(workload: Workload, role: Role, *, is_on: bool) -> Iterator[tuple[str, TrainModel]]:
    """Each offload field of the role that can be turned on (`is_on`) or off, with the changed model."""
    model = workload.models[role]
    names = ("optimizer", "parameters", "gradients") if model.is_trained else ("parameters",)
    fields = {Role.REF: "offload.reference", Role.REWARD_MODEL: "offload"}
    for name in () if model.is_actor_without_adapters else names:
        now = asdict(model.offload)
        if now[name] is not is_on:
            yield (
                f"{MODEL_FIELDS[role]}.{fields.get(role, f'offload.{name}')}",
                replace(model, offload=ModelOffload(**(now | {name: is_on}))),
            )


def is_allowed(workload: Workload, role: Role, layout: TrainLayout) -> bool:
    """Whether the contract accepts this layout (batch_size_rules.py, placement_rules.py). A micro-batch must have room
    for the longest row. The data ranks of a trained model must divide the responses of a batch and those of an update.
    A model with offloaded gradients must have only one copy."""
    model = workload.models[role]
    if workload.max_tokens_per_micro_batch * layout.sequence_parallel < workload.lengths.longest_row:
        return False
    rows = [prompts * workload.group_size for prompts in (workload.batch_size, workload.mini_batch_size)]
    if model.is_trained and any(each % layout.num_data_ranks for each in rows):
        return False
    return layout.num_replicas == 1 or not model.offload.gradients


def divisors(number: int) -> list[int]:
    """All divisors in ascending order, with 1 and the number itself."""
    return [each for each in range(1, number + 1) if number % each == 0]


@dataclass(frozen=True)
class _Setting:
    """A field of the job file, with values that may reduce memory or time."""

    field: str
    now: int
    """The present value. For a field that is on or off: 1 or 0."""
    job: Callable[[int], Job]
    """Returns the job with this value of the field."""
    smaller: Sequence[Sequence[int]] = ()
    """Lists of values that may need less memory, the smallest change first. A field whose value may go down or up has
    two lists."""
    faster: Sequence[int] = ()
    """Values that may make steps shorter, in any order."""
    section: str = ""
    changes_training: bool = False
    text: Callable[[int], str] = str
    """Returns the value as it is written in the file."""

    def changed(self, values: Sequence[int], direction: int = 0) -> tuple[ChangedJob, ...]:
        """The jobs with these values of the field."""
        changes = {each: Change(self.field, self.text(each), self.text(self.now)) for each in values}
        return tuple(
            ChangedJob(change, *self.job(each), self.section, self.changes_training, direction)
            for each, change in changes.items()
        )

    def distance(self, value: int) -> float:
        """How far a value is from the present one, as a factor."""
        low, high = sorted((max(1, self.now), max(1, value)))
        return high / low


_Settings = Iterator[_Setting]


def _settings(workload: Workload, placement: Placement) -> _Settings:
    """The settings of the job, in the order of what their `smaller` values cost."""
    every = (_of_engine, _of_batches, _of_shards, _of_models, _of_parallelism, _of_pools, _of_adapters)
    return chain.from_iterable(each(workload, placement) for each in every)


def _of_engine(workload: Workload, placement: Placement) -> _Settings:
    rollout, pool, path = workload.rollout, placement.pool_of(Role.ROLLOUT), "spec.training.rollout"

    def job(changed: RolloutWork) -> Job:
        return replace(workload, rollout=changed), placement

    def with_memory(value: int) -> Job:
        if pool.gpu.is_cpu:
            return job(replace(rollout, cpu_kv_cache_bytes=value))
        return job(replace(rollout, memory_utilization=value / 1e4))

    section = "memory of the engine"
    if rollout.is_vllm and pool.gpu.is_cpu:
        now = rollout.cpu_kv_cache_bytes
        lower = [now >> power for power in range(1, 8) if now >> power >= 2**20]
        higher = [now << power for power in range(1, 8)]
        yield _Setting(f"{path}.cpuKvCache", now, with_memory, (lower, higher), higher, section, text=_mebibytes)
    elif rollout.is_vllm:
        # The unit is 1/10,000, because the values of a setting are whole numbers.
        now = round(1e4 * rollout.memory_utilization)
        lower = [each for each in range(9000, 500, -500) if each < now]
        higher = [each for each in range(1000, 9500, 500) if each > now]
        field = f"{path}.gpuMemoryUtilization"
        yield _Setting(field, now, with_memory, (lower, higher), higher, section, text=_share)
    assert pool.rollout is not None, "the pool of the rollout has its layout"
    now, requests = rollout.max_sequences, workload.requests_per_engine(pool.rollout)
    fewer = [now >> power for power in range(1, 8) if now >> power >= 4]
    more = [now << power for power in range(1, 5) if now << power < 2 * requests]
    field, section = f"{path}.maxNumSequences", "sequences at once"
    yield _Setting(field, now, lambda value: job(replace(rollout, max_sequences=value)), (fewer,), more, section)
    # Checkpoints and evaluations need a weight sync in the same step (crds: algorithm_rules.py).
    intervals = [*workload.evaluations_every_steps]
    if workload.checkpoint_every_steps is not None:
        intervals.append(workload.checkpoint_every_steps)
    now = rollout.sync_every_steps
    rarer = [each for each in (2 * now, 4 * now) if not any(other % each for other in intervals)]
    field, section = f"{path}.syncEverySteps", "weight sync"
    syncs = {each: job(replace(rollout, sync_every_steps=each)) for each in rarer}
    yield _Setting(field, now, syncs.__getitem__, (), rarer, section, True)


def _of_batches(workload: Workload, placement: Placement) -> _Settings:
    now = workload.max_tokens_per_micro_batch
    ranks_per_row = [layout.sequence_parallel for pool in placement.pools for layout in pool.layouts.values()]
    # The ranks that share a row must together have room for the longest row.
    least = -(-workload.lengths.longest_row // min(ranks_per_row, default=1))
    fewer = [each for each in (*(now >> power for power in range(1, 20) if now >> power > least), least) if each < now]
    more, section = [now << power for power in range(1, 6)], "tokens of a micro-batch"
    jobs = {each: (replace(workload, max_tokens_per_micro_batch=each), placement) for each in (*fewer, *more)}
    yield _Setting("spec.training.maxTokensPerMicroBatch", now, jobs.__getitem__, (fewer,), more, section)
    mini_batch, batch = workload.mini_batch_size, workload.batch_size
    layouts = model_layouts(workload, placement)
    ranks = [layout.num_data_ranks for _, role, layout in layouts if workload.models[role].is_trained]

    def job(value: int) -> Job:
        # With one update per step, the forward pass of the update can give the old log-probabilities.
        several = value < batch or workload.num_epochs_per_batch > 1
        needs_old = workload.needs_old_logprobs and (several or workload.always_needs_old_logprobs)
        return replace(workload, mini_batch_size=value, needs_old_logprobs=needs_old), placement

    sizes = [each for each in range(mini_batch + 1, batch + 1) if batch % each == 0]
    even = [each for each in sizes if not any(each * workload.group_size % num for num in ranks)]
    section = "updates of a step"
    yield _Setting("spec.training.miniBatchSize", mini_batch, job, (), even, section, True)


def _of_shards(workload: Workload, placement: Placement) -> _Settings:
    for pool, role, layout in model_layouts(workload, placement):
        now = layout.shard_size
        layouts = {each: replace(layout, shard_size=each) for each in divisors(layout.num_gpus) if each != now}
        jobs = _with_layouts(workload, placement, pool, role, layouts)
        larger = [each for each in jobs if each > now]
        yield _Setting(f"spec.roles.{role}.shardSize", now, jobs.__getitem__, (larger,), [*jobs], "shard size")


def _of_models(workload: Workload, placement: Placement) -> _Settings:
    """Gradient checkpointing, offload, deferred reduction and dtype. Frozen models come first, because their offload
    costs the least."""

    def switch(field: str, role: Role, model: TrainModel, *, is_on: bool, section: str = "") -> _Setting:
        """A setting that turns the field on (`is_on`) or off. With a `section` this saves time, without one it saves
        memory."""
        job, values = (workload.with_model(role, model), placement), [int(is_on)]
        smaller, faster = ((), values) if section else ((values,), ())
        return _Setting(field, int(not is_on), lambda _: job, smaller, faster, section, text=_truth)

    defers = "deferGradientReduction"
    for role in sorted(workload.models, key=lambda each: workload.models[each].is_trained):
        model, layout = workload.models[role], placement.layout_of(role)
        if model.is_trained:
            yield from _of_checkpointing(workload, placement, role)
        if model.defers_reduction:
            yield switch(f"spec.roles.{role}.{defers}", role, replace(model, defers_reduction=False), is_on=False)
        for field, changed in offload_changes(workload, role, is_on=True):
            turns_on_gradients = changed.offload.gradients and not model.offload.gradients
            # The contract rejects offloaded gradients with deferred reduction, and with several copies.
            if not (turns_on_gradients and (model.defers_reduction or layout.num_replicas > 1)):
                yield switch(field, role, changed, is_on=True)
        for field, changed in offload_changes(workload, role, is_on=False):
            yield switch(field, role, changed, is_on=False, section="offload")
    actor = workload.models[Role.ACTOR]
    if not actor.defers_reduction and not actor.offload.gradients and placement.layout_of(Role.ACTOR).num_gpus > 1:
        deferred, field = replace(actor, defers_reduction=True), f"spec.roles.actor.{defers}"
        yield switch(field, Role.ACTOR, deferred, is_on=True, section="deferred reduction")
    if actor.compute_bytes != 2 and not any(pool.gpu.is_cpu for pool in placement.pools):
        models = {role: replace(model, compute_bytes=2) for role, model in workload.models.items()}
        half = replace(workload, models=models, rollout=replace(workload.rollout, weight_bytes=2)), placement
        names, field = {2: "BFloat16", 4: "Float32"}, "spec.training.model.dtype"
        yield _Setting(field, 4, lambda _: half, (), [2], "precision", True, names.__getitem__)


def _of_checkpointing(workload: Workload, placement: Placement, role: Role) -> _Settings:
    model, field = workload.models[role], f"{MODEL_FIELDS[role]}.gradientCheckpointing"
    now, is_on, section = model.checkpoints_every_nth_layer, model.checkpoints_activations, "gradient checkpointing"
    names = ("Never", "Always").__getitem__

    def job(nth: int) -> Job:
        """The job that recomputes every nth layer. 0: no layer."""
        changed = replace(model, checkpoints_activations=nth > 0, chooses_checkpointing=False)
        return workload.with_model(role, replace(changed, checkpoints_every_nth_layer=max(1, nth))), placement

    if not is_on:
        yield _Setting(field, 0, lambda _: job(now), ([1],), (), section, text=names)
        return
    if now == 1:
        # The contract rejects `Never` together with a gradientCheckpointingEveryNthLayer above 1.
        yield _Setting(field, 1, job, (), [0], section, text=names)
    # Only the actor has the field gradientCheckpointingEveryNthLayer.
    rarer = [each for each in (2, 3, 4, 6, 8) if now < each <= model.shape.num_layers and role is Role.ACTOR]
    denser = ([1],) if now > 1 and not model.checkpoints_for_interval else ()
    yield _Setting(f"{field}EveryNthLayer", now, job, denser, rarer, section)


def _of_parallelism(workload: Workload, placement: Placement) -> _Settings:
    pool, shape = placement.pool_of(Role.ROLLOUT), workload.rollout.shape
    if workload.rollout.is_vllm and pool.rollout is not None and not pool.gpu.is_mig_device:
        now, sizes = pool.rollout.tensor_parallel, divisors(pool.gpus_per_node)
        sizes = [each for each in sizes if each != now and shape.allows_tensor_parallel(each)]

        def job(value: int) -> Job:
            layout = RolloutLayout(pool.num_gpus, value)
            return workload, placement.with_pool(pool, replace(pool, rollout=layout))

        larger = [each for each in sizes if each > now]
        yield _Setting("spec.roles.rollout.tensorParallel", now, job, (larger,), sizes, "tensor parallelism")
    for pool, role, layout in model_layouts(workload, placement):
        now, shape = layout.sequence_parallel, workload.models[role].shape
        sizes = [each for each in divisors(layout.num_gpus) if each <= _MAX_SEQUENCE_PARALLEL_FACTOR * now]
        sizes = [each for each in sizes if shape.spreads_over(each)]
        layouts = {each: replace(layout, sequence_parallel=each) for each in sizes if each != now}
        jobs = _with_layouts(workload, placement, pool, role, layouts)
        larger, smaller = [each for each in jobs if each > now], [each for each in jobs if each < now]
        field, section = f"spec.roles.{role}.sequenceParallel", "sequence parallelism"
        yield _Setting(field, now, jobs.__getitem__, (larger,), smaller, section)


def _of_pools(workload: Workload, placement: Placement) -> _Settings:
    """More nodes for each pool."""
    for index, pool in enumerate(placement.pools):
        larger = {factor * pool.nodes: _larger(pool, factor) for factor in (2, 4, 8, 16)}
        jobs = {nodes: (workload, placement.with_pool(pool, each)) for nodes, each in larger.items()}
        allowed = [
            nodes
            for nodes, each in larger.items()
            if all(is_allowed(workload, role, layout) for role, layout in each.layouts.items())
        ]
        yield _Setting(f"spec.pools[{index}].nodes", pool.nodes, jobs.__getitem__, (allowed,))


def _of_adapters(workload: Workload, placement: Placement) -> _Settings:
    actor, pool = workload.models[Role.ACTOR], placement.pool_of(Role.ACTOR)
    if actor.lora is not None or actor.shape.has_experts:
        return
    is_float32_on_cpus = placement.pool_of(Role.ROLLOUT).gpu.is_cpu and workload.rollout.weight_bytes == MASTER_BYTES
    syncs_alone = workload.rollout.is_vllm and not is_float32_on_cpus
    lora = lora_shape(actor.shape, LORA_RANK, None, syncs_alone=syncs_alone)
    models = {**workload.models, Role.ACTOR: replace(actor, lora=lora)}
    reference, beside = models.get(Role.REF), pool.layouts.get(Role.REF)
    if reference is not None and not reference.has_own_weights and beside is not None and beside.is_default:
        if reference.offload.parameters:
            # The contract rejects this job. The reference would be the actor's model, which cannot be offloaded alone.
            return
        models[Role.REF] = replace(reference, lora=lora, is_actor_without_adapters=True)
        layouts = {**pool.layouts, Role.REF: pool.layouts[Role.ACTOR]}
        placement = placement.with_pool(pool, replace(pool, layouts=layouts))
    rollout = replace(workload.rollout, adapter_rank=LORA_RANK if syncs_alone else None)
    job = replace(workload, models=models, rollout=rollout), placement
    yield _Setting("spec.training.model.lora", 0, lambda _: job, ([LORA_RANK],), text=_lora)


def _larger(pool: PlacedPool, factor: int) -> PlacedPool:
    """The pool with `factor` times as many nodes."""
    num_gpus = pool.num_gpus * factor
    layouts = {role: layout.resized(num_gpus) for role, layout in pool.layouts.items()}
    rollout = None if pool.rollout is None else RolloutLayout(num_gpus, pool.rollout.tensor_parallel)
    return replace(pool, nodes=pool.nodes * factor, layouts=layouts, rollout=rollout)


def _with_layouts(
    workload: Workload, placement: Placement, pool: PlacedPool, role: Role, layouts: Mapping[int, TrainLayout]
) -> dict[int, Job]:
    """The job with each of these layouts of a role. `layouts`: by the new value of the field, as in the result. Layouts
    that the contract rejects are left out. A reference that is the actor's model gets the actor's layout."""
    reference = workload.models.get(Role.REF)
    both = role is Role.ACTOR and reference is not None and reference.is_actor_without_adapters
    roles = (role, Role.REF) if both else (role,)
    return {
        number: (
            workload,
            placement.with_pool(pool, replace(pool, layouts={**pool.layouts, **dict.fromkeys(roles, layout)})),
        )
        for number, layout in layouts.items()
        if is_allowed(workload, role, layout)
    }


def _truth(value: int) -> str:
    return "true" if value else "false"


def _mebibytes(value: int) -> str:
    return f"{value >> 30}Gi" if value % 2**30 == 0 else f"{value >> 20}Mi"


def _share(value: int) -> str:
    return f"{value / 1e4:g}"


def _lora(rank: int) -> str:
    return f"{{rank: {rank}}}" if rank else "none"
