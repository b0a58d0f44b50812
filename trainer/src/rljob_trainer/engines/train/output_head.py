"""The output head: how a model computes logits from the decoder's hidden states.

The check of `logprob_parity` rejects a model whose head computes anything else. Critics and reward models have another
head, the value head: a linear layer with one output. It has the name that transformers gives to the heads of
classifiers, so that classifiers can be loaded, and exported models are classifiers.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import linear
from transformers import PreTrainedConfig, PreTrainedModel

from rljob_trainer.engines.train.logit_tiles import wide_product
from rljob_trainer.errors import ConfigurationError

FACTORS = ("logit_scale", "lm_head_multiplier", "output_multiplier")
"""Configuration fields by which logits are multiplied (Cohere, Falcon H1, Muse)."""
DIVISORS = ("logits_scaling", "logits_mup_width_multiplier")
"""Configuration fields by which logits are divided (Granite, Inkling)."""
FACTORS_OF_TYPE = {"hyperclovax": "logits_scaling"}
"""Model types that multiply logits by a field of DIVISORS, and this field."""
SOFT_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""Configuration fields with the soft cap of the logits (Gemma, RecurrentGemma, xLSTM)."""


@dataclass(frozen=True)
class HeadForm:
    """With x = multiplier * (output of the head module), the logits are x, or soft_cap * tanh(x / soft_cap)."""

    multiplier: float
    soft_cap: float | None


def output_head_of(language_model: nn.Module) -> tuple[nn.Linear, HeadForm]:
    """The module that multiplies hidden states with the head's weight, and how logits are computed from its output.

    Raises ConfigurationError for a model without such a module."""
    head = language_model.get_output_embeddings()  # type: ignore[operator]
    config: PreTrainedConfig = language_model.config
    if not isinstance(head, nn.Linear):
        raise ConfigurationError(
            f"spec.training.model.source: the output head of a '{config.model_type}' model is not a linear layer "
            f"({type(head).__name__}); choose another model"
        )
    return head, head_form(config)


HeadOutputs = tuple[Tensor | None, ...]


def computed_in_head(
    head: nn.Linear, hidden_ND: Tensor, compute: Callable[[Tensor, nn.Linear], HeadOutputs]
) -> HeadOutputs:
    """Returns `compute(hidden_ND, head)`, called as the forward pass of the head's module.

    FSDP2 gathers the weight of a head that is a unit of its own only in the module's forward pass. If gradients are
    needed, the weight stays gathered until the head's backward pass, which comes next."""
    if isinstance(head, FSDPModule):
        head.set_reshard_after_forward(not torch.is_grad_enabled(), recurse=False)
    vars(head)["forward"] = lambda inputs_ND: compute(inputs_ND, head)
    try:
        outputs: HeadOutputs = head(hidden_ND)
        return outputs
    finally:
        del vars(head)["forward"]


def float32_logits(head: nn.Linear, hidden: Tensor) -> Tensor:
    """The head's output in float32, also for 16-bit hidden states [..., D], without gradient. The HuggingFace engine
    uses this; the trainer has `logit_tiles`, vLLM has `head_dtype`."""
    if hidden.device.type != "cuda" or hidden.dtype.itemsize > 2:
        bias = None if head.bias is None else head.bias.float()
        return linear(hidden.float(), head.weight.float(), bias)
    logits = torch.empty(hidden.shape[:-1].numel(), len(head.weight), dtype=torch.float32, device=hidden.device)
    wide_product(hidden.flatten(0, -2), head.weight.T, logits)
    if head.bias is not None:
        logits += head.bias
    return logits.view(*hidden.shape[:-1], -1)


def head_form(config: PreTrainedConfig) -> HeadForm:
    """The form of the head of a model with this configuration."""
    text = config.get_text_config()
    fields = text.to_dict()
    factor_of_type = FACTORS_OF_TYPE.get(text.model_type)
    multiplier = 1.0
    for name in (*FACTORS, *DIVISORS):
        value = fields.get(name)
        if isinstance(value, int | float):
            multiplier *= value if name in FACTORS or name == factor_of_type else 1.0 / value
    soft_caps = [fields[name] for name in SOFT_CAPS if fields.get(name) is not None]
    return HeadForm(multiplier, min(soft_caps, default=None))


VALUE_HEAD = "score"
"""The name of the value head's module."""
VALUE_WEIGHT, VALUE_BIAS = f"{VALUE_HEAD}.weight", f"{VALUE_HEAD}.bias"


class Head(enum.Enum):
    """What a model's head computes at a token."""

    TOKENS = enum.auto()
    """The distribution of the next token."""
    VALUE = enum.auto()
    """One number, by a value head. If the model's files have none, its weight begins as zeros."""
    SCORE = enum.auto()
    """One number, by a value head that must be in the model's files."""


def without_tied_head(config: PreTrainedConfig) -> PreTrainedConfig:
    """Unties output head and embeddings in the configuration, because the output head will be replaced. Changes and
    returns the configuration."""
    for part in (config, config.get_text_config()):
        part.tie_word_embeddings = False
    return config


def put_value_head(language_model: PreTrainedModel, *, has_bias: bool) -> None:
    """Replaces the output head by a value head on the same device and in the same dtype. `has_bias`: whether the head
    in the model's files has a bias; the head of a token classifier has one, that of a sequence classifier has none.

    Raises ConfigurationError for a model whose output head is not a linear layer."""
    head, _ = output_head_of(language_model)
    [name] = [name for name, module in language_model.named_modules() if module is head]
    parent = language_model.get_submodule(name.rpartition(".")[0])
    setattr(parent, name.rpartition(".")[2], nn.Identity())
    weight = head.weight
    language_model.add_module(
        VALUE_HEAD, nn.Linear(weight.shape[1], 1, bias=has_bias, device=weight.device, dtype=weight.dtype)
    )
