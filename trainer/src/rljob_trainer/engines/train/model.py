"""Builds a causal language model for FSDP2 without ever holding it whole: meta device, then each rank its shards."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.initialization import guard_torch_init_functions
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from rljob_trainer.engines.train.attention import choose_attention, register_flat_attention
from rljob_trainer.errors import ConfigurationError
from rljob_trainer.models.weight_conversion import Window, file_groups, whole_window

SINGLE_FILE = "model.safetensors"
RANDOM_IN_TRAINING = ("dropout", "pdrop", "dropout_prob", "layerdrop", "jitter_noise")
"""Ends of the names of settings by which a model is another one in training."""
INDEX_FILE = "model.safetensors.index.json"


def build_on_meta(folder: Path) -> nn.Module:
    """The architecture that `config.json` in `folder` describes, in float32, without memory for its weights.

    Its attention is that of `attention.choose_attention`.
    Raises ConfigurationError when the folder holds no causal language model."""
    config = without_dropout(read_config(folder))
    register_flat_attention()
    try:
        with torch.device("meta"):
            model: nn.Module = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, attn_implementation=choose_attention(config).implementation
            )
    except (OSError, ValueError) as error:
        raise _no_language_model(folder, error) from error
    return model


def read_config(folder: Path) -> PreTrainedConfig:
    """What `config.json` in `folder` says. Raises ConfigurationError when it describes no causal language model."""
    try:
        config = AutoConfig.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise _no_language_model(folder, error) from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise _no_language_model(folder, ValueError(f"transformers has none of type '{config.model_type}'"))
    return config


def _no_language_model(folder: Path, error: Exception) -> ConfigurationError:
    return ConfigurationError(
        f"spec.training.model.source: {folder} holds no causal language model that can be built ({error})"
    )


def without_dropout(config: PreTrainedConfig) -> PreTrainedConfig:
    """The configuration with every probability of dropout and every noise 0: log-probabilities of the policy must be
    those of the policy that sampled, in training mode too (which recomputation of activations needs)."""
    for part in (config, config.get_text_config()):
        for name, value in vars(part).items():
            if isinstance(value, float) and name.endswith(RANDOM_IN_TRAINING):
                setattr(part, name, 0.0)
    return config


def transformer_layers(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks, each of which becomes one unit of sharding and of recomputation."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) > 0]
    if not lists:
        raise ConfigurationError("spec.training.model.source: the model has no list of layers to shard")
    return list(max(lists, key=_num_parameters).children())


def _num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@torch.no_grad()
def materialize(model: nn.Module, device: torch.device) -> None:
    """Gives every shard that has none memory on `device` and fills the buffers that no file holds (rotary frequencies,
    scales).

    Those come from the architecture's own initialization, as in `from_pretrained`; the weights stay undefined.
    Raises ConfigurationError for a model with such a buffer that its architecture does not fill."""
    model._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)  # type: ignore[no-untyped-call]
    weights = [tensor for _, tensor in named_tensors(model)]
    for tensor in weights:
        # What carries this mark is left alone by transformers' initialization.
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
    """Modules that hold buffers which are in no file, with the innermost pretrained model that each belongs to."""
    owner = module if isinstance(module, PreTrainedModel) else owner
    if any(module._buffers.get(buffer) is not None for buffer in module._non_persistent_buffers_set):
        yield name, owner, module
    for child_name, child in module.named_children():
        yield from _modules_with_own_buffers(child, f"{name}.{child_name}" if name else child_name, owner)


def _fill_own_buffers(name: str, owner: PreTrainedModel | None, module: nn.Module) -> None:
    """Initializes twice, over zeros and over ones: what differs then was not written."""
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
                f"spec.training.model.source: {type(owner).__name__} does not say how buffer '{name}.{key}' is filled, "
                f"and no file holds it; choose another model"
            )


@torch.no_grad()
def load_weights(model: nn.Module, language_model: PreTrainedModel, folder: Path, name_prefix: str) -> None:
    """Copies weights from the safetensors files of `folder`; every rank reads only what its own shards are made of.

    Parameter names of the model are those of its `language_model` after `name_prefix`; names and forms in the files are
    transformers' own. Raises ConfigurationError for a missing tensor or one of another shape."""
    tensors = {name.removeprefix(name_prefix): tensor for name, tensor in named_tensors(model)}
    windows = {name: _window(tensor) for name, tensor in tensors.items()}
    files = _tensor_files(folder)
    missing = dict.fromkeys(tensors)
    with ExitStack() as stack:
        readers = {file: stack.enter_context(safe_open(folder / file, framework="pt")) for file in set(files.values())}

        def read(name: str, window: Window | None) -> torch.Tensor:
            piece = readers[files[name]].get_slice(name)
            return piece[window or ...]  # type: ignore[no-any-return]

        for group in file_groups(language_model, files, tensors):
            for name in group.targets:
                missing.pop(name)
            [first, *_] = group.targets
            expected = tuple(tensors[first].shape)
            found = tuple(readers[files[group.names[0]]].get_slice(group.names[0]).get_shape())
            if group.converter is None and found != expected:
                raise _wrong_shape(folder, group.names[0], found, f"the model expects {list(expected)}")
            if group.stacks_along_rows and group.num_rows != expected[0]:
                raise _wrong_shape(folder, group.names[0], found, f"and there are {group.num_rows} of {expected[0]}")
            try:
                loaded = group.load(language_model, read, windows)
            except (RuntimeError, ValueError) as error:
                raise _wrong_shape(folder, group.names[0], found, f"it makes no '{first}' ({error})") from error
            for name, value in loaded.items():
                tensor = tensors[name]
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                if value.shape != local.shape:
                    wanted = f"'{name}' made of it has {list(value.shape)}, the model expects {list(local.shape)}"
                    raise _wrong_shape(folder, group.names[0], found, wanted)
                local.copy_(value)
    if missing:
        raise ConfigurationError(f"spec.training.model.source: {folder} has no tensor '{next(iter(missing))}'")


def _wrong_shape(folder: Path, name: str, shape: tuple[int, ...], text: str) -> ConfigurationError:
    return ConfigurationError(
        f"spec.training.model.source: tensor '{name}' in {folder} has shape {list(shape)}, {text}"
    )


def _window(tensor: torch.Tensor) -> Window:
    if not isinstance(tensor, DTensor):
        return whole_window(tensor.shape)
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))


def named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and persistent buffers; tied parameters once, under their first name."""
    yield from model.named_parameters()
    for name, buffer in model.named_buffers():
        parent = model.get_submodule(name.rpartition(".")[0])
        if name.rpartition(".")[2] not in parent._non_persistent_buffers_set:
            yield name, buffer


def _tensor_files(folder: Path) -> dict[str, str]:
    """Tensor name -> file name."""
    index = folder / INDEX_FILE
    if index.exists():
        weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
        return weight_map
    if not (folder / SINGLE_FILE).exists():
        raise ConfigurationError(f"spec.training.model.source: no {SINGLE_FILE} and no {INDEX_FILE} in {folder}")
    with safe_open(folder / SINGLE_FILE, framework="pt") as reader:
        return dict.fromkeys(reader.keys(), SINGLE_FILE)
