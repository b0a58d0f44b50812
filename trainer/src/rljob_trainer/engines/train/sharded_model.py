"""The module that a train engine runs: a language model on the meta device, cut up by FSDP2 (`fully_shard`)."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from rljob_trainer.engines.train.attention import choose_attention
from rljob_trainer.engines.train.layout import ParallelLayout, check_layout
from rljob_trainer.engines.train.lora import add_adapters, is_adapter
from rljob_trainer.engines.train.model import build_on_meta, transformer_layers
from rljob_trainer.engines.train.recomputation import recompute_activations
from rljob_trainer.engines.train.router import asked_auxiliary_loss
from rljob_trainer.engines.train.settings import TrainEngineSettings
from rljob_trainer.engines.train.token_model import TokenModel
from rljob_trainer.engines.train.value_head import VALUE_BIAS, Head
from rljob_trainer.engines.train.weight_loading import WeightFiles


def sharded_model(
    settings: TrainEngineSettings, layout: ParallelLayout, mesh: DeviceMesh, compute_dtype: torch.dtype
) -> TokenModel:
    """Without memory for its weights; its passes run in `compute_dtype`. Raises ConfigurationError."""
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
        recompute_activations(language_model, settings.gradient_checkpointing_every_nth_layer)
    attention = choose_attention(language_model.config)
    router = None if settings.optimizer is None else asked_auxiliary_loss(language_model)
    model = TokenModel(language_model, attention, router)
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    for layer in transformer_layers(model):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model
