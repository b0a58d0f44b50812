"""From a decoder's hidden states to logits: what a model's own forward does beside multiplying with the head's weight.

Whatever else it does is found by the comparison of `acceptance`.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedConfig

from rljob_trainer.errors import ConfigurationError

FACTORS = ("logit_scale", "lm_head_multiplier", "output_multiplier")
"""Fields of configurations by which logits are multiplied: Cohere, Falcon H1, Muse."""
DIVISORS = ("logits_scaling", "logits_mup_width_multiplier")
"""Fields by which they are divided: Granite, Inkling."""
FACTORS_OF_TYPE = {"hyperclovax": "logits_scaling"}
"""Model types that multiply by a field by which the others divide."""
SOFT_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""Gemma, RecurrentGemma, xLSTM."""


@dataclass(frozen=True)
class HeadForm:
    """With x = multiplier * (what the head module gives), the logits are x, or soft_cap * tanh(x / soft_cap)."""

    multiplier: float
    soft_cap: float | None


def output_head_of(language_model: nn.Module) -> tuple[nn.Linear, HeadForm]:
    """The module that multiplies hidden states with the head's weight, and what the configuration says comes after it.

    Raises ConfigurationError for a model without such a module."""
    head = language_model.get_output_embeddings()  # type: ignore[operator]
    config: PreTrainedConfig = language_model.config
    if not isinstance(head, nn.Linear):
        raise ConfigurationError(
            f"spec.training.model.source: the output head of a '{config.model_type}' model is no linear layer "
            f"({type(head).__name__}); choose another model"
        )
    return head, head_form(config)


def head_form(config: PreTrainedConfig) -> HeadForm:
    """The form of the head of a model with this configuration."""
    text = config.get_text_config()
    fields = text.to_dict()
    own_factor = FACTORS_OF_TYPE.get(text.model_type)
    multiplier = 1.0
    for name in (*FACTORS, *DIVISORS):
        value = fields.get(name)
        if isinstance(value, int | float):
            multiplier *= value if name in FACTORS or name == own_factor else 1.0 / value
    soft_caps = [fields[name] for name in SOFT_CAPS if fields.get(name) is not None]
    return HeadForm(multiplier, min(soft_caps, default=None))
