"""Turns a job's spec and the shapes of its models into a `Workload`. It interprets the spec as the trainer does
(controller/model_roles.py)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rljob_api.quantities import bytes_of
from rljob_api.v1alpha1.advantage import AdvantageType
from rljob_api.v1alpha1.model import (
    LATENT_PROJECTION,
    Critic,
    Dtype,
    GradientCheckpointing,
    HeadDtype,
    Kernels,
    LoraSync,
    TrainOffload,
    select_checkpointing,
)
from rljob_api.v1alpha1.optional_roles import absent_roles, reference_is_the_actor
from rljob_api.v1alpha1.policy_loss import NEEDS_BATCH_STATISTICS
from rljob_api.v1alpha1.recipes import has_dynamic_sampling, is_distillation, resolve_algorithm, resolved_value
from rljob_api.v1alpha1.rollout import Compile, RolloutEngine
from rljob_api.v1alpha1.rollout_correction import OldLogprobs
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_planner.errors import PlanError
from rljob_planner.job_lengths import LengthOptions, assumed_turns, token_lengths
from rljob_planner.kv_cache import GIB
from rljob_planner.model_shape import ModelShape, TensorSize
from rljob_planner.workload import (
    Head,
    LoraShape,
    ModelOffload,
    Role,
    RolloutWork,
    TrainModel,
    Workload,
)

REPLACED_GROUPS = 0.4
"""Share of the groups that dynamic sampling is assumed to replace. A guess; the metrics of a run have the real
share."""
ROUND_MARGIN = 1.25
"""Prompts of a second round of dynamic sampling, divided by the groups that are still missing (trainer,
controller/dynamic_sampling.py)."""
FUSED_MODEL_TYPES = ("phi3",)
"""Model types with one layer for queries, keys and values, and one for gate and up projection."""
LIGER_MODEL_TYPES = ("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
"""Model types that `kernels: Liger` supports (trainer, engines/train/kernels.py)."""
MIN_STEPS_TO_COMPILE = 300
"""A job on CPUs with at least this many steps compiles its rollout model (trainer, engines/rollout/select.py)."""

ENVIRONMENT_PROCESS_BYTES = 45 * 2**20
"""Memory of a process that runs environments, without the user's code: 30 to 60 MiB (docs/environments.md)."""


@dataclass(frozen=True)
class ModelSource:
    """Where a model comes from."""

    source: str
    """As in the job file: a name on the hub, a folder, a GGUF file or `package://...`."""
    revision: str | None
    field: str
    """The field of the job file that has the source, for messages."""


def model_sources(spec: RLJobSpec) -> dict[Role, ModelSource]:
    """The source of the actor's model, and those of critic, reward model and reference if the job has them. A reference
    without a model of its own is left out: it has the weights with which the actor starts."""
    training, policy = spec.training, spec.training.model
    sources = {Role.ACTOR: ModelSource(policy.source, policy.revision, "spec.training.model.source")}
    if Role.CRITIC.value not in absent_roles(spec):
        critic = (training.critic or Critic()).model
        critic_source = ModelSource(critic.source or "", critic.revision, "spec.training.critic.model.source")
        sources[Role.CRITIC] = critic_source if critic.source else sources[Role.ACTOR]
    if (own := spec.roles.ref.model) is not None and Role.REF.value not in absent_roles(spec):
        sources[Role.REF] = ModelSource(own.source, own.revision, "spec.roles.ref.model.source")
    for index, reward in enumerate(training.rewards):
        if (model := reward.reward_model) is not None:
            field = f"spec.training.rewards[{index}].rewardModel.source"
            sources[Role.REWARD_MODEL] = ModelSource(model.source, model.revision, field)
    return sources


def workload_of(
    spec: RLJobSpec,
    shapes: Mapping[Role, ModelShape],
    *,
    name: str = "job",
    is_cpu: bool = False,
    lengths: LengthOptions | None = None,
) -> Workload:
    """The work of a step. `shapes`: the shape of each model of `model_sources`, by role. If that of critic or
    reference is missing, it has the actor's shape.

    Raises:
        PlanError: the shape of the actor or the reward model is missing, an option is out of its range,
            gradientCheckpointingEveryNthLayer is larger than the number of layers, vLLM would ignore adapters, no layer
            has the name of a LoRA target, or the job's kernels do not run.
    """
    training = spec.training
    algorithm = resolve_algorithm(training.algorithm)
    models = _models(spec, shapes, is_cpu=is_cpu)
    mini_batch = training.mini_batch_size or training.batch_size
    has_single_update = mini_batch == training.batch_size and training.num_epochs_per_batch == 1
    takes_rollout_logprobs = algorithm.rollout_correction.old_logprobs is OldLogprobs.ROLLOUT
    always_needs_old_logprobs = not takes_rollout_logprobs and (
        (training.model.lora is not None and training.model.lora.dropout > 0)
        or algorithm.rollout_correction.rejection is not None
        or algorithm.kl.is_in_reward
        or algorithm.advantage.type in (AdvantageType.OPTIMAL_TOKEN_BASELINE, AdvantageType.DISTILLATION)
    )
    assumptions, generation_factor = list(_assumptions(spec, models)), 1.0
    if has_dynamic_sampling(training.algorithm):
        assumptions.insert(0, f"Dynamic sampling is assumed to replace {REPLACED_GROUPS:.0%} of the groups.")
        generation_factor += min(1.0, ROUND_MARGIN * REPLACED_GROUPS / (1 - REPLACED_GROUPS))
    return Workload(
        name=name,
        batch_size=training.batch_size,
        group_size=training.rollout.group_size,
        mini_batch_size=mini_batch,
        num_epochs_per_batch=training.num_epochs_per_batch,
        num_steps=training.steps,
        max_tokens_per_micro_batch=training.max_tokens_per_micro_batch,
        lengths=token_lengths(training, lengths or LengthOptions()),
        models=models,
        rollout=_rollout(spec, models[Role.ACTOR], is_cpu=is_cpu),
        needs_old_logprobs=always_needs_old_logprobs or not (has_single_update or takes_rollout_logprobs),
        always_needs_old_logprobs=always_needs_old_logprobs,
        needs_mini_batch_pass=algorithm.loss.type in NEEDS_BATCH_STATISTICS,
        checkpoint_every_steps=spec.checkpoint.every_steps,
        evaluations_every_steps=tuple(each.every_steps for each in training.evaluations),
        waits_for_scores=resolved_value(algorithm.drop_zero_variance_groups),
        generation_factor=generation_factor,
        has_greedy_responses=algorithm.advantage.type is AdvantageType.REMAX,
        assumptions=tuple(assumptions),
    )


def _models(spec: RLJobSpec, shapes: Mapping[Role, ModelShape], *, is_cpu: bool) -> dict[Role, TrainModel]:
    """The models of the job's train roles (trainer, controller/engine_settings.py)."""
    model, absent, policy = spec.training.model, absent_roles(spec), shapes.get(Role.ACTOR)
    if policy is None or (Role.REWARD_MODEL not in shapes and Role.REWARD_MODEL.value not in absent):
        missing = Role.ACTOR if policy is None else Role.REWARD_MODEL
        advice = "pass this file with --model-config FILE" if policy is None else "use a source that has this file"
        raise PlanError(f"{missing}: the shape of the model is unknown (seen no config.json); {advice}")
    nth = model.gradient_checkpointing_every_nth_layer
    if nth > policy.num_layers:
        raise PlanError(
            f"spec.training.model.gradientCheckpointingEveryNthLayer: the model has {policy.num_layers} layers (seen:"
            f" {nth}); set at most {policy.num_layers}, or remove it"
        )
    _check_kernels(model.kernels, policy, is_cpu=is_cpu)
    is_wide = model.dtype is Dtype.FLOAT32 or (model.dtype is Dtype.AUTO and is_cpu)
    frozen = TrainModel(policy, is_trained=False, compute_bytes=4 if is_wide else 2)
    is_shared, lora = reference_is_the_actor(spec), _lora(spec, policy, is_cpu=is_cpu)
    critic = (spec.training.critic or Critic()).model
    offloads_scores = any(each.reward_model is not None and each.reward_model.offload for each in spec.training.rewards)
    models = {
        Role.ACTOR: replace(
            frozen,
            is_trained=True,
            checkpoints_every_nth_layer=nth,
            lora=lora,
            offload=_offload(model.offload),
            defers_reduction=spec.roles.actor.defer_gradient_reduction,
        ),
        Role.REF: replace(
            frozen,
            shape=shapes.get(Role.REF, policy),
            has_own_weights=spec.roles.ref.model is not None,
            offload=ModelOffload(parameters=model.offload.reference),
            lora=lora if is_shared else None,
            is_actor_without_adapters=is_shared,
        ),
        Role.CRITIC: replace(
            frozen,
            shape=shapes.get(Role.CRITIC, policy),
            is_trained=True,
            head=Head.VALUE,
            offload=_offload(critic.offload),
        ),
        Role.REWARD_MODEL: replace(
            frozen,
            shape=shapes.get(Role.REWARD_MODEL, policy),
            head=Head.SCORE,
            offload=ModelOffload(parameters=offloads_scores),
        ),
    }
    for role, wanted in ((Role.ACTOR, model), (Role.CRITIC, critic)):
        models[role] = _with_checkpointing(models[role], wanted.gradient_checkpointing, is_cpu=is_cpu)
    return {role: each for role, each in models.items() if role.value not in absent}


def _check_kernels(kernels: Kernels, shape: ModelShape, *, is_cpu: bool) -> None:
    """Raises PlanError if these kernels do not run on the devices, or with a model of this type (trainer,
    engines/train/kernels.py)."""
    if kernels is Kernels.PLAIN:
        return
    if is_cpu:
        raise PlanError("spec.training.model.kernels: Liger needs GPUs (seen: cpu); set Plain")
    if shape.model_type and shape.model_type not in LIGER_MODEL_TYPES:
        raise PlanError(
            f"spec.training.model.kernels: Liger supports models of the types {', '.join(LIGER_MODEL_TYPES)} (seen:"
            f" {shape.model_type!r}); set Plain"
        )


def _with_checkpointing(model: TrainModel, wanted: GradientCheckpointing, *, is_cpu: bool) -> TrainModel:
    """The model with the checkpointing of the job. Decides as the trainer does (controller/auto_settings.py)."""
    size = model.shape.num_parameters
    chosen, of_every_layer = (
        select_checkpointing(wanted, size, nth, is_cpu=is_cpu) for nth in (model.checkpoints_every_nth_layer, 1)
    )
    return replace(
        model,
        checkpoints_activations=chosen is GradientCheckpointing.ALWAYS,
        chooses_checkpointing=wanted is GradientCheckpointing.AUTO,
        checkpoints_for_interval=chosen is not of_every_layer,
    )


def _offload(given: TrainOffload) -> ModelOffload:
    return ModelOffload(given.parameters, given.gradients, given.optimizer)


def _lora(spec: RLJobSpec, shape: ModelShape, *, is_cpu: bool) -> LoraShape | None:
    """The shape of the actor's adapters; None without LoRA. Decides as the trainer does whether a weight sync sends
    only the adapters (engines/rollout/select.py, `select_lora_sync`). Raises PlanError for adapters that vLLM would
    ignore."""
    wanted = spec.training.model.lora
    if wanted is None:
        return None
    _check_targets(wanted.targets or (), shape)
    ends = None if wanted.targets is None else {target.rpartition(".")[2] for target in wanted.targets}
    is_ignored = shape.has_latent_attention and (ends is None or LATENT_PROJECTION in ends)
    if is_ignored and wanted.sync is LoraSync.ADAPTER:
        raise PlanError(
            f"spec.training.model.lora.sync: vLLM ignores adapters of {LATENT_PROJECTION} (seen: Adapter); set Merged"
            f" or Auto, or lora.targets without {LATENT_PROJECTION}"
        )
    has_adapters = _has_vllm(spec) and not is_ignored
    syncs_alone = wanted.sync is LoraSync.ADAPTER or (
        wanted.sync is LoraSync.AUTO and has_adapters and (not is_cpu or spec.training.model.dtype is Dtype.BFLOAT16)
    )
    return lora_shape(shape, wanted.rank, wanted.targets, syncs_alone=syncs_alone)


def _check_targets(targets: Sequence[str], shape: ModelShape) -> None:
    """Raises PlanError for a target that no layer of this model is called (trainer, lora.py, `target_layers`)."""
    names = sorted({name for names, *_ in _linear_layers(shape) for name in names.split()})
    for target in targets:
        if target.rpartition(".")[2] not in names:
            raise PlanError(
                f"spec.training.model.lora.targets: no linear layer of {shape.name} is called {target!r}; name some of"
                f" {', '.join(names)}, or leave targets out for all of them"
            )


def _has_vllm(spec: RLJobSpec) -> bool:
    """Whether vLLM generates. `Auto` counts as vLLM, because the planner cannot know which packages will be installed
    where the job runs."""
    return spec.training.rollout.engine is not RolloutEngine.HUGGING_FACE


def _rollout(spec: RLJobSpec, actor: TrainModel, *, is_cpu: bool) -> RolloutWork:
    rollout = spec.training.rollout
    auto_compiles = not is_cpu or spec.training.steps >= MIN_STEPS_TO_COMPILE
    compiles = rollout.compile is Compile.ALWAYS or (rollout.compile is Compile.AUTO and auto_compiles)
    return RolloutWork(
        shape=actor.shape,
        weight_bytes=actor.compute_bytes,
        has_float32_head=spec.training.model.head_dtype is HeadDtype.FLOAT32,
        is_vllm=_has_vllm(spec),
        compiles=compiles and _has_vllm(spec),
        max_sequences=rollout.max_num_sequences,
        max_model_length=spec.training.max_sequence_tokens,
        memory_utilization=rollout.gpu_memory_utilization,
        cpu_kv_cache_bytes=bytes_of(rollout.cpu_kv_cache),
        sync_every_steps=rollout.sync_every_steps,
        adapter_rank=actor.lora.rank if actor.lora is not None and actor.lora.syncs_alone else None,
    )


def _assumptions(spec: RLJobSpec, models: Mapping[Role, TrainModel]) -> Iterator[str]:
    """Sentences on models that are counted because they may be needed, and on the first model that has fewer positions
    than the longest row has tokens."""
    algorithm = resolve_algorithm(spec.training.algorithm)
    if Role.REF in models and algorithm.kl.coefficient == 0 and not is_distillation(algorithm):
        yield "A reference is counted, because the job's own function may use its log-probabilities."
    if Role.CRITIC in models and algorithm.advantage.type is AdvantageType.FUNCTION:
        yield "A critic is counted, because the job's own function may use values."
    wanted, actor = spec.training.model.lora, models[Role.ACTOR]
    if wanted and wanted.sync is LoraSync.AUTO and actor.shape.has_experts and actor.lora and actor.lora.syncs_alone:
        yield (
            f"vLLM is assumed to support adapters of {actor.shape.name}. If it does not, training.model.lora.sync: Auto"
            " is Merged."
        )
    longest, environment = spec.training.max_sequence_tokens, spec.training.environment
    if environment is not None:
        yield (
            f"Rollouts are assumed to have {assumed_turns(environment):.3g} turns on average, half of maxTurns. The"
            " environment's own time is not included."
        )
        most = min(spec.training.rollout.max_num_sequences, spec.training.batch_size * spec.training.rollout.group_size)
        processes = -(-most // environment.rollouts_per_process)
        yield (
            f"Host memory does not include the processes of environments: up to {processes} for each rollout engine,"
            f" about {processes * ENVIRONMENT_PROCESS_BYTES / GIB:.1f} GiB, and what your code needs in each. A larger"
            " environment.rolloutsPerProcess makes them fewer."
        )
    for role in (Role.ACTOR, Role.CRITIC, Role.REF):
        positions = models[role].shape.max_positions if role in models else None
        if positions is not None and longest > positions:
            name = models[role].shape.name
            yield (
                f"{name} supports {positions:,} positions, but the job's longest row has {longest:,} tokens; reduce"
                f" {'maxPromptTokens or maxNewTokens' if environment is None else 'environment.maxContextTokens'}."
            )
            return


def lora_shape(shape: ModelShape, rank: int, targets: Sequence[str] | None, *, syncs_alone: bool) -> LoraShape:
    """The adapters of this rank. `targets` has the last parts of the names of the modules that get an adapter, such as
    `q_proj`; None means all linear layers. The parts of a fused matrix are counted as separate layers."""
    ends = None if targets is None else {target.rpartition(".")[2] for target in targets}
    chosen = [each for names, *each in _linear_layers(shape) if ends is None or ends.intersection(names.split())]
    pairs = [
        (TensorSize(rank, inputs, layers), TensorSize(outputs, rank, layers)) for inputs, outputs, layers in chosen
    ]
    return LoraShape(
        rank=rank,
        num_parameters=sum(rank * (inputs + outputs) * layers for inputs, outputs, layers in chosen),
        num_linear_layers=sum(layers for *_, layers in chosen),
        matrices=tuple(each for pair in pairs for each in pair),
        syncs_alone=syncs_alone,
    )


def _linear_layers(shape: ModelShape) -> Iterator[tuple[str, int, int, int]]:
    """Linear layers that can have adapters. For each: its module names in transformers' model families, its inputs, its
    outputs, and the number of decoder layers that have it. Experts have no adapters."""
    hidden, query, kv, layers = shape.hidden_size, shape.query_size, shape.kv_size, shape.num_layers
    of_query, of_key, of_value, of_gate, of_up = "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"
    if shape.has_latent_attention:
        # An estimate: queries, keys and values are products of two layers each, whose inner size is not in the shape.
        of_query, of_key, of_value = "q_proj q_a_proj q_b_proj", "kv_a_proj_with_mqa kv_b_proj", "kv_b_proj"
    elif shape.model_type in FUSED_MODEL_TYPES:
        of_query = of_key = of_value = "qkv_proj"
        of_gate = of_up = "gate_up_proj"
    yield of_query, hidden, query, layers
    yield of_key, hidden, kv, layers
    yield of_value, hidden, kv, layers
    yield "o_proj", query, hidden, layers
    sparse = shape.num_expert_layers
    for width, count in ((shape.dense_width, layers - sparse), (shape.shared_expert_size, sparse)):
        if width and count:
            yield of_gate, hidden, width, count
            yield of_up, hidden, width, count
            yield "down_proj", width, hidden, count
    if shape.shared_expert_size and not shape.has_latent_attention:
        yield "shared_expert_gate", hidden, 1, sparse
