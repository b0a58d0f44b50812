"""Where a job's critic begins: the model that it names, which must speak the policy's tokens."""

from __future__ import annotations

import logging
from pathlib import Path

from rljob_api.v1alpha1.model import Model
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_trainer.controller.engine_settings import critic_of
from rljob_trainer.controller.job_checks import (
    check_layouts,
    check_row_lengths,
    check_vocabulary,
    check_vocabulary_size,
)
from rljob_trainer.controller.prompt_sets import Prompts
from rljob_trainer.engines.train.layout import ParallelLayout
from rljob_trainer.engines.train.model import read_config
from rljob_trainer.errors import ConfigurationError, about_field
from rljob_trainer.models.source import ModelPlace, controller_model
from rljob_trainer.models.tokenizer import Tokenizer
from rljob_trainer.workers.factories import CRITIC, CRITIC_FIELD, POLICY_FIELD

log = logging.getLogger(__name__)


def critic_model(
    spec: RLJobSpec,
    policy_folder: Path,
    prompts: Prompts,
    layout: ParallelLayout,
    cache_folder: Path,
    job_folder: Path,
) -> ModelPlace | None:
    """None for the policy's own model. Raises ConfigurationError for a model that cannot be read, has other tokens than
    the policy's, reads only shorter rows, or does not divide over the critic's GPUs."""
    named = critic_of(spec).model
    if named.source is None:
        return None
    log.info("critic: %s", named.source)
    with about_field(CRITIC_FIELD, POLICY_FIELD):
        folder, place = controller_model(Model(source=named.source, revision=named.revision), cache_folder, job_folder)
        check_vocabulary(folder, prompts.largest_token)
        check_vocabulary_size(read_config(policy_folder), read_config(folder), named.source)
        check_row_lengths(folder, spec.training, prompts)
        check_layouts(folder, {CRITIC: layout})
        mine, theirs = Tokenizer(policy_folder).vocabulary(), Tokenizer(folder).vocabulary()
    if mine != theirs:
        differing = sorted({token for token, number in mine.items() if theirs.get(token) != number})
        example = f"such as {differing[0]!r}" if differing else f"it has {len(theirs)}, the policy {len(mine)}"
        raise ConfigurationError(
            f"{CRITIC_FIELD}source: {named.source} has other tokens than the policy ({example}), and would read its "
            "responses as other texts; choose a model with the policy's tokenizer, or leave it out for the policy's own"
        )
    return place
