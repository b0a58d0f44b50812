"""Builds the module that a training engine runs: a language model on the meta device, sharded by FSDP2 (`fully_shard`).

Each decoder layer is a unit of FSDP2: its parameters are gathered and its gradients are summed over ranks together. So
are embedding and output head, each alone, unless they share their weight. The rest (the last norm, a shared weight, a
value head) is the root, which stays gathered from the beginning of a pass to its end.

With gradient checkpointing, as implemented in transformers, every layer (or every nth layer) recomputes its activations
in the backward pass instead of keeping them.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from rljob_trainer.engines.train.attention import choose_attention
from rljob_trainer.engines.train.layout import ParallelLayout, check_layout
from rljob_trainer.engines.train.lora import add_adapters, is_adapter
from rljob_trainer.engines.train.model import build_on_meta, transformer_layers
from rljob_trainer.engines.train.output_head import VALUE_BIAS, Head
from rljob_trainer.engines.train.router import auxiliary_loss_settings
from rljob_trainer.engines.train.settings import TrainEngineSettings
from rljob_trainer.engines.train.token_model import TokenModel
from rljob_trainer.engines.train.weight_loading import WeightFiles
from rljob_trainer.errors import ConfigurationError


def sharded_model(
    settings: TrainEngineSettings, layout: ParallelLayout, mesh: DeviceMesh, compute_dtype: torch.dtype
) -> TokenModel:
    """The sharded model, without memory for its weights. Its passes run in `compute_dtype`. Raises ConfigurationError
    for a model that cannot be built or sharded like this."""
    has_value_bias = settings.head is not Head.TOKENS and VALUE_BIAS in WeightFiles(settings.model_folder).names
    language_model = build_on_meta(settings.model_folder, settings.head, has_value_bias=has_value_bias)
    check_layout(layout, language_model.config)
    if settings.adapters is not None:
        add_adapters(language_model, settings.adapters.lora)
    if settings.optimizer is None or settings.adapters is not None:
        for name, parameter in language_model.named_parameters():
            if not is_adapter(name):
                parameter.data = parameter.data.to(settings.compute_dtype)
    if settings.gradient_checkpointing:
        field = settings.offload_field.replace("offload", "gradientCheckpointing")
        recompute_activations(language_model, settings.gradient_checkpointing_every_nth_layer, field)
    attention = choose_attention(language_model.config)
    router = None if settings.optimizer is None else auxiliary_loss_settings(language_model)
    model = TokenModel(language_model, attention, router, has_float32_head=settings.has_float32_head)
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    for unit in (*transformer_layers(model), *embedding_and_head(language_model)):
        fully_shard(unit, mesh=mesh, mp_policy=policy)
        if isinstance(unit, nn.Embedding):
            # The backward pass of an embedding does not read its weight.
            unit.set_unshard_in_backward(False)  # type: ignore[operator]
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def embedding_and_head(language_model: PreTrainedModel) -> list[nn.Module]:
    """Those of the token embedding and the output head that can be units of FSDP2: modules with weights of their own. A
    shared weight cannot be in two units."""
    modules = [language_model.get_input_embeddings(), language_model.get_output_embeddings()]
    found = [each for each in modules if isinstance(each, nn.Embedding | nn.Linear)]
    owners = Counter(id(tensor) for module in language_model.modules() for tensor in module._parameters.values())
    return [each for each in found if all(owners[id(tensor)] == 1 for tensor in each.parameters())]


def recompute_activations(
    language_model: nn.Module, every_nth_layer: int, field: str = "spec.training.model.gradientCheckpointing"
) -> None:
    """Turns on gradient checkpointing for layers 0, n, 2n, ... with n = `every_nth_layer`: in training these layers
    keep only their inputs. `field`: the field of the job that asks for it.

    Raises ConfigurationError if the model does not support this, or has fewer than n layers."""
    assert isinstance(language_model, PreTrainedModel)
    kind = language_model.config.model_type
    try:
        language_model.gradient_checkpointing_enable({"use_reentrant": False})
    except ValueError as error:
        raise ConfigurationError(
            f"{field}: a '{kind}' model does not support recomputing activations ({error}); set Never (without "
            "gradientCheckpointingEveryNthLayer), and reduce maxTokensPerMicroBatch if memory is too small"
        ) from error
    if every_nth_layer == 1:
        return
    layers = transformer_layers(language_model)
    check_interval(every_nth_layer, len(layers))
    for number, layer in enumerate(layers):
        if not isinstance(layer, GradientCheckpointingLayer):
            raise ConfigurationError(
                f"spec.training.model.gradientCheckpointingEveryNthLayer: a '{kind}' model recomputes the activations "
                f"of all layers or of none (seen: {every_nth_layer}); set 1"
            )
        layer.gradient_checkpointing = number % every_nth_layer == 0


def check_interval(every_nth_layer: int, num_layers: int) -> None:
    """Raises ConfigurationError if the interval is larger than the number of layers."""
    if every_nth_layer > num_layers:
        raise ConfigurationError(
            f"spec.training.model.gradientCheckpointingEveryNthLayer: the model has {num_layers} layers (seen: "
            f"{every_nth_layer}); set at most {num_layers}, or remove it"
        )
