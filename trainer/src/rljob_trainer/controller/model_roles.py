"""Derives from a job: its roles with their pools, parallel layouts and settings, and the plan that all steps share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from rljob_api.constants import ENV_RUN_FOLDER, LOGS_FOLDER
from rljob_api.contract_documents import TrainerJob
from rljob_api.quantities import bytes_of
from rljob_api.v1alpha1.dataset import Dataset, NamedDataset
from rljob_api.v1alpha1.model import Dtype, HeadDtype
from rljob_api.v1alpha1.optional_roles import reference_is_the_actor
from rljob_api.v1alpha1.recipes import resolve_algorithm
from rljob_api.v1alpha1.reward import Reward, RewardType
from rljob_api.v1alpha1.rollout import Compile, LoadBalancing
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_api.v1alpha1.training import IncompleteGroup, Training
from rljob_trainer.controller.balanced_order import RowCosts
from rljob_trainer.controller.checks.fit import needs_critic, needs_reference, samples_all_tokens
from rljob_trainer.controller.engine_settings import actor_engine, critic_engine, critic_of, reference_engine
from rljob_trainer.controller.sampler import Engines, ScoringSettings
from rljob_trainer.controller.step_plan import StepPlan
from rljob_trainer.engines.rollout.base import SamplingSettings
from rljob_trainer.engines.train.attention import choose_attention
from rljob_trainer.engines.train.layout import ParallelLayout
from rljob_trainer.engines.train.model import attention_cost, read_config
from rljob_trainer.environments.settings import EnvironmentSettings
from rljob_trainer.groups.fused_worker import RoleSpec
from rljob_trainer.models.source import ModelLocation
from rljob_trainer.rewards.loading import call_settings, scorer_spec, sees_group, service_of, service_variables
from rljob_trainer.rewards.scorer_environment import scorer_environment
from rljob_trainer.settings import Settings
from rljob_trainer.workers.actor import ActorSettings, ActorWorker
from rljob_trainer.workers.critic import CriticSettings, CriticWorker
from rljob_trainer.workers.factories import (
    ACTOR,
    CRITIC,
    HYBRID,
    REFERENCE,
    REWARD,
    REWARD_MODEL,
    ROLLOUT,
    RolloutSettings,
    make_actor,
    make_critic,
    make_hybrid,
    make_reference,
    make_reward_model,
    make_rollout,
)
from rljob_trainer.workers.hybrid import HybridWorker
from rljob_trainer.workers.reference import ReferenceWorker
from rljob_trainer.workers.reward import EnvironmentRewardSettings, RewardSettings, ScorerSettings
from rljob_trainer.workers.reward_model import RewardModelSettings, RewardModelWorker
from rljob_trainer.workers.rollout import RolloutWorker


def num_workers_of(spec: RLJobSpec, role: str) -> int:
    """Returns the number of processes of a role: one for each GPU (on CPUs: each CPU share) of its pool."""
    [pool] = [pool for pool in spec.pools if pool.name == placed_roles(spec, [role])[role]]
    return pool.nodes * pool.gpus_per_node


def layout_of(spec: RLJobSpec, role: str) -> ParallelLayout:
    """Returns the parallel layout of a role with a train engine. If the actor's base model is the reference, as with
    adapters, the reference has the actor's layout."""
    role_spec = spec.roles.train_role(role)
    if role == REFERENCE and reference_is_the_actor(spec):
        role_spec = spec.roles.actor
    return ParallelLayout.of(num_workers_of(spec, role), role_spec.shard_size, role_spec.num_sequence_ranks)


def train_roles(spec: RLJobSpec) -> list[str]:
    """Returns the roles of the job that run on a train engine: actor, and reference and critic if needed."""
    optional = {REFERENCE: needs_reference(spec), CRITIC: needs_critic(spec)}
    return [ACTOR, *(role for role, is_needed in optional.items() if is_needed)]


def roles_with_policy_model(spec: RLJobSpec) -> list[str]:
    """Returns the roles of `train_roles` that use the policy's model: all except a critic or a reference with its own
    model."""
    has_own_model = {
        CRITIC: critic_of(spec).model.source is not None,
        REFERENCE: spec.roles.ref.model is not None,
    }
    return [role for role in train_roles(spec) if not has_own_model.get(role)]


def num_data_ranks_of(spec: RLJobSpec, role: str) -> int:
    """Returns the number of data-parallel ranks of a role, into which its batches are split."""
    return layout_of(spec, role).num_data_ranks


def mini_batch_rows_of(spec: RLJobSpec, role: str) -> int:
    """Returns the number of responses of a mini-batch that each data rank of the role gets."""
    training = spec.training
    num_prompts = training.mini_batch_size or training.batch_size
    return num_prompts * training.rollout.group_size // num_data_ranks_of(spec, role)


def critic_settings(spec: RLJobSpec, dtype: torch.dtype) -> CriticSettings:
    """Returns the settings of the critic; each worker fills in its own folder and device."""
    critic = critic_of(spec)
    return CriticSettings(
        engine=critic_engine(spec, dtype, layout_of(spec, CRITIC)),
        optimizer=critic.optimizer,
        clip_range=critic.value_clip_range or None,
        num_steps=spec.training.steps,
        num_epochs_per_batch=spec.training.num_epochs_per_batch,
        mini_batch_rows=mini_batch_rows_of(spec, CRITIC),
    )


@dataclass(frozen=True)
class FoundRewardModel:
    """The reward model: where it is, and its settings."""

    location: ModelLocation
    settings: RewardModelSettings


@dataclass(frozen=True)
class Models:
    """The models that the roles of a job start from."""

    policy: ModelLocation
    critic: ModelLocation | None = None
    """The critic's initial model; None: the policy's initial model."""
    reward_model: FoundRewardModel | None = None
    """The reward model, if there is one."""
    reference: ModelLocation | None = None
    """The reference's model; None: the policy's initial model."""


def model_roles(
    job: TrainerJob, models: Models, longest_prompt: int, environment: EnvironmentSettings | None = None
) -> list[RoleSpec]:
    """Returns the roles that have models, in the order in which workers build them."""
    model = models.policy
    training = job.spec.training
    rollout = training.rollout
    dtype = torch.bfloat16 if training.model.dtype is Dtype.BFLOAT16 else torch.float32
    trained = actor_engine(job.spec, dtype, layout_of(job.spec, ACTOR))
    actor = ActorSettings(
        engine=trained,
        algorithm=resolve_algorithm(training.algorithm),
        optimizer=training.optimizer,
        temperature=rollout.temperature,
        max_new_tokens=rollout.max_new_tokens,
        group_size=rollout.group_size,
        samples_all_tokens=samples_all_tokens(rollout),
        num_steps=training.steps,
        num_epochs_per_batch=training.num_epochs_per_batch,
        mini_batch_rows=mini_batch_rows_of(job.spec, ACTOR),
        first_step=critic_of(job.spec).warmup_steps,
        entropy_every_steps=training.entropy_every_steps,
    )
    generator = RolloutSettings(
        model=model,
        engine=rollout.engine,
        compiles=rollout.compile is Compile.ALWAYS,
        dtype=dtype,
        tensor_parallel=job.spec.roles.rollout.tensor_parallel,
        max_model_length=(
            environment.limits.max_context_tokens if environment else longest_prompt + rollout.max_new_tokens
        ),
        max_num_sequences=rollout.max_num_sequences,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        cpu_kv_cache_bytes=bytes_of(rollout.cpu_kv_cache),
        seed=training.seed,
        stall_seconds=rollout.stall_seconds,
        keeps_weights_asleep=rollout.sync_every_steps > 1,
        adapters=trained.adapters,
        has_float32_head=training.model.head_dtype is HeadDtype.FLOAT32,
        environment=environment,
    )
    roles = [RoleSpec(ACTOR, ActorWorker, partial(make_actor, actor, model))]
    if needs_reference(job.spec):
        roles.append(_reference_role(job.spec, models, dtype))
    if needs_critic(job.spec):
        critic = critic_settings(job.spec, dtype)
        roles.append(RoleSpec(CRITIC, CriticWorker, partial(make_critic, critic, models.critic or model)))
    if (reward_model := models.reward_model) is not None:
        settings = replace(reward_model.settings, engine=replace(reward_model.settings.engine, compute_dtype=dtype))
        roles.append(
            RoleSpec(REWARD_MODEL, RewardModelWorker, partial(make_reward_model, settings, reward_model.location))
        )
    return [
        *roles,
        RoleSpec(ROLLOUT, RolloutWorker, partial(make_rollout, generator)),
        RoleSpec(HYBRID, HybridWorker, partial(make_hybrid, dtype, training.seed)),
    ]


def _scored_dataset(training: Training, reward: Reward) -> Dataset | None:
    """Returns the first dataset whose prompts the reward scores; None without datasets."""
    for dataset in training.sources.values():
        if not isinstance(dataset, NamedDataset) or not dataset.rewards or reward.name in dataset.rewards:
            return dataset
    return None


def _reference_role(spec: RLJobSpec, models: Models, dtype: torch.dtype) -> RoleSpec:
    make = partial(
        make_reference,
        reference_engine(spec, dtype, layout_of(spec, REFERENCE)),
        models.reference or models.policy,
        spec.training.rollout.temperature,
        has_own_model=models.reference is not None,
    )
    return RoleSpec(REFERENCE, ReferenceWorker, make)


def reward_settings(job: TrainerJob, settings: Settings) -> RewardSettings:
    """Returns the settings of the rewards for each worker. The job's scoring processes are distributed over the
    workers. Raises ConfigurationError."""
    training, num_workers = job.spec.training, num_workers_of(job.spec, REWARD)
    scorers, penalties, of_environment = [], [], []
    environment_names = frozenset(each.name for each in training.rewards if each.type is RewardType.ENVIRONMENT)
    for index, each in enumerate(training.rewards):
        where = f"spec.training.rewards[{index}]"
        per_worker = -(-each.num_processes // num_workers)
        dataset = _scored_dataset(training, each)
        scorer = scorer_spec(each, where, dataset, per_worker * num_workers, settings.job_folder)
        if each.type is RewardType.OVERLONG:
            penalties.append(each)
        elif each.type is RewardType.ENVIRONMENT:
            of_environment.append(EnvironmentRewardSettings(each, where, environment_names - {each.name}))
        elif scorer is not None:
            calls = call_settings(each, where, per_worker * num_workers)
            variables = service_variables(each, settings.environment)
            scorers.append(ScorerSettings(each, where, scorer, per_worker, calls, variables))
    return RewardSettings(
        scorers=tuple(scorers),
        penalties=tuple(penalties),
        max_new_tokens=training.rollout.max_new_tokens,
        log_folder=settings.run_folder / LOGS_FOLDER,
        environment=user_code_variables(job, settings),
        of_environment=tuple(of_environment),
    )


def scoring_of(spec: RLJobSpec) -> ScoringSettings:
    """Returns what the job's rewards need of the sampler."""
    rewards = spec.training.rewards
    return ScoringSettings(
        sees_groups=any(sees_group(each) for each in rewards),
        counts_calls=any(service_of(each) is not None for each in rewards),
    )


def user_code_variables(job: TrainerJob, settings: Settings) -> dict[str, str]:
    """Returns the environment variables of the processes that run the user's rewards and environments: without the keys
    of services that the trainer itself calls, such as judges."""
    keys = {service.key_variable for each in job.spec.training.rewards if (service := service_of(each)) is not None}
    return scorer_environment(
        {**settings.environment, ENV_RUN_FOLDER: str(settings.run_folder)},
        [variable.name for variable in job.spec.env if variable.name not in keys],
    )


def engines_of(spec: RLJobSpec) -> Engines:
    """Returns the rollout engines of a job."""
    ranks_per_engine, rollout = spec.roles.rollout.tensor_parallel, spec.training.rollout
    return Engines(
        num_workers_of(spec, ROLLOUT) // ranks_per_engine,
        ranks_per_engine,
        rollout.max_num_sequences,
        rollout.load_balancing is LoadBalancing.DYNAMIC,
    )


def placed_roles(spec: RLJobSpec, roles: Sequence[str]) -> dict[str, str]:
    """Returns the pool of each of these roles; a role without a pool in the job runs on the actor's pool."""
    pools = spec.placed_roles()
    return {role: pools.get(role, pools[ACTOR]) for role in roles}


def step_plan(job: TrainerJob, model_folder: Path) -> StepPlan:
    """Returns the settings that all steps share. `model_folder`: the configuration of the policy's model."""
    training = job.spec.training
    rollout = training.rollout
    mini_batch_size = training.mini_batch_size or training.batch_size
    config = read_config(model_folder)
    per_square = attention_cost(config)

    def ranks_and_costs(role: str) -> tuple[int, RowCosts]:
        """Those of the actor if the job does not have the role."""
        layout = layout_of(job.spec, role if role in train_roles(job.spec) else ACTOR)
        max_tokens = training.max_tokens_per_micro_batch * layout.num_sequence_ranks
        return layout.num_data_ranks, RowCosts(max_tokens, per_square)

    of_actor, of_critic = ranks_and_costs(ACTOR), ranks_and_costs(CRITIC)
    return StepPlan(
        algorithm=resolve_algorithm(training.algorithm),
        sampling=SamplingSettings(
            rollout.temperature, rollout.top_p, rollout.top_k, rollout.max_new_tokens, rollout.stop
        ),
        group_size=rollout.group_size,
        has_single_update=mini_batch_size == training.batch_size and training.num_epochs_per_batch == 1,
        seed=training.seed,
        num_data_ranks=of_actor[0],
        num_critic_ranks=of_critic[0],
        row_costs=of_actor[1],
        critic_row_costs=of_critic[1],
        reference_follows_actor=ranks_and_costs(REFERENCE) == of_actor,
        critic_warmup_steps=critic_of(job.spec).warmup_steps,
        rows_per_update=mini_batch_size * rollout.group_size,
        has_dropout=training.model.lora is not None and training.model.lora.dropout > 0,
        sync_every_steps=rollout.sync_every_steps,
        max_failure_rate=training.max_failure_rate,
        refills_groups=training.on_incomplete_group is IncompleteGroup.REFILL,
        has_flat_rows=choose_attention(config).is_flat,
    )
