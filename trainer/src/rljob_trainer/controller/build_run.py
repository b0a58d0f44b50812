"""Puts a run together: data, reward, worker groups. The reward's processes load while the rest is built."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from rljob_api.constants import ENV_RUN_FOLDER, LOGS_FOLDER
from rljob_api.handover import TrainerJob
from rljob_api.v1alpha1.reward import RewardType
from rljob_api.v1alpha1.rollout import Compile, RolloutEngine
from rljob_api.v1alpha1.training import Training
from rljob_trainer.controller.answer_checks import DrawnRows, check_rewards, refuse_unusable, start_check_pools
from rljob_trainer.controller.auto_settings import (
    AutoSettings,
    refuse_other_adapters,
    selected_engine,
    settle,
    settled_spec,
)
from rljob_trainer.controller.engine_settings import critic_of
from rljob_trainer.controller.hub_models import (
    HubJudges,
    at_kept_commit,
    hub_judges_of,
    hub_model_of,
    judges_at_kept_commits,
    tell_of_another_reward_model,
)
from rljob_trainer.controller.job_checks import (
    check_algorithm,
    check_layouts,
    check_lora,
    check_recomputation,
    check_row_lengths,
    check_tensor_parallel,
    check_vocabulary,
    needs_critic,
)
from rljob_trainer.controller.judging_models import ScoringModel, critic_model, scoring_model
from rljob_trainer.controller.model_roles import (
    Models,
    layout_of,
    model_roles,
    num_data_ranks_of,
    num_workers_of,
    placed_roles,
    train_roles,
)
from rljob_trainer.controller.prompt_sets import DATASET, EVALUATION_DATASET, Prompts
from rljob_trainer.controller.response_checks import check_responses
from rljob_trainer.controller.rollout_phase import ModelReward
from rljob_trainer.datasets.prompts import PromptRow, load_prompts, without_held_out
from rljob_trainer.errors import DatasetError
from rljob_trainer.groups.fused_worker import RoleSpec
from rljob_trainer.groups.ray_session import ShippedCode, cluster_resources, ray_session
from rljob_trainer.groups.shared_folders import check_shared
from rljob_trainer.groups.worker_group import WorkerGroup, spawn
from rljob_trainer.groups.worker_processes import BuildSettings, WorkerProcesses, start_processes
from rljob_trainer.models.source import ModelPlace, controller_model, fingerprint
from rljob_trainer.models.tokenizer import Tokenizer
from rljob_trainer.observability.activity import LOOK_SECONDS, ActivityWatch
from rljob_trainer.pools.pool_manager import (
    FusedRoles,
    ResourcePoolManager,
    plan_roles,
    pool_settings_of,
)
from rljob_trainer.pools.resource_pool import ResourcePool
from rljob_trainer.rewards.loading import scorer_spec
from rljob_trainer.rewards.process_pool import scorer_environment
from rljob_trainer.settings import NUM_THREADS_VARIABLE, Settings, worker_environment
from rljob_trainer.source_paths import looks_local
from rljob_trainer.workers.factories import (
    ACTOR,
    CRITIC,
    HYBRID,
    REFERENCE,
    REWARD,
    REWARD_MODEL,
    make_reward,
)
from rljob_trainer.workers.protocols import (
    ActorGroup,
    CriticGroup,
    HybridGroup,
    ReferenceGroup,
    RewardGroup,
    RewardModelGroup,
    TrainedGroup,
)
from rljob_trainer.workers.reward import RewardSettings, RewardWorker, ScorerSettings
from rljob_trainer.workers.reward_model import TEXT_COLUMNS, TOKEN_COLUMNS

log = logging.getLogger(__name__)

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Workers:
    """The worker groups of a run."""

    actor: ActorGroup
    hybrid: HybridGroup
    reward: RewardGroup
    reference: ReferenceGroup | None
    critic: CriticGroup | None
    scoring_model: ModelReward | None
    num_devices: int
    processes: Mapping[str, WorkerProcesses]
    """By pool."""

    @property
    def trained(self) -> tuple[TrainedGroup, ...]:
        """What checkpoints are made of."""
        return (self.actor,) if self.critic is None else (self.actor, self.critic)


@dataclass(frozen=True)
class Run:
    """Everything that the controller works with."""

    job: TrainerJob
    """As it runs here: model.dtype, rollout.engine and rollout.compile are what their `Auto` has become, a model of the
    hub is at a commit."""
    choices: AutoSettings
    model_folder: Path
    model_place: ModelPlace
    prompts: Prompts
    workers: Workers
    drawn_rows: DrawnRows | None = None
    """Says which rows are left out when they are drawn; None where all rows were checked before."""


@contextmanager
def built_run(
    job: TrainerJob, settings: Settings, kept: AutoSettings | None, doing: Tell = lambda _: None
) -> Iterator[Run]:
    """A run, ready to train; everything is torn down at the end, whatever happens. `kept` is what the checkpoint
    that it goes on from says of the job's `Auto`; `doing` is told, in words, what takes long.

    What can be wrong with the job is found before Ray is started and a device is taken. Raises ConfigurationError,
    DatasetError, ResourceError, WorkerError or WorkerDiedError, each naming the cause."""
    training = job.spec.training
    engine = selected_engine(job.spec, kept)
    check_algorithm(job.spec)
    with ExitStack() as stack:
        # Processes of each reward here: what cannot be loaded or scored is found before a device is taken.
        reward = reward_settings(job, settings)
        checks = start_check_pools(reward, stack)
        doing("finds the model and loads its tokenizer")
        log.info("model: %s", training.model.source)
        is_local = looks_local(training.model.source, settings.job_folder)
        wanted = training.model if is_local else at_kept_commit(training.model, kept.hub_model if kept else None)
        model_folder, model = controller_model(wanted, settings.cache_folder, settings.job_folder)
        hub_model = None if is_local else hub_model_of(training.model, model.model)
        local_model = fingerprint(model_folder) if is_local else None
        refuse_other_adapters(job.spec, kept, hub_model, local_model)
        check_row_lengths(model_folder, training)
        doing("loads the data")
        prompts = load_all_prompts(training, model_folder, settings.job_folder)
        check_row_lengths(model_folder, training, prompts)
        check_vocabulary(model_folder, prompts.largest_token)
        check_responses(training, model_folder, prompts.rows)
        layouts = {role: layout_of(job.spec, role) for role in train_roles(job.spec)}
        critic_layout = layouts.pop(CRITIC) if needs_critic(job.spec) and critic_of(job.spec).model.source else None
        check_layouts(model_folder, layouts)
        kept_judges = kept.hub_judges if kept else HubJudges()
        judged = judges_at_kept_commits(job.spec, kept_judges, partial(looks_local, base_folder=settings.job_folder))
        critic, folders = None, (settings.cache_folder, settings.job_folder)
        if critic_layout is not None:
            critic = critic_model(judged, model_folder, prompts, critic_layout, *folders)
        scored = scoring_model(judged, model_folder, prompts.rows, layout_of(job.spec, REWARD_MODEL), *folders)
        hub_judges = hub_judges_of(job.spec, critic, scored.place if scored else None)
        tell_of_another_reward_model(kept_judges, hub_judges)
        has_experts = check_lora(model_folder, training.model.lora)
        check_recomputation(model_folder, job.spec.training.model.gradient_checkpointing_every_nth_layer)
        if engine is RolloutEngine.VLLM:
            check_tensor_parallel(model_folder, job.spec.roles.rollout.tensor_parallel)
        log.info(
            "data: %d training prompts, %d held out (%d training rows were among them and are left out)",
            len(prompts.training),
            len(prompts.held_out),
            prompts.num_removed,
        )
        drawn_rows = check_rewards(reward.scorers, checks, prompts.training, prompts.held_out, doing)
        doing("connects to Ray and reserves devices")
        device_type = stack.enter_context(_ray(job, settings))
        choices = settle(job.spec, device_type, kept, hub_model, local_model, has_experts=has_experts)
        choices = choices.model_copy(update={"hub_judges": hub_judges})
        job = job.model_copy(update={"spec": settled_spec(job.spec, choices)})
        models = Models(model, critic, scored)
        workers = stack.enter_context(_workers(job, settings, models, reward, prompts.longest, device_type, doing))
        yield Run(job, choices, model_folder, model, prompts, workers, drawn_rows)


def reward_settings(job: TrainerJob, settings: Settings) -> RewardSettings:
    """The rewards as every worker builds them: the job's scoring processes are spread over the workers."""
    training, num_workers = job.spec.training, num_workers_of(job.spec, REWARD)
    scorers, penalties = [], []
    for index, each in enumerate(training.rewards):
        where = f"spec.training.rewards[{index}]"
        scorer = scorer_spec(each, where, training.dataset)
        if each.type is RewardType.OVERLONG:
            penalties.append(each)
        elif scorer is not None:
            scorers.append(ScorerSettings(each, where, scorer, -(-each.num_processes // num_workers)))
    return RewardSettings(
        scorers=tuple(scorers),
        penalties=tuple(penalties),
        max_new_tokens=training.rollout.max_new_tokens,
        log_folder=settings.run_folder / LOGS_FOLDER,
        environment=scorer_environment(
            {**settings.environment, ENV_RUN_FOLDER: str(settings.run_folder)},
            [variable.name for variable in job.spec.env],
        ),
    )


@contextmanager
def _ray(job: TrainerJob, settings: Settings) -> Iterator[str]:
    """The connection to Ray; gives the type of the devices there."""
    num_workers = sum(each.nodes * each.gpus_per_node for each in job.spec.pools)
    log.info("Ray: %s", f"connecting to {settings.ray_address}" if settings.ray_address else "starting")
    has_gpus = settings.device_type == "cuda" or (settings.device_type is None and torch.cuda.is_available())
    num_local_gpus = num_workers if has_gpus else 0
    with ray_session(settings.ray_address, num_workers + 1, num_local_gpus, shipped_code(settings)):
        # A cluster's head has no GPU itself: what its nodes declare counts, not what torch finds here.
        yield settings.device_type or ("cuda" if cluster_resources().get("GPU") else "cpu")


@contextmanager
def _workers(
    job: TrainerJob,
    settings: Settings,
    models: Models,
    reward: RewardSettings,
    longest_prompt: int,
    device_type: str,
    doing: Tell,
) -> Iterator[Workers]:
    """The devices of all pools, and the worker groups on them."""
    num_workers = sum(each.nodes * each.gpus_per_node for each in job.spec.pools)
    num_threads = chosen_num_threads(job, settings)
    log_folder = settings.run_folder / LOGS_FOLDER
    with ExitStack() as stack:
        roles = {
            role.name: role
            for role in (
                RoleSpec(REWARD, RewardWorker, partial(make_reward, reward)),
                *model_roles(job, models, longest_prompt),
            )
        }
        # GPUs also where they are declared only and not computed on: they are what keeps workers off the head.
        pools = pool_settings_of(job.spec, num_cpus_per_device=1, cluster_resources=cluster_resources())
        plan = plan_roles([pool.name for pool in pools], placed_roles(job.spec, tuple(roles)))
        log.info("workers: building %d on %s; their logs are in %s", num_workers, device_type, log_folder)
        manager = stack.enter_context(ResourcePoolManager(pools, plan))
        started: list[tuple[FusedRoles, ResourcePool, WorkerProcesses]] = []
        for group in plan.groups:
            pool = manager.pool_of(group.roles[0])
            processes = start_processes(pool, _environment(job, settings, device_type))
            stack.callback(processes.close)
            started.append((group, pool, processes))
        if settings.ray_address:
            folders = {"run folder": settings.run_folder, "checkpoint folder": settings.checkpoint_folder}
            check_shared(folders, [processes for _, _, processes in started])

        def build(group: FusedRoles, pool: ResourcePool, processes: WorkerProcesses) -> dict[str, WorkerGroup]:
            others = tuple(slot for _, other, _ in started if other is not pool for slot in other.slots())
            folder = log_folder / group.pool if len(started) > 1 else log_folder
            build_settings = BuildSettings(device_type, num_threads, folder, others)
            processes.build(pool.slots(), build_settings, [roles[role] for role in group.roles])
            return spawn(processes)

        doing(f"loads models on {num_workers} workers")
        with ThreadPoolExecutor(max_workers=len(started)) as builders:  # on all pools at once
            built = [builders.submit(build, *each) for each in started]
            activity = ActivityWatch(log_folder, lambda how: doing(f"loads models; {how}"))
            while wait(built, timeout=LOOK_SECONDS).not_done:
                activity.look()
        groups = {role: group for each in built for role, group in each.result().items()}
        yield Workers(
            actor=groups[ACTOR].seen_as(ActorGroup),
            hybrid=groups[HYBRID].seen_as(HybridGroup),
            reward=groups[REWARD].seen_as(RewardGroup),
            reference=groups[REFERENCE].seen_as(ReferenceGroup) if REFERENCE in groups else None,
            critic=groups[CRITIC].seen_as(CriticGroup) if CRITIC in groups else None,
            scoring_model=_model_reward(job, models.reward, groups),
            num_devices=num_workers,
            processes={group.pool: processes for group, _, processes in started},
        )


def _environment(job: TrainerJob, settings: Settings, device_type: str) -> dict[str, str]:
    """Of the workers' processes."""
    compiles = job.spec.training.rollout.compile is Compile.ALWAYS
    variables = worker_environment(device_type, chosen_num_threads(job, settings), compiles=compiles)
    return variables | {ENV_RUN_FOLDER: str(settings.run_folder)}


def _model_reward(
    job: TrainerJob, scored: ScoringModel | None, groups: Mapping[str, WorkerGroup]
) -> ModelReward | None:
    if scored is None:
        return None
    columns = TOKEN_COLUMNS if scored.settings.reads_tokens else TEXT_COLUMNS
    group = groups[REWARD_MODEL].seen_as(RewardModelGroup)
    return ModelReward(group, columns, num_data_ranks_of(job.spec, REWARD_MODEL))


def shipped_code(settings: Settings) -> ShippedCode | None:
    """What goes along to a cluster, without what runs have written there; a Ray job has come with what it needs."""
    folder = settings.shipped_code
    if folder is None or settings.is_ray_job:
        return None
    inside = [path for path in (settings.run_folder, settings.checkpoint_folder) if path.is_relative_to(folder)]
    return ShippedCode(folder, ("/.git/", "/runs/", *(f"/{path.relative_to(folder)}/" for path in inside)))


def chosen_num_threads(job: TrainerJob, settings: Settings) -> int | None:
    """CPU threads of each worker, where somebody has chosen them."""
    is_chosen = not settings.is_ray_job or NUM_THREADS_VARIABLE in [variable.name for variable in job.spec.env]
    return settings.num_threads if is_chosen else None


def load_all_prompts(training: Training, model_folder: Path, job_folder: Path) -> Prompts:
    """Training and held-out prompts. Raises DatasetError."""
    tokenizer = Tokenizer(model_folder)
    rows = load_prompts(training.dataset, tokenizer, job_folder, DATASET)
    held_out = list[PromptRow]()
    if training.evaluation is not None:
        evaluation_rows = load_prompts(training.evaluation.dataset, tokenizer, job_folder, EVALUATION_DATASET)
        held_out = evaluation_rows[: training.evaluation.num_prompts]
    needs_answers = any(reward.type is RewardType.MATH_ANSWER for reward in training.rewards)
    datasets = [(DATASET, training.dataset, rows)]
    if training.evaluation is not None:
        datasets.append((EVALUATION_DATASET, training.evaluation.dataset, held_out))
    for where, dataset, prompts in datasets:
        unanswered = [row.place for row in prompts if row.answer is None]
        if unanswered and (len(unanswered) < len(prompts) or needs_answers):
            raise DatasetError(
                f"{where}.answerField: {len(unanswered)} of {len(prompts)} rows have no answer to score "
                f"against, the first is {unanswered[0]}; name the column that holds it, or leave these rows out"
            )
        if needs_answers:
            refuse_unusable(prompts, where, dataset.answer_field)
    kept, num_removed = without_held_out(rows, held_out)
    return Prompts(tuple(kept), tuple(held_out), num_removed)
