"""Puts a run together: data, reward, worker groups. The reward's processes load while the rest is built."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rljob_api.handover import TrainerJob
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_trainer.controller.answer_checks import DrawnRows, check_rewards, start_check_pools
from rljob_trainer.controller.auto_settings import (
    AutoSettings,
    refuse_other_adapters,
    selected_engine,
    settle,
    settled_spec,
)
from rljob_trainer.controller.hub_models import (
    HubJudges,
    HubModel,
    at_kept_commit,
    hub_judges_of,
    hub_model_of,
    judges_at_kept_commits,
    tell_of_another_reward_model,
)
from rljob_trainer.controller.judging_models import critic_model, scoring_model
from rljob_trainer.controller.model_roles import (
    Models,
    layout_of,
    reward_settings,
    roles_with_policy_model,
)
from rljob_trainer.controller.prompt_sets import Prompts, load_all_prompts
from rljob_trainer.controller.run_checks import (
    check_algorithm,
    check_fit,
    check_row_lengths,
    needs_critic,
)
from rljob_trainer.controller.run_workers import Tell, Workers, connected_ray, started_workers
from rljob_trainer.models.source import ModelPlace, controller_model, fingerprint
from rljob_trainer.settings import Settings
from rljob_trainer.source_paths import looks_local
from rljob_trainer.workers.factories import (
    CRITIC,
    REWARD_MODEL,
)

log = logging.getLogger(__name__)


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
    engine = selected_engine(job.spec, kept)
    check_algorithm(job.spec)
    with ExitStack() as stack:
        # Processes of each reward here: what cannot be loaded or scored is found before a device is taken.
        reward = reward_settings(job, settings)
        checks = start_check_pools(reward, stack)
        doing("finds the model and loads its tokenizer")
        policy = found_policy(job.spec, settings, kept)
        doing("loads the data")
        prompts = load_all_prompts(job.spec.training, policy.folder, settings.job_folder)
        layouts = {role: layout_of(job.spec, role) for role in roles_with_policy_model(job.spec)}
        has_experts = check_fit(job.spec, engine, policy.folder, prompts, layouts)
        models, hub_judges = found_models(job.spec, settings, policy, prompts, kept.hub_judges if kept else HubJudges())
        log.info("data: %s", prompts)
        drawn_rows = check_rewards(reward.scorers, checks, prompts.training, prompts.held_out, doing)
        doing("connects to Ray and reserves devices")
        device_type = stack.enter_context(connected_ray(job, settings))
        choices = settle(job.spec, device_type, kept, policy.hub_model, policy.local_model, has_experts=has_experts)
        choices = choices.model_copy(update={"hub_judges": hub_judges})
        job = job.model_copy(update={"spec": settled_spec(job.spec, choices)})
        groups = started_workers(job, settings, models, reward, prompts.longest, device_type, doing)
        workers = stack.enter_context(groups)
        yield Run(job, choices, policy.folder, policy.place, prompts, workers, drawn_rows)


@dataclass(frozen=True)
class FoundPolicy:
    """The model that training begins from, and one of these two, which say later whether it is still the same."""

    folder: Path
    """Its configuration and tokenizer on this machine."""
    place: ModelPlace
    hub_model: HubModel | None
    local_model: str | None


def found_policy(spec: RLJobSpec, settings: Settings, kept: AutoSettings | None) -> FoundPolicy:
    """Raises ConfigurationError where it cannot be read, reads no row of maxNewTokens, or is not the one that the
    checkpoint's adapters were trained beside."""
    asked = spec.training.model
    log.info("model: %s", asked.source)
    is_local = looks_local(asked.source, settings.job_folder)
    wanted = asked if is_local else at_kept_commit(asked, kept.hub_model if kept else None)
    folder, place = controller_model(wanted, settings.cache_folder, settings.job_folder)
    hub_model = None if is_local else hub_model_of(asked, place.model)
    local_model = fingerprint(folder) if is_local else None
    refuse_other_adapters(spec, kept, hub_model, local_model)
    check_row_lengths(folder, spec.training)
    return FoundPolicy(folder, place, hub_model, local_model)


def found_models(
    spec: RLJobSpec, settings: Settings, policy: FoundPolicy, prompts: Prompts, kept: HubJudges
) -> tuple[Models, HubJudges]:
    """With those that judge responses, which are checked here, and what a checkpoint keeps of them. Raises
    ConfigurationError."""
    judged = judges_at_kept_commits(spec, kept, partial(looks_local, base_folder=settings.job_folder))
    folders, critic = (settings.cache_folder, settings.job_folder), None
    if needs_critic(spec):
        critic = critic_model(judged, policy.folder, prompts, layout_of(spec, CRITIC), *folders)
    scored = scoring_model(judged, policy.folder, prompts.rows, layout_of(spec, REWARD_MODEL), *folders)
    hub_judges = hub_judges_of(spec, critic, scored.place if scored else None)
    tell_of_another_reward_model(kept, hub_judges)
    return Models(policy.place, critic, scored), hub_judges
