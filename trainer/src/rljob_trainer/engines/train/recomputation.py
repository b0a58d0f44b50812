"""Activations that are computed again in the backward pass instead of being kept (gradient checkpointing), by
transformers' own means, a layer at a time."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from rljob_trainer.engines.train.model import transformer_layers
from rljob_trainer.errors import ConfigurationError


def recompute_activations(language_model: nn.Module, every_nth_layer: int) -> None:
    """From now on, in training, layers 0, n, 2n, ... keep what they are given, and nothing of what they compute.

    Raises ConfigurationError for a model whose layers cannot, and for one that has fewer than n of them."""
    assert isinstance(language_model, PreTrainedModel)
    kind = language_model.config.model_type
    try:
        language_model.gradient_checkpointing_enable({"use_reentrant": False})
    except ValueError as error:
        raise ConfigurationError(
            f"spec.training.model.gradientCheckpointing: a '{kind}' model cannot compute its activations again "
            f"({error}); write false, and lower maxTokensPerMicroBatch where memory is short"
        ) from error
    if every_nth_layer == 1:
        return
    layers = transformer_layers(language_model)
    check_interval(every_nth_layer, len(layers))
    for number, layer in enumerate(layers):
        if not isinstance(layer, GradientCheckpointingLayer):
            raise ConfigurationError(
                f"spec.training.model.gradientCheckpointingEveryNthLayer: layers of a '{kind}' model compute their "
                f"activations again all or none (seen: {every_nth_layer}); write 1"
            )
        layer.gradient_checkpointing = number % every_nth_layer == 0


def check_interval(every_nth_layer: int, num_layers: int) -> None:
    """Raises ConfigurationError where only the first layer would ever be one of them."""
    if every_nth_layer > num_layers:
        raise ConfigurationError(
            f"spec.training.model.gradientCheckpointingEveryNthLayer: the model has {num_layers} layers (seen: "
            f"{every_nth_layer}); write a number up to that, or gradientCheckpointing: false"
        )
