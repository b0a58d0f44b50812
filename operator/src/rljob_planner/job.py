"""From a job to what the planner works with, as the trainer reads the job (trainer, controller/model_roles.py)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rljob_api.quantities import bytes_of
from rljob_api.v1alpha1.advantage import AdvantageType
from rljob_api.v1alpha1.model import Critic, Dtype, LoraSync
from rljob_api.v1alpha1.optional_roles import absent_roles, reference_is_the_actor
from rljob_api.v1alpha1.policy_loss import WITH_WHOLE_PASS
from rljob_api.v1alpha1.recipes import advantage_type, filled, has_dynamic_sampling, resolve_algorithm
from rljob_api.v1alpha1.rollout import Compile, RolloutEngine
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_planner.errors import PlanError
from rljob_planner.model_shape import ModelShape
from rljob_planner.workload import (
    EngineKind,
    Head,
    LoraShape,
    ModelOffload,
    Role,
    RolloutWork,
    TokenLengths,
    TrainModel,
    Workload,
)

REPLACED_GROUPS = 0.4
"""Share of groups that dynamic sampling replaces: a guess, not a measurement. A run says it."""
ROUND_MARGIN = 1.25
"""Of prompts in a second round over those that should do (trainer, controller/dynamic_sampling.py)."""
MIN_STEPS_TO_COMPILE = 300
"""Of a job on CPUs (trainer, engines/rollout/select.py)."""


@dataclass(frozen=True)
class ModelSource:
    """Where a job has a model from, and the field that says so."""

    source: str
    revision: str | None
    field: str


@dataclass(frozen=True)
class LengthOptions:
    """What is known of lengths beyond the job's limits; means in tokens."""

    prompt_mean: float | None = None
    response_mean: float | None = None


def model_sources(spec: RLJobSpec) -> dict[Role, ModelSource]:
    """Of the roles that have a model of their own: the actor, and critic and reward model where the job has them."""
    training, absent = spec.training, absent_roles(spec)
    policy = ModelSource(training.model.source, training.model.revision, "spec.training.model.source")
    sources = {Role.ACTOR: policy}
    if Role.CRITIC.value not in absent:
        critic = _critic(spec).model
        own = ModelSource(critic.source or "", critic.revision, "spec.training.critic.model.source")
        sources[Role.CRITIC] = own if critic.source else policy
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
    """What a step of the job does. `shapes` has those of `model_sources`; a critic without one is of the actor's.

    Raises PlanError where a shape is missing."""
    training = spec.training
    algorithm = resolve_algorithm(training.algorithm)
    models = _models(spec, shapes, is_cpu=is_cpu)
    mini_batch = training.mini_batch_size or training.batch_size
    has_single_update = mini_batch == training.batch_size and training.num_epochs_per_batch == 1
    has_dropout = training.model.lora is not None and training.model.lora.dropout > 0
    advantage = algorithm.advantage.type
    in_any_case = has_dropout or algorithm.rollout_correction.rejection is not None
    in_any_case = in_any_case or algorithm.kl.is_in_reward or advantage is AdvantageType.OPTIMAL_TOKEN_BASELINE
    generated, assumptions = _generated_per_learned(spec)
    return Workload(
        name=name,
        batch_size=training.batch_size,
        group_size=training.rollout.group_size,
        mini_batch_size=mini_batch,
        num_epochs_per_batch=training.num_epochs_per_batch,
        num_steps=training.steps,
        max_tokens_per_micro_batch=training.max_tokens_per_micro_batch,
        lengths=lengths_of(spec, lengths or LengthOptions()),
        models=models,
        rollout=_rollout(spec, models[Role.ACTOR], is_cpu=is_cpu),
        needs_old_logprobs=in_any_case or not has_single_update,
        needs_old_logprobs_in_any_case=in_any_case,
        needs_whole_pass=algorithm.loss.type in WITH_WHOLE_PASS,
        needs_entropy=training.algorithm.entropy_coefficient != 0,
        checkpoint_every_steps=spec.checkpoint.every_steps,
        evaluation_every_steps=None if training.evaluation is None else training.evaluation.every_steps,
        scores_first=filled(algorithm.drop_zero_variance_groups),
        generated_per_learned=generated,
        has_greedy_responses=advantage is AdvantageType.REMAX,
        assumptions=(*assumptions, *_worst_cases(spec, models)),
    )


def lengths_of(spec: RLJobSpec, known: LengthOptions) -> TokenLengths:
    """Caps are the job's. A mean that is not known is half of its cap; for responses anything from a quarter to all of
    it is then taken to be possible."""
    prompt_max, response_max = spec.training.dataset.max_prompt_tokens, spec.training.rollout.max_new_tokens
    is_guess = known.response_mean is None
    return TokenLengths(
        prompt_mean=_mean("--mean-prompt", known.prompt_mean, prompt_max),
        prompt_max=prompt_max,
        response_mean=_mean("--mean-response", known.response_mean, response_max),
        response_max=response_max,
        response_mean_low=response_max / 4 if is_guess else None,
        response_mean_high=float(response_max) if is_guess else None,
        assumption=_assumption(known),
    )


def _assumption(known: LengthOptions) -> str:
    guesses = {"prompts": known.prompt_mean, "responses": known.response_mean}
    unknown = [name for name, mean in guesses.items() if mean is None]
    if not unknown:
        return ""
    options = " and ".join(f"--mean-{name.removesuffix('s')}" for name in unknown)
    return f"{' and '.join(unknown)} are taken to be half of their limit on average; {options} can say more"


def _mean(where: str, given: float | None, cap: int) -> float:
    if given is None:
        return cap / 2
    if not 0 < given <= cap:
        raise PlanError(f"{where}: must be above 0 and at most the job's limit, {cap} (seen {given:g}); correct it")
    return given


def _critic(spec: RLJobSpec) -> Critic:
    return spec.training.critic or Critic()


def _compute_bytes(spec: RLJobSpec, *, is_cpu: bool) -> int:
    dtype = spec.training.model.dtype
    if dtype is Dtype.AUTO:
        return 4 if is_cpu else 2
    return 2 if dtype is Dtype.BFLOAT16 else 4


def _models(spec: RLJobSpec, shapes: Mapping[Role, ModelShape], *, is_cpu: bool) -> dict[Role, TrainModel]:
    """Of the train roles that the job has (trainer, controller/engine_settings.py)."""
    model, absent = spec.training.model, absent_roles(spec)
    for role in (Role.ACTOR, Role.REWARD_MODEL):
        if role not in shapes and role.value not in absent:
            raise PlanError(f"{role.value}: the shape of its model is not there; name it with --model-config FILE")
    every_nth = model.gradient_checkpointing_every_nth_layer
    num_bytes, policy = _compute_bytes(spec, is_cpu=is_cpu), shapes[Role.ACTOR]
    lora, offload = _lora(spec, policy, is_cpu=is_cpu), model.offload
    actor = TrainModel(
        shape=policy,
        is_trained=True,
        compute_bytes=num_bytes,
        checkpoints_activations=model.gradient_checkpointing,
        checkpoints_every_nth_layer=every_nth,
        lora=lora,
        offload=ModelOffload(offload.parameters, offload.gradients, offload.optimizer),
        defers_reduction=spec.roles.actor.defer_gradient_reduction,
    )
    models = {Role.ACTOR: actor}
    if Role.REF.value not in absent:
        models[Role.REF] = TrainModel(
            shape=policy,
            is_trained=False,
            compute_bytes=num_bytes,
            offload=ModelOffload(parameters=offload.reference),
            lora=lora if reference_is_the_actor(spec) else None,
            is_actor_without_adapters=reference_is_the_actor(spec),
        )
    if Role.CRITIC.value not in absent:
        critic = _critic(spec).model
        models[Role.CRITIC] = TrainModel(
            shape=shapes.get(Role.CRITIC, policy),
            is_trained=True,
            head=Head.VALUE,
            compute_bytes=num_bytes,
            checkpoints_activations=critic.gradient_checkpointing,
            offload=ModelOffload(critic.offload.parameters, critic.offload.gradients, critic.offload.optimizer),
        )
    if Role.REWARD_MODEL.value not in absent:
        offloads = any(each.reward_model is not None and each.reward_model.offload for each in spec.training.rewards)
        models[Role.REWARD_MODEL] = TrainModel(
            shape=shapes[Role.REWARD_MODEL],
            is_trained=False,
            head=Head.SCORE,
            compute_bytes=num_bytes,
            offload=ModelOffload(parameters=offloads),
        )
    return models


def _lora(spec: RLJobSpec, shape: ModelShape, *, is_cpu: bool) -> LoraShape | None:
    """How adapters reach the engine is `select_lora_sync` of the trainer (engines/rollout/select.py)."""
    wanted = spec.training.model.lora
    if wanted is None:
        return None
    goes_alone = wanted.sync is LoraSync.ADAPTER or (
        wanted.sync is LoraSync.AUTO and not is_cpu and not shape.has_experts and _engine(spec) is EngineKind.VLLM
    )
    return lora_shape(shape, wanted.rank, wanted.targets, syncs_alone=goes_alone)


def _engine(spec: RLJobSpec) -> EngineKind:
    """`Auto` is vLLM: what else is installed where the job will run is not known here."""
    is_plain = spec.training.rollout.engine is RolloutEngine.HUGGING_FACE
    return EngineKind.HUGGING_FACE if is_plain else EngineKind.VLLM


def _rollout(spec: RLJobSpec, actor: TrainModel, *, is_cpu: bool) -> RolloutWork:
    rollout, dataset = spec.training.rollout, spec.training.dataset
    auto_compiles = not is_cpu or spec.training.steps >= MIN_STEPS_TO_COMPILE
    compiles = rollout.compile is Compile.ALWAYS or (rollout.compile is Compile.AUTO and auto_compiles)
    engine = _engine(spec)
    has_adapters_there = actor.lora is not None and actor.lora.syncs_alone
    return RolloutWork(
        shape=actor.shape,
        weight_bytes=actor.compute_bytes,
        engine=engine,
        compiles=compiles and engine is EngineKind.VLLM,
        max_sequences=rollout.max_num_sequences,
        max_model_length=dataset.max_prompt_tokens + rollout.max_new_tokens,
        memory_utilization=rollout.gpu_memory_utilization,
        cpu_kv_cache_bytes=bytes_of(rollout.cpu_kv_cache),
        sync_every_steps=rollout.sync_every_steps,
        adapter_rank=actor.lora.rank if actor.lora is not None and has_adapters_there else None,
    )


def _worst_cases(spec: RLJobSpec, models: Mapping[Role, TrainModel]) -> Iterator[str]:
    """What only the trainer knows, and what it will not like."""
    algorithm = spec.training.algorithm
    if Role.REF in models and algorithm.kl.coefficient == 0:
        yield "A function of the job's own may ask for the reference's log-probabilities: a reference is counted."
    if Role.CRITIC in models and advantage_type(algorithm) is AdvantageType.FUNCTION:
        yield "A function of the job's own may ask for values: a critic is counted."
    longest = spec.training.dataset.max_prompt_tokens + spec.training.rollout.max_new_tokens
    for role in (Role.ACTOR, Role.CRITIC):
        positions = models[role].shape.max_positions if role in models else None
        if positions is not None and longest > positions:
            name = models[role].shape.name
            yield f"{name} has {positions:,} positions, and the longest row of the job {longest:,} tokens."
            return


def _generated_per_learned(spec: RLJobSpec) -> tuple[float, tuple[str, ...]]:
    """Responses that are generated for each that is learned from, and what is taken for granted in it."""
    if not has_dynamic_sampling(spec.training.algorithm):
        return 1.0, ()
    assumption = f"Dynamic sampling is taken to replace {REPLACED_GROUPS:.0%} of the groups."
    return 1 + min(1.0, ROUND_MARGIN * REPLACED_GROUPS / (1 - REPLACED_GROUPS)), (assumption,)


@dataclass(frozen=True)
class LinearLayer:
    """A linear layer of a decoder layer, by its names in the families of transformers."""

    names: tuple[str, ...]
    inputs: int
    outputs: int
    num_layers: int
    """Decoder layers that have it."""


def linear_layers(shape: ModelShape) -> tuple[LinearLayer, ...]:
    """Those that adapters can stand beside. Matrices that some families have as one are counted one by one."""
    hidden, query, kv, layers = shape.hidden_size, shape.query_size, shape.kv_size, shape.num_layers
    fused = ("qkv_proj", "query_key_value")
    attention = (
        LinearLayer(("q_proj", *fused), hidden, query, layers),
        LinearLayer(("k_proj", *fused), hidden, kv, layers),
        LinearLayer(("v_proj", *fused), hidden, kv, layers),
        LinearLayer(("o_proj", "dense"), query, hidden, layers),
    )
    return (*attention, *_of_mlps(shape))


def _of_mlps(shape: ModelShape) -> tuple[LinearLayer, ...]:
    widths = []
    if not shape.has_experts:
        widths.append((shape.mlp_size, shape.num_layers))
    if shape.num_dense_layers:
        widths.append((shape.dense_mlp_size or shape.mlp_size, shape.num_dense_layers))
    if shape.shared_expert_size:
        widths.append((shape.shared_expert_size, shape.num_expert_layers))
    hidden, found = shape.hidden_size, []
    for width, layers in widths:
        if shape.has_mlp_gate:
            found.append(LinearLayer(("gate_proj", "gate_up_proj"), hidden, width, layers))
        found.append(LinearLayer(("up_proj", "gate_up_proj", "fc1", "dense_h_to_4h"), hidden, width, layers))
        found.append(LinearLayer(("down_proj", "fc2", "dense_4h_to_h"), width, hidden, layers))
    return tuple(found)


def lora_shape(shape: ModelShape, rank: int, targets: Sequence[str] | None, *, syncs_alone: bool) -> LoraShape:
    """Adapters of a rank beside the layers that `targets` name by the ends of their names; beside all where it is
    None."""
    chosen = [
        each
        for each in linear_layers(shape)
        if targets is None or any(target.rpartition(".")[2] in each.names for target in targets)
    ]
    return LoraShape(
        rank=rank,
        num_parameters=sum(rank * (each.inputs + each.outputs) * each.num_layers for each in chosen),
        num_layers=sum(each.num_layers for each in chosen),
        input_sizes_per_layer=sum(each.inputs * each.num_layers for each in chosen) // shape.num_layers,
        syncs_alone=syncs_alone,
    )
