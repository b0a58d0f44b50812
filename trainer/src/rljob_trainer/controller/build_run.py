"""Sets up a run: rewards, data, models and worker groups. The scoring processes start first, and load the rewards while
the controller loads the data."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rljob_api.contract_documents import TrainerJob
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_trainer.controller.auto_settings import (
    AdaptedModel,
    AutoSettings,
    refuse_other_adapters,
    resolve_auto,
    resolved_recomputation,
    resolved_spec,
    selected_engine,
)
from rljob_trainer.controller.checks.answers import DrawnRowFilter, check_rewards, start_check_pools
from rljob_trainer.controller.checks.environments import found_environment, with_environment_reward
from rljob_trainer.controller.checks.fit import (
    check_algorithm,
    check_fit,
    check_row_lengths,
    needs_critic,
    needs_reference,
)
from rljob_trainer.controller.checks.reference_model import reference_model
from rljob_trainer.controller.critic_and_reward_models import critic_model, found_reward_model
from rljob_trainer.controller.hub_models import (
    HubModel,
    HubRoleModels,
    at_saved_commit,
    hub_model_of,
    hub_role_models_of,
    role_models_at_saved_commits,
    warn_if_models_changed,
)
from rljob_trainer.controller.model_roles import (
    Models,
    layout_of,
    reward_settings,
    roles_with_policy_model,
)
from rljob_trainer.controller.prompt_sets import Prompts, load_all_prompts, rows_with_answers
from rljob_trainer.controller.run_workers import ReportActivity, Workers, connected_ray, started_workers
from rljob_trainer.engines.rollout.select import vllm_supports_adapters
from rljob_trainer.engines.train.kernels import check_kernel_device
from rljob_trainer.engines.train.lora import target_endings
from rljob_trainer.engines.train.model import ModelSize, build_on_meta, model_size
from rljob_trainer.models.source import ModelLocation, controller_model, fingerprint
from rljob_trainer.rewards.process_pool import ScorerPool
from rljob_trainer.settings import Settings
from rljob_trainer.source_paths import looks_local
from rljob_trainer.workers.factories import (
    CRITIC,
    REFERENCE,
    REWARD_MODEL,
)
from rljob_trainer.workers.reward import ScorerSettings

log = logging.getLogger(__name__)

DATA_FOLDER = "data"
"""Folder in the run folder: the indices of large datasets, and what filters have dropped."""


@dataclass(frozen=True)
class Run:
    """Everything that the controller works with."""

    job: TrainerJob
    """The resolved job: no `Auto`, and every model of the hub at a commit."""
    choices: AutoSettings
    model_folder: Path
    """Local folder with the configuration and the tokenizer of the policy's initial model."""
    model_location: ModelLocation
    """Where every worker finds the policy's initial model."""
    prompts: Prompts
    workers: Workers
    drawn_row_filter: DrawnRowFilter | None = None
    """Checks rows when they are drawn; None if drawn rows need no check."""


@contextmanager
def built_run(
    job: TrainerJob, settings: Settings, saved: AutoSettings | None, doing: ReportActivity = lambda _: None
) -> Iterator[Run]:
    """Yields a run that is ready to train, and tears everything down at the end, also after errors.

    `saved`: the resolved settings of the checkpoint that the run resumes from. `doing`: called with a description of
    each slow activity. Most errors in the job are found before Ray is started and devices are reserved. Raises
    ConfigurationError, DatasetError, ResourceError, WorkerError or WorkerDiedError, each naming the cause."""
    engine = selected_engine(job.spec, saved)
    check_algorithm(job.spec)
    with ExitStack() as stack:
        # Before devices are reserved, scoring processes on the controller's node find rewards and answers that fail.
        reward = reward_settings(job, settings)
        check_pools = start_check_pools(reward, stack)
        doing("finds the model and loads its tokenizer")
        policy = found_policy(job.spec, settings, saved)
        prompts = loaded_prompts(job.spec, settings, policy.folder, doing)
        environment = found_environment(job, settings, policy.folder, prompts)
        if environment is not None:
            job = with_environment_reward(job, environment.settings.descriptions)
            reward = reward_settings(job, settings)
        layouts = {role: layout_of(job.spec, role) for role in roles_with_policy_model(job.spec)}
        if settings.device_type is not None:
            check_kernel_device(job.spec.training.model.kernels, settings.device_type)
        check_fit(job.spec, engine, policy.folder, prompts, layouts)
        known = prompts if environment is None else prompts.only(environment.prompts)
        models, hub_role_models = found_models(
            job.spec, settings, policy, known, saved.hub_role_models if saved else HubRoleModels()
        )
        drawn_row_filter = checked_rewards(job.spec, reward.scorers, check_pools, prompts, doing)
        doing("connects to Ray and reserves devices")
        device_type = stack.enter_context(connected_ray(job, settings))
        check_kernel_device(job.spec.training.model.kernels, device_type)
        choices = resolve_auto(
            job.spec,
            device_type,
            saved,
            policy.hub_model,
            policy.local_model,
            adapted=adapted_model(job.spec, policy.folder),
        )
        choices = choices.model_copy(update={"hub_role_models": hub_role_models})
        of_policy, of_critic = model_sizes(policy, models)
        recomputation = resolved_recomputation(job.spec, device_type, policy=of_policy, critic=of_critic)
        job = job.model_copy(update={"spec": resolved_spec(job.spec, choices, recomputation)})
        groups = started_workers(
            job,
            settings,
            models,
            reward,
            prompts.longest,
            environment.settings if environment else None,
            device_type,
            doing,
        )
        workers = stack.enter_context(groups)
        yield Run(job, choices, policy.folder, policy.location, prompts, workers, drawn_row_filter)


def loaded_prompts(spec: RLJobSpec, settings: Settings, model_folder: Path, doing: ReportActivity) -> Prompts:
    """Loads the prompts of training and evaluation, and logs their numbers. Raises DatasetError, ResourceError."""
    doing("loads the data")
    data_folder = settings.run_folder / DATA_FOLDER
    prompts = load_all_prompts(spec.training, model_folder, settings.job_folder, data_folder, doing)
    log.info("data: %s", prompts if spec.training.sources else "no dataset; the environment makes the prompts")
    return prompts


def checked_rewards(
    spec: RLJobSpec,
    scorers: Sequence[ScorerSettings],
    pools: Sequence[ScorerPool],
    prompts: Prompts,
    doing: ReportActivity,
) -> DrawnRowFilter | None:
    """Waits for the scorers, and checks the answers of all rows; see `check_rewards`."""
    training = {each.where: each.rows_to_check for each in prompts.sources}
    with_answers = rows_with_answers(prompts, spec.training)
    return check_rewards(scorers, pools, training, with_answers, doing, is_large=prompts.is_large)


@dataclass(frozen=True)
class FoundPolicy:
    """The model that training starts from. Either `hub_model` or `local_model` is set. A resumed run compares this
    model with the one that the checkpoint names."""

    folder: Path
    """Local folder with the model's configuration and tokenizer."""
    location: ModelLocation
    """Where every worker finds the model."""
    hub_model: HubModel | None
    local_model: str | None
    """Fingerprint of a local model."""


def found_policy(spec: RLJobSpec, settings: Settings, saved: AutoSettings | None) -> FoundPolicy:
    """Finds the policy's initial model. Raises ConfigurationError if the model cannot be read, if maxNewTokens exceeds
    the model's maximum length, or if the job's adapters or their base model are not those of the checkpoint."""
    named = spec.training.model
    log.info("model: %s", named.source)
    is_local = looks_local(named.source, settings.job_folder)
    wanted = named if is_local else at_saved_commit(named, saved.hub_model if saved else None)
    folder, location = controller_model(wanted, settings.cache_folder, settings.job_folder)
    hub_model = None if is_local else hub_model_of(named, location.model)
    local_model = fingerprint(folder) if is_local else None
    refuse_other_adapters(spec, saved, hub_model, local_model)
    check_row_lengths(folder, spec.training)
    return FoundPolicy(folder, location, hub_model, local_model)


def found_models(
    spec: RLJobSpec, settings: Settings, policy: FoundPolicy, prompts: Prompts, saved: HubRoleModels
) -> tuple[Models, HubRoleModels]:
    """Finds and checks the models of critic, reward model and reference. Returns all models of the run, and the commits
    of these three for checkpoints. Raises ConfigurationError."""
    pinned = role_models_at_saved_commits(spec, saved, partial(looks_local, base_folder=settings.job_folder))
    folders, critic, reference = (settings.cache_folder, settings.job_folder), None, None
    if needs_critic(spec):
        critic = critic_model(pinned, policy.folder, prompts, layout_of(spec, CRITIC), *folders)
    reward_model = found_reward_model(pinned, policy.folder, prompts.rows, layout_of(spec, REWARD_MODEL), *folders)
    if needs_reference(spec):
        reference = reference_model(pinned, policy.folder, prompts, layout_of(spec, REFERENCE), *folders)
    hub_role_models = hub_role_models_of(spec, critic, reward_model.location if reward_model else None, reference)
    warn_if_models_changed(saved, hub_role_models)
    return Models(policy.location, critic, reward_model, reference), hub_role_models


def model_sizes(policy: FoundPolicy, models: Models) -> tuple[ModelSize, ModelSize]:
    """The sizes of policy and critic. A critic without a model of its own has the policy's."""
    of_policy, critic = model_size(policy.folder), models.critic
    if critic is None:
        return of_policy, of_policy
    folder, _ = controller_model(critic.model, critic.cache_folder, critic.base_folder)
    return of_policy, model_size(folder)


def adapted_model(spec: RLJobSpec, model_folder: Path) -> AdaptedModel | None:
    """What `resolve_auto` needs to know about the policy with the job's adapters; None without adapters."""
    lora = spec.training.model.lora
    if lora is None:
        return None
    return AdaptedModel(
        target_endings(build_on_meta(model_folder), lora.targets), partial(vllm_supports_adapters, model_folder)
    )
