"""Finds out what the job's environments offer, and tries them, before any device is reserved."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rljob_api.constants import LOGS_FOLDER
from rljob_api.contract_documents import TrainerJob
from rljob_api.v1alpha1.environment import Environment, RewritePolicy
from rljob_api.v1alpha1.environment_rules import ENVIRONMENT_REWARD
from rljob_api.v1alpha1.recipes import is_distillation
from rljob_api.v1alpha1.reward import Reward, RewardType
from rljob_api.v1alpha1.training import Training
from rljob_trainer.controller.model_roles import user_code_variables
from rljob_trainer.controller.prompt_sets import Prompts
from rljob_trainer.datasets.prompts import PromptRow
from rljob_trainer.environments.conversation import Conversation
from rljob_trainer.environments.description import NAME_COLUMN, ClassSpec, EnvironmentDescription
from rljob_trainer.environments.kinds import WHERE, EnvironmentKind, EnvironmentKinds
from rljob_trainer.environments.probe import Trial, describe_environments
from rljob_trainer.environments.settings import EnvironmentSettings, EpisodeLimits
from rljob_trainer.environments.template_check import find_rewrites
from rljob_trainer.environments.turn_template import PROBE_MESSAGE
from rljob_trainer.errors import ConfigurationError, DatasetError, EnvironmentMessageError
from rljob_trainer.models.tokenizer import ChatMessage, Tokenizer
from rljob_trainer.settings import Settings

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FoundEnvironment:
    """The environments of a job."""

    settings: EnvironmentSettings
    """For the workers."""
    prompts: tuple[PromptRow, ...]
    """The prompt of one rollout with each class, for checks that need a prompt."""


def found_environment(
    job: TrainerJob, settings: Settings, model_folder: Path, prompts: Prompts
) -> FoundEnvironment | None:
    """Describes the classes in a process of their own, begins a rollout with the first row of each class, and tests the
    model's chat template. An agent's function is only described, because it needs the policy. Returns None for a job
    without an environment.

    Raises ConfigurationError, DatasetError or ResourceError."""
    environment = job.spec.training.environment
    if environment is None:
        return None
    classes = _class_specs(environment)
    is_agent = environment.session is not None
    rows = {} if is_agent else first_rows(prompts.rows, [each.name for each in classes])
    variables, log_folder = user_code_variables(job, settings), settings.run_folder / LOGS_FOLDER
    if is_agent:
        variables = without_proxy(variables)
    probed = describe_environments(
        classes,
        variables=variables,
        log_file=log_folder / "environment-check.log",
        timeout_seconds=environment.timeout_seconds,
        trials=[Trial(name, row.row, job.spec.training.seed) for name, row in rows.items()],
    )
    descriptions = probed.descriptions
    if is_agent:
        descriptions = (_checked_agent(descriptions[0], job.spec.training, environment),)
    check_rewards_of(job.spec.training, descriptions)
    found = EnvironmentSettings(
        classes=classes,
        descriptions=descriptions,
        limits=limits_of(environment),
        max_open=job.spec.training.rollout.max_num_sequences,
        rollouts_per_process=environment.rollouts_per_process,
        timeout_seconds=environment.timeout_seconds,
        tool_parser=environment.tool_parser,
        starts_new_rows=environment.on_rewrite is RewritePolicy.NEW_ROW,
        model_folder=model_folder,
        log_folder=log_folder,
        variables=variables,
    )
    kinds = EnvironmentKinds(Tokenizer(model_folder), found)
    for kind in kinds:
        _check_rewrites(kind, environment.on_rewrite)
    trials = [
        _trial_prompt(kinds.named(name), row, opening, environment.max_context_tokens)
        for (name, row), opening in zip(rows.items(), probed.openings, strict=True)
    ]
    if is_agent:
        trials = [_agent_prompt(next(iter(kinds)), prompts.rows[0], environment.max_context_tokens)]
    return FoundEnvironment(found, tuple(trials))


def _class_specs(environment: Environment) -> tuple[ClassSpec, ...]:
    if (agent := environment.session) is not None:
        return (ClassSpec("session", agent.path, dict(agent.arguments), f"{WHERE}.session", is_agent=True),)
    return tuple(
        ClassSpec(each.name, each.path, dict(each.arguments), f"{WHERE}.classes[{index}]")
        for index, each in enumerate(environment.classes or ())
    )


def without_proxy(variables: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment variables of an agent's process: its requests to this machine use no proxy."""
    found = dict(variables)
    for name in ("NO_PROXY", "no_proxy"):
        hosts = [*filter(None, found.get(name, "").split(",")), "127.0.0.1", "localhost"]
        found[name] = ",".join(dict.fromkeys(hosts))
    return found


def _checked_agent(
    description: EnvironmentDescription, training: Training, environment: Environment
) -> EnvironmentDescription:
    """Returns the description of an agent's function, with whether its result is a reward: if it is listed as one, or
    if there are no others. Raises ConfigurationError if rollouts of a function that is not async share a process."""
    if environment.rollouts_per_process > 1 and not description.is_async:
        raise ConfigurationError(
            f"{WHERE}.rolloutsPerProcess ({environment.rollouts_per_process}): rollouts can only share a process if "
            "the function of the agent is async; set 1, or write `async def run(session, row)`"
        )
    is_listed = any(reward.type is RewardType.ENVIRONMENT for reward in training.rewards)
    if training.rewards and not is_listed:
        log.warning(
            "%s.session: the job lists rewards, and none has the type Environment, so what the function returns does "
            "not count",
            WHERE,
        )
    return replace(description, has_reward=is_listed or not training.rewards)


def _agent_prompt(kind: EnvironmentKind, row: PromptRow, max_context_tokens: int) -> PromptRow:
    """Returns a prompt for checks. The prompts of an agent are known only when it runs, so this is the row's, or else
    a message that stands for one."""
    opening = None if row.messages else [PROBE_MESSAGE]
    return _prompt_row(row, kind.conversation(row.messages, opening, max_context_tokens))


def limits_of(environment: Environment) -> EpisodeLimits:
    """Returns the limits of every rollout."""
    return EpisodeLimits(
        environment.max_turns,
        environment.max_context_tokens,
        environment.max_turn_tokens,
        environment.max_seconds,
        environment.retries,
    )


def first_rows(rows: Sequence[PromptRow], names: Sequence[str]) -> dict[str, PromptRow]:
    """Returns the first row of each class; with several classes, only of those that occur. Raises DatasetError for the
    first row that names none of them."""
    if len(names) == 1:
        return {names[0]: rows[0]}
    found: dict[str, PromptRow] = {}
    for row in rows:
        name = row.row.get(NAME_COLUMN)
        if not isinstance(name, str) or name not in names:
            raise DatasetError(
                f"{row.location}: the column {NAME_COLUMN!r} must name one of the classes of {WHERE} "
                f"({', '.join(names)}; seen: {name!r:.80}); fix the row, or add the class"
            )
        found.setdefault(name, row)
    if unused := [name for name in names if name not in found]:
        log.warning("%s.classes: no row of the data names %s", WHERE, ", ".join(unused))
    return found


def check_rewards_of(training: Training, descriptions: Sequence[EnvironmentDescription]) -> None:
    """Raises ConfigurationError if nothing scores the rollouts, or if only some classes have `get_reward`."""
    without = [each.name for each in descriptions if not each.has_reward]
    listed = [reward.name for reward in training.rewards if reward.type is RewardType.ENVIRONMENT]
    if listed and without:
        raise ConfigurationError(
            f"spec.training.rewards (reward {listed[0]}): has the type Environment, but the class {without[0]} of "
            f"{WHERE} has no method `get_reward`; add it, or remove the reward"
        )
    if without and len(without) < len(descriptions):
        raise ConfigurationError(
            f"{WHERE}.classes: {', '.join(without)} has no method `get_reward`, but other classes have one; add it, so "
            "that all rollouts have the same rewards"
        )
    if without and not training.rewards and not is_distillation(training.algorithm):
        raise ConfigurationError(
            f"spec.training.rewards: there is no reward, and the class {without[0]} of {WHERE} has no method "
            "`get_reward`; add one of them"
        )
    names = [reward.name for reward in training.rewards]
    if not without and not listed and ENVIRONMENT_REWARD in names:
        raise ConfigurationError(
            f"spec.training.rewards[{names.index(ENVIRONMENT_REWARD)}].name: {ENVIRONMENT_REWARD!r} is the name of the "
            "reward that is added for `get_reward` of the environment; choose another name, or list a reward of type "
            "Environment"
        )


def with_environment_reward(job: TrainerJob, descriptions: Sequence[EnvironmentDescription]) -> TrainerJob:
    """Adds a reward of type Environment if the classes have `get_reward` and the job lists none. Raises
    ConfigurationError if an evaluation names this reward and it is not added."""
    training = job.spec.training
    names = [reward.name for reward in training.rewards]
    is_listed = any(reward.type is RewardType.ENVIRONMENT for reward in training.rewards)
    if is_listed or not all(each.has_reward for each in descriptions):
        for index, each in enumerate(training.evaluations):
            if ENVIRONMENT_REWARD not in names and ENVIRONMENT_REWARD in (each.rewards or ()):
                raise ConfigurationError(
                    f"spec.training.evaluations[{index}].rewards: {ENVIRONMENT_REWARD!r} does not exist, because the "
                    f"classes of {WHERE} have no method `get_reward` (rewards: {', '.join(names)}); add it, or name "
                    "other rewards"
                )
        return job
    added = Reward(name=ENVIRONMENT_REWARD, type=RewardType.ENVIRONMENT)
    training = training.model_copy(update={"rewards": (*training.rewards, added)})
    return job.model_copy(update={"spec": job.spec.model_copy(update={"training": training})})


def _check_rewrites(kind: EnvironmentKind, policy: RewritePolicy) -> None:
    """Tests with short conversations whether the chat template rewrites turns. Logs it, or raises ConfigurationError if
    the job does not allow it."""
    # A tool call that cannot be read is answered by a message of the user.
    answers_as_user = kind.description.has_respond or bool(kind.template.tools)
    rewrites = find_rewrites(kind.template, kind.parser, has_user_messages=answers_as_user)
    if not rewrites:
        return
    text = "; ".join(map(str, rewrites))
    if policy is RewritePolicy.FAIL:
        raise ConfigurationError(
            f"{WHERE}.onRewrite: Fail, and the model's chat template rewrites earlier turns ({text}); use a template "
            "that only appends, or set Keep or NewRow"
        )
    log.warning(
        "%s.onRewrite: the model's chat template rewrites earlier turns of a conversation (%s); %s",
        *(WHERE, text),
        "a new row of tokens begins then" if policy is RewritePolicy.NEW_ROW else "they stay as they were sampled",
    )


def _trial_prompt(
    kind: EnvironmentKind, row: PromptRow, opening: str | list[ChatMessage] | None, max_context_tokens: int
) -> PromptRow:
    """Returns the prompt of a rollout that begins with this row. Raises ConfigurationError if what `reset` returned
    cannot be its prompt."""
    try:
        conversation = kind.conversation(row.messages, opening, max_context_tokens)
    except EnvironmentMessageError as error:
        raise ConfigurationError(str(error)) from error
    log.info(
        "environment class %s: tools: %s; has %srespond, has %sget_reward; the first prompt has %d tokens",
        kind.description.name,
        ", ".join(kind.description.tool_names) or "none",
        "" if kind.description.has_respond else "no ",
        "" if kind.description.has_reward else "no ",
        conversation.num_prompt_tokens,
    )
    return _prompt_row(row, conversation)


def _prompt_row(row: PromptRow, conversation: Conversation) -> PromptRow:
    text = conversation.prompt_with_beginning
    return PromptRow(
        row.index,
        text,
        text,
        tuple(conversation.token_ids),
        row.answer,
        row.row,
        tuple(conversation.messages),
        text.removeprefix(conversation.prompt_text),
        location=row.location,
    )
