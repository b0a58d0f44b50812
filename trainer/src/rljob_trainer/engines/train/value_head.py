"""A linear layer that gives one number per token, in the place of a language model's output head.

Its name is that of transformers' classifiers, so that a model that was trained as one loads, and an export is one.
"""

from __future__ import annotations

import enum

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from rljob_trainer.engines.train.output_head import output_head_of

VALUE_HEAD = "score"
VALUE_WEIGHT, VALUE_BIAS = f"{VALUE_HEAD}.weight", f"{VALUE_HEAD}.bias"


class Head(enum.Enum):
    """What a model says of a token."""

    TOKENS = enum.auto()
    """The distribution of the next token."""
    VALUE = enum.auto()
    """One number, at first 0 where the model's files have no head for it."""
    SCORE = enum.auto()
    """One number, by a head that the model's files have."""


def without_tied_head(config: PreTrainedConfig) -> PreTrainedConfig:
    """The configuration of a model whose output head goes: nothing is tied to the embeddings then."""
    for part in (config, config.get_text_config()):
        part.tie_word_embeddings = False
    return config


def put_value_head(language_model: PreTrainedModel, *, has_bias: bool) -> None:
    """Replaces the output head; on the device and in the dtype of the head that was there. `has_bias` as in the files
    of the model: that of a token classifier has one, that of a sequence classifier none.

    Raises ConfigurationError for a model whose head is no linear layer."""
    head, _ = output_head_of(language_model)
    [name] = [name for name, module in language_model.named_modules() if module is head]
    parent = language_model.get_submodule(name.rpartition(".")[0])
    setattr(parent, name.rpartition(".")[2], nn.Identity())
    weight = head.weight
    language_model.add_module(
        VALUE_HEAD, nn.Linear(weight.shape[1], 1, bias=has_bias, device=weight.device, dtype=weight.dtype)
    )
