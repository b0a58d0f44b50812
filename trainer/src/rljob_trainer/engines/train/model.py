"""Builds a causal language model for FSDP2 on the meta device; then each rank allocates only its shards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.initialization import guard_torch_init_functions
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from rljob_trainer.engines.train.attention import choose_attention, register_flat_attention
from rljob_trainer.engines.train.output_head import Head, put_value_head, without_tied_head
from rljob_trainer.errors import ConfigurationError
from rljob_trainer.models.model_files import reading_model
from rljob_trainer.models.weight_conversion import Window, whole_window

RANDOM_IN_TRAINING = ("dropout", "pdrop", "dropout_prob", "layerdrop", "jitter_noise")
"""Endings of the names of configuration fields that make a model random in training mode."""


def build_on_meta(folder: Path, head: Head = Head.TOKENS, *, has_value_bias: bool = False) -> PreTrainedModel:
    """A model with the architecture that `config.json` in `folder` describes, in float32, without memory for its
    weights.

    Its attention is chosen by `attention.choose_attention`. Except for `Head.TOKENS`, a value head replaces the output
    head, with a bias if `has_value_bias`. Raises ConfigurationError if the folder has no causal language model."""
    config = without_dropout(read_config(folder))
    if head is not Head.TOKENS:
        without_tied_head(config)
    register_flat_attention()
    with _reading_language_model(folder), torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation=choose_attention(config).implementation
        )
    if head is not Head.TOKENS:
        put_value_head(model, has_bias=has_value_bias)
    return model


class ModelSize(NamedTuple):
    """What decides whether a model recomputes activations."""

    num_parameters: int
    can_recompute: bool
    """Whether its type can."""


def model_size(folder: Path) -> ModelSize:
    """Describes the language model in `folder`. Raises the errors of `build_on_meta`."""
    model = build_on_meta(folder)
    return ModelSize(_num_parameters(model), model.supports_gradient_checkpointing)


def read_config(folder: Path) -> PreTrainedConfig:
    """Reads `config.json` in `folder`. Raises ConfigurationError if it does not describe a causal language model, or if
    the weights are quantized."""
    with _reading_language_model(folder):
        config = AutoConfig.from_pretrained(folder)
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise ValueError(f"transformers has none of type '{config.model_type}'")
        config.get_text_config().to_dict()  # Fails if `text_config` is not an object.
    quantization = config.to_dict().get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else quantization
        raise ConfigurationError(
            f"spec.training.model.source: the weights in {folder} are quantized (quantization_config of config.json: "
            f"{method}) and cannot be trained; choose the model in 16 or 32 bits"
        )
    return config


def attention_cost(config: PreTrainedConfig) -> float:
    """Operations of attention per squared token of a row's length, divided by the operations of matrix products per
    token. 2e-5 for Qwen3-8B: in rows of 16,384 tokens, attention is a quarter of the operations. An estimate for
    models with other kinds of layers; 0 if the configuration does not have the sizes."""
    text = config.get_text_config()
    fields = text.to_dict()

    def size(name: str) -> int:
        value = fields.get(text.attribute_map.get(name, name))
        if isinstance(value, list) and value:
            value = value[0]
        return value if isinstance(value, int) else 0

    num_layers, width, num_heads = size("num_hidden_layers"), size("hidden_size"), size("num_attention_heads")
    if not (num_layers and width and num_heads):
        return 0.0
    query = num_heads * (size("head_dim") or width // num_heads)
    keys = query * (size("num_key_value_heads") or num_heads) // num_heads
    inner = size("intermediate_size") or 4 * width
    if experts := size("num_experts_per_tok"):
        inner = experts * (size("moe_intermediate_size") or inner)
    of_layers = num_layers * width * (2 * query + 2 * keys + 3 * inner)
    # A causal token attends to half of its row on average: 4 x query / 2 operations, and 2 for each weight.
    return num_layers * query / (of_layers + width * size("vocab_size"))


def _reading_language_model(folder: Path) -> AbstractContextManager[None]:
    what = f"{folder} holds no causal language model that can be built"
    return reading_model(folder, what, "check its config.json, or choose another model")


def without_dropout(config: PreTrainedConfig) -> PreTrainedConfig:
    """Sets every dropout probability and noise of the configuration to 0, so that the model computes the same
    probabilities in training mode (which gradient checkpointing needs) as in generation."""
    for part in (config, config.get_text_config()):
        for name, value in vars(part).items():
            if isinstance(value, float) and name.endswith(RANDOM_IN_TRAINING):
                setattr(part, name, 0.0)
    return config


def transformer_layers(model: nn.Module) -> list[nn.Module]:
    """The decoder's layers: the list of modules with the most parameters. Each layer becomes one unit of sharding and
    of gradient checkpointing. Raises ConfigurationError if the model has no list of modules."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) > 0]
    if not lists:
        raise ConfigurationError(
            "spec.training.model.source: the model has no list of layers to shard; choose another model"
        )
    return list(max(lists, key=_num_parameters).children())


def _num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@torch.no_grad()
def materialize(model: nn.Module, device: torch.device) -> None:
    """Allocates on `device` the shards that are on the meta device, and fills buffers that are not in files (rotary
    frequencies, scales).

    The buffers are filled by the architecture's own initialization, as in `from_pretrained`; weights stay undefined.
    Raises ConfigurationError if the architecture does not initialize one of these buffers."""
    model._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)  # type: ignore[no-untyped-call]
    weights = [tensor for _, tensor in named_tensors(model)]
    for tensor in weights:
        # transformers' initialization skips tensors with this mark.
        tensor._is_hf_initialized = True  # type: ignore[attr-defined]
    try:
        for name, owner, module in _modules_with_own_buffers(model, "", None):
            _fill_own_buffers(name, owner, module)
    finally:
        for tensor in weights:
            del tensor._is_hf_initialized  # type: ignore[attr-defined]


def _modules_with_own_buffers(
    module: nn.Module, name: str, owner: PreTrainedModel | None
) -> Iterator[tuple[str, PreTrainedModel | None, nn.Module]]:
    """The modules with buffers that are not in files: for each its name, the innermost PreTrainedModel that contains
    it, and the module."""
    owner = module if isinstance(module, PreTrainedModel) else owner
    if any(module._buffers.get(buffer) is not None for buffer in module._non_persistent_buffers_set):
        yield name, owner, module
    for child_name, child in module.named_children():
        yield from _modules_with_own_buffers(child, f"{name}.{child_name}" if name else child_name, owner)


def _fill_own_buffers(name: str, owner: PreTrainedModel | None, module: nn.Module) -> None:
    """Initializes a module's buffers twice, starting from zeros and from ones. If an element differs between the two
    results, the initialization has not set it: raises ConfigurationError."""
    buffers = {key: module._buffers[key] for key in module._non_persistent_buffers_set}
    results: list[dict[str, torch.Tensor]] = []
    for value in (0, 1):
        for buffer in buffers.values():
            if buffer is not None:
                buffer.fill_(value)
        if owner is not None:
            with guard_torch_init_functions():
                owner._init_weights(module)
        results.append({key: buffer.clone() for key, buffer in buffers.items() if buffer is not None})
    for key, buffer in results[0].items():
        if not torch.equal(buffer, results[1][key]):
            raise ConfigurationError(
                f"spec.training.model.source: {type(owner).__name__} does not initialize buffer '{name}.{key}', which "
                f"is not in the model's files; choose another model"
            )


def named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and persistent buffers by name; tied parameters once, under their first name."""
    yield from model.named_parameters()
    for name, buffer in model.named_buffers():
        parent = model.get_submodule(name.rpartition(".")[0])
        if name.rpartition(".")[2] not in parent._non_persistent_buffers_set:
            yield name, buffer


def window_of(tensor: torch.Tensor) -> Window:
    """The part of a whole tensor that this rank holds."""
    if not isinstance(tensor, DTensor):
        return whole_window(tensor.shape)
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))


def check_bfloat16(device: torch.device) -> None:
    """Raises ConfigurationError for a GPU that does not support bfloat16, or only emulates it."""
    with torch.cuda.device(device):
        if not torch.cuda.is_bf16_supported(including_emulation=False):
            raise ConfigurationError(
                f"spec.training.model.dtype: {torch.cuda.get_device_name(device)} lacks bfloat16; set Float32"
            )
