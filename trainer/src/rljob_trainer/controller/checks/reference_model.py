"""The model of a reference that has weights of its own, such as a teacher. Checks that it has the policy's tokens."""

from __future__ import annotations

import logging
from pathlib import Path

from rljob_api.v1alpha1.model import Model
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_trainer.controller.checks.fit import (
    check_layouts,
    check_row_lengths,
    check_vocabulary,
    check_vocabulary_size,
)
from rljob_trainer.controller.prompt_sets import Prompts
from rljob_trainer.engines.train.layout import ParallelLayout
from rljob_trainer.engines.train.model import read_config
from rljob_trainer.errors import ConfigurationError, about_field
from rljob_trainer.models.source import ModelLocation, controller_model
from rljob_trainer.models.tokenizer import Tokenizer
from rljob_trainer.workers.factories import POLICY_FIELD, REFERENCE, REFERENCE_FIELD

log = logging.getLogger(__name__)


def reference_model(
    spec: RLJobSpec,
    policy_folder: Path,
    prompts: Prompts,
    layout: ParallelLayout,
    cache_folder: Path,
    job_folder: Path,
) -> ModelLocation | None:
    """Finds and checks the reference's model; None if the reference has the policy's weights. Raises ConfigurationError
    if the model cannot be read, has other tokens than the policy, has a maximum length below that of the job's rows, or
    cannot be split over the reference's GPUs."""
    named = spec.roles.ref.model
    if named is None:
        return None
    log.info("reference: %s", named.source)
    with about_field(REFERENCE_FIELD, POLICY_FIELD):
        folder, location = controller_model(
            Model(source=named.source, revision=named.revision), cache_folder, job_folder
        )
        check_vocabulary(folder, prompts.largest_token)
        check_vocabulary_size(read_config(policy_folder), read_config(folder), named.source)
        check_row_lengths(folder, spec.training, prompts)
        check_layouts(folder, {REFERENCE: layout})
        check_same_tokens(policy_folder, folder, named.source)
        _warn_of_other_end_tokens(policy_folder, folder, named.source)
    return location


def check_same_tokens(policy_folder: Path, folder: Path, source: str) -> None:
    """Raises ConfigurationError if the tokenizer of the model in `folder`, which the job calls `source`, does not have
    the policy's tokens with the same ids. Special tokens count, because a vocabulary contains them. Names the first
    difference by id."""
    of_policy, of_model = Tokenizer(policy_folder).vocabulary(), Tokenizer(folder).vocabulary()
    if of_policy == of_model:
        return
    _, token = min((number, token) for token, number in of_policy.items() ^ of_model.items())
    mine, theirs = (str(each.get(token, "missing")) for each in (of_policy, of_model))
    raise ConfigurationError(
        f"{POLICY_FIELD}source: the tokenizer of {source} has other tokens than the policy's, so the same ids would be "
        f"other texts: the id of the token {token!r} is {mine} for the policy, and {theirs} for this model "
        f"({len(of_policy)} and {len(of_model)} tokens in all); choose a model with the policy's tokenizer"
    )


def _warn_of_other_end_tokens(policy_folder: Path, folder: Path, source: str) -> None:
    """Logs a warning if the models end a response with different tokens, as a base model and a chat model often do.
    Then the reference gives the end of the policy's responses a low probability."""
    policy, model = Tokenizer(policy_folder), Tokenizer(folder)
    missing = sorted(set(policy.eos_token_ids) - set(model.eos_token_ids))
    if missing:
        log.warning(
            "%ssource: the policy ends responses with %s, but %s ends them with %s; if few responses end before "
            "maxNewTokens, use a policy and a reference with the same end token",
            REFERENCE_FIELD,
            policy.token_texts(policy.eos_token_ids),
            source,
            model.token_texts(model.eos_token_ids),
        )
