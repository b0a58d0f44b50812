"""The models that judge responses: the critic's initial model, which must use the policy's tokens, and the reward
model. Checks whether each is usable, and decides which inputs the reward model gets."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from rljob_api.v1alpha1.model import Model
from rljob_api.v1alpha1.reward import Reward, RewardModel
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_trainer.controller.checks.fit import (
    check_layouts,
    check_row_lengths,
    check_vocabulary,
    check_vocabulary_size,
    position_limit,
)
from rljob_trainer.controller.checks.reference_model import check_same_tokens
from rljob_trainer.controller.engine_settings import critic_of, reward_model_engine
from rljob_trainer.controller.model_roles import FoundRewardModel
from rljob_trainer.controller.prompt_sets import Prompts
from rljob_trainer.datasets.prompts import PromptRow
from rljob_trainer.engines.train.layout import ParallelLayout
from rljob_trainer.engines.train.model import read_config
from rljob_trainer.engines.train.output_head import VALUE_WEIGHT
from rljob_trainer.engines.train.weight_loading import WeightFiles
from rljob_trainer.errors import ConfigurationError, RewardError, about_field
from rljob_trainer.models.model_files import reading_model
from rljob_trainer.models.source import ModelLocation, controller_model
from rljob_trainer.models.tokenizer import Tokenizer
from rljob_trainer.source_paths import looks_local
from rljob_trainer.workers.factories import CRITIC, CRITIC_FIELD, POLICY_FIELD, REWARD_MODEL
from rljob_trainer.workers.reward_model import RewardModelSettings, conversations

log = logging.getLogger(__name__)

CLASSIFIER = "ForSequenceClassification"
"""Suffix of transformers' class names for sequence classifiers."""


def critic_model(
    spec: RLJobSpec,
    policy_folder: Path,
    prompts: Prompts,
    layout: ParallelLayout,
    cache_folder: Path,
    job_folder: Path,
) -> ModelLocation | None:
    """Finds and checks the critic's initial model; None if the critic starts from the policy's model. Raises
    ConfigurationError if the model cannot be read, has other tokens than the policy, is too short for the job's rows,
    or cannot be split over the critic's GPUs."""
    named = critic_of(spec).model
    if named.source is None:
        return None
    log.info("critic: %s", named.source)
    with about_field(CRITIC_FIELD, POLICY_FIELD):
        folder, location = controller_model(
            Model(source=named.source, revision=named.revision), cache_folder, job_folder
        )
        check_vocabulary(folder, prompts.largest_token)
        check_vocabulary_size(read_config(policy_folder), read_config(folder), named.source)
        check_row_lengths(folder, spec.training, prompts)
        check_layouts(folder, {CRITIC: layout})
        check_same_tokens(policy_folder, folder, named.source)
    return location


def reward_with_model(spec: RLJobSpec) -> tuple[str, Reward, RewardModel] | None:
    """Returns the reward of type RewardModel, if there is one, with the prefix of its field paths."""
    for index, reward in enumerate(spec.training.rewards):
        if reward.reward_model is not None:
            return f"spec.training.rewards[{index}].rewardModel.", reward, reward.reward_model
    return None


def found_reward_model(
    spec: RLJobSpec,
    policy_folder: Path,
    prompts: Sequence[PromptRow],
    layout: ParallelLayout,
    cache_folder: Path,
    job_folder: Path,
) -> FoundRewardModel | None:
    """Finds and checks the reward model; None if the job has none. Raises ConfigurationError if the model cannot be
    read, has no score head or several labels, cannot be split over its GPUs, has a chat template that rejects the
    prompts, or cannot read the policy's tokens or rows of that length."""
    found = reward_with_model(spec)
    if found is None:
        return None
    field, reward, named = found
    log.info("reward model: %s", named.source)
    with about_field(field, POLICY_FIELD):
        folder, location = controller_model(
            Model(source=named.source, revision=named.revision), cache_folder, job_folder
        )
        config = read_config(folder)
        _check_labels(config, named.source)
        if looks_local(named.source, job_folder):
            _check_head(folder)
        check_layouts(folder, {REWARD_MODEL: layout})
        policy, tokenizer = Tokenizer(policy_folder), Tokenizer(folder)
        is_alike = policy.vocabulary() == tokenizer.vocabulary() and policy.chat_template == tokenizer.chat_template
        reads_tokens = is_alike and _ends_with_response(tokenizer, prompts)
        limit = position_limit(config)
        if reads_tokens:
            check_vocabulary_size(read_config(policy_folder), config, named.source)
            check_vocabulary(folder, max(max(prompt.token_ids) for prompt in prompts))
            _check_positions(spec, named.source, limit, max(len(prompt.token_ids) for prompt in prompts))
        else:
            log.info(
                "reward model: its inputs are texts that it tokenizes itself, because %s",
                "its chat template adds text after the response"
                if is_alike
                else "its tokenizer or chat template differs from the policy's",
            )
            _check_conversations(tokenizer, prompts)
    # float32 is a placeholder: the dtype is only known after `Auto` is resolved.
    engine = reward_model_engine(spec, torch.float32, layout)
    return FoundRewardModel(location, RewardModelSettings(engine, reward.name, field, reads_tokens, limit))


def _check_positions(spec: RLJobSpec, source: str, limit: int | None, longest_prompt: int) -> None:
    longest = longest_prompt + spec.training.rollout.max_new_tokens
    if limit is not None and longest > limit:
        raise ConfigurationError(
            f"{POLICY_FIELD}source: with the longest prompt ({longest_prompt} tokens) and rollout.maxNewTokens "
            f"({spec.training.rollout.max_new_tokens}) a row may have {longest} tokens, but the maximum of {source} is "
            f"{limit} (max_position_embeddings); reduce dataset.maxPromptTokens or rollout.maxNewTokens, or choose "
            "another model"
        )


def _check_labels(config: PreTrainedConfig, source: str) -> None:
    """Raises ConfigurationError for a classifier with several labels. For models without a classifier class in
    config.json, `_check_head` looks at the weights."""
    architecture = next(iter(config.architectures or ()), "")
    if architecture.endswith(CLASSIFIER) and config.num_labels != 1:
        raise ConfigurationError(
            f"{POLICY_FIELD}source: {source} is a classifier with {config.num_labels} labels (config.json), but a "
            "reward model needs one; choose a model with one label"
        )


def _check_head(folder: Path) -> None:
    what = f"the weights in {folder} cannot be read"
    with reading_model(folder, what, "are files missing or damaged?"), WeightFiles(folder) as files:
        shape = files.slice(VALUE_WEIGHT).get_shape() if VALUE_WEIGHT in files.names else None
    if shape is None:
        raise ConfigurationError(
            f"{POLICY_FIELD}source: {folder} has no tensor '{VALUE_WEIGHT}', the score head; choose a model that was "
            "trained as a sequence classifier with one label"
        )
    if shape[:1] != [1]:
        raise ConfigurationError(
            f"{POLICY_FIELD}source: the score head of {folder} ({VALUE_WEIGHT}) has {math.prod(shape[:1])} outputs, "
            "but a reward model needs one; choose a model with one label"
        )


def _ends_with_response(tokenizer: Tokenizer, prompts: Sequence[PromptRow]) -> bool:
    """Whether a conversation ends with the response's end token; True if the prompts are not chats. Some chat templates
    add text after the end token, and the reward model was trained with that text."""
    row = next((row for row in prompts if row.messages is not None), None)
    return row is None or _conversation(tokenizer, row)[-1] in tokenizer.eos_token_ids


def _check_conversations(tokenizer: Tokenizer, prompts: Sequence[PromptRow]) -> None:
    """Applies the chat template to one prompt of each sequence of roles. Raises ConfigurationError."""
    for row in {tuple(message["role"] for message in row.messages or ()): row for row in prompts}.values():
        _conversation(tokenizer, row)


def _conversation(tokenizer: Tokenizer, row: PromptRow) -> list[int]:
    """Tokenizes a prompt with a dummy response. Raises ConfigurationError if the chat template rejects it."""
    response = f"{row.plain_turn_beginning}text"
    try:
        [token_ids] = conversations(tokenizer, [row.prompt], [row.messages], [response], [False])
    except RewardError as error:
        raise ConfigurationError(f"{POLICY_FIELD}source: {error}") from error
    return token_ids
