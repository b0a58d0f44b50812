"""Loads a model's shards from safetensors files; every rank reads only the parts that its shards need."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from rljob_trainer.engines.train.lora import base_tensors
from rljob_trainer.engines.train.model import named_tensors, window_of
from rljob_trainer.engines.train.output_head import VALUE_WEIGHT, Head
from rljob_trainer.errors import ConfigurationError, storage_checked
from rljob_trainer.models.model_files import INDEX_FILE, SINGLE_FILE, WHERE, read_json_object
from rljob_trainer.models.weight_conversion import FileGroup, Window, file_groups
from rljob_trainer.observability.activity import ACTIVITY

log = logging.getLogger(__name__)

FLOATS = frozenset({"F16", "BF16", "F32", "F64"})
"""The dtypes of safetensors for weights that are not quantized."""
NUM_COMPARED_ELEMENTS = 16 * 1024 * 1024
"""How many elements of two tensors are compared at a time."""
OUTPUT_HEAD_WEIGHT, OUTPUT_HEAD_BIAS = "lm_head.weight", "lm_head.bias"
"""The names in files of the tensors that a value head replaces."""


class _Slice(Protocol):
    """A tensor of a safetensors file that is not read yet."""

    def get_shape(self) -> list[int]: ...

    def get_dtype(self) -> str: ...

    def __getitem__(self, window: object) -> torch.Tensor: ...


@torch.no_grad()
def load_weights(
    model: nn.Module, language_model: PreTrainedModel, folder: Path, name_prefix: str, head: Head = Head.TOKENS
) -> None:
    """Copies the weights in the safetensors files of `folder` into this rank's shards of `model`.

    `name_prefix`: what the parameter names of `model` have before the names in its `language_model`. Adapters are not
    changed. With Head.VALUE, a value head that is in no file is initialized with zeros. Raises ConfigurationError for a
    missing tensor, another shape or dtype than the model's, tied tensors that differ, and files that cannot be read;
    ResourceError if the disk fails."""
    tensors = {name.removeprefix(name_prefix): tensor for name, tensor in base_tensors(named_tensors(model))}
    second_names = _second_names(model, name_prefix)
    try:
        with storage_checked(f"{WHERE}: {folder}"), WeightFiles(folder) as files:
            groups = file_groups(language_model, files.names, tensors)
            found = {name for group in groups for name in group.targets}
            if head is Head.VALUE and VALUE_WEIGHT not in found:
                log.info("%s has no value head; it is initialized with zeros", folder)
                tensors.pop(VALUE_WEIGHT).zero_()
            if head is Head.SCORE and VALUE_WEIGHT not in found:
                raise ConfigurationError(
                    f"{WHERE}: {folder} has no tensor '{VALUE_WEIGHT}', the head that computes scores; choose a model "
                    "that was trained as a sequence classifier with one label"
                )
            missing = next((name for name in tensors if name not in found), None)
            if missing is not None:
                raise ConfigurationError(
                    f"{WHERE}: {folder} has no tensor '{missing}'; download the model again, or choose another model"
                )
            _reject_untied(files, second_names)
            windows = {name: window_of(tensor) for name, tensor in tensors.items()}
            for number, group in enumerate(groups, 1):
                ACTIVITY.report_activity("groups of weights", number, len(groups))
                _load_group(group, files, language_model, tensors, windows)
    except (OSError, SafetensorError) as error:
        raise ConfigurationError(
            f"{WHERE}: the weights in {folder} cannot be read ({error}); if files are missing or damaged, download "
            "the model again"
        ) from error
    used = {name for group in groups for name in group.names}
    unused = sorted(files.names.keys() - used - second_names.keys())
    if head is not Head.TOKENS:
        unused = [name for name in unused if name not in (OUTPUT_HEAD_WEIGHT, OUTPUT_HEAD_BIAS)]
    if unused:
        log.warning(
            "%s has %d tensors that a '%s' model does not have, such as %s; they are ignored",
            folder,
            len(unused),
            language_model.config.model_type,
            unused[0],
        )


class WeightFiles:
    """The safetensors files of a model's folder. Within a `with` block they are open, and tensors can be read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names = _tensor_files(folder)
        """Tensor name -> file name."""
        self._stack = ExitStack()

    def __enter__(self) -> WeightFiles:
        with ExitStack() as opening:
            self._readers = {
                file: opening.enter_context(safe_open(self.folder / file, framework="pt"))
                for file in sorted(set(self.names.values()))
            }
            self._stack = opening.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def slice(self, name: str) -> _Slice:
        """A tensor that is not read yet."""
        tensor: _Slice = self._readers[self.names[name]].get_slice(name)
        return tensor

    def read(self, name: str, window: Window | None) -> torch.Tensor:
        """Reads a window of a tensor; None: all of it."""
        return self.slice(name)[window or ...]


def _load_group(
    group: FileGroup,
    files: WeightFiles,
    language_model: PreTrainedModel,
    tensors: Mapping[str, torch.Tensor],
    windows: Mapping[str, Window],
) -> None:
    """Loads one group of tensors into this rank's shards, and checks dtypes and shapes."""
    [first, *_], [name, *_] = group.targets, group.names
    expected, found = list(tensors[first].shape), files.slice(name).get_shape()
    shown = f"{WHERE}: tensor '{name}' in {files.folder} has shape {found}"
    for each in group.names if tensors[first].is_floating_point() else ():
        dtype = files.slice(each).get_dtype()
        if dtype not in FLOATS:
            raise ConfigurationError(
                f"{WHERE}: tensor '{each}' in {files.folder} has dtype {dtype}: it is quantized or not a weight; "
                "choose the model in 16 or 32 bits"
            )
    if group.converter is None and found != expected:
        raise ConfigurationError(f"{shown}, but the model expects {expected}")
    if group.stacks_along_rows and group.num_rows != expected[0]:
        raise ConfigurationError(f"{shown}; the model needs {expected[0]} such tensors (seen: {group.num_rows})")
    try:
        loaded = group.load(language_model, files.read, windows)
    except (RuntimeError, ValueError) as error:
        raise ConfigurationError(f"{shown} and cannot be converted to '{first}' ({error})") from error
    for target, value in loaded.items():
        tensor = tensors[target]
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if value.shape != local.shape:
            raise ConfigurationError(
                f"{shown}; converted to '{target}' it would have the shape {list(value.shape)} instead of "
                f"{list(local.shape)}"
            )
        local.copy_(value)


def _second_names(model: nn.Module, name_prefix: str) -> dict[str, str]:
    """For each tied parameter: its other names in the language model -> its first name."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    names = ((name, first[id(each)]) for name, each in model.named_parameters(remove_duplicate=False))
    return {name.removeprefix(name_prefix): other.removeprefix(name_prefix) for name, other in names if name != other}


def _reject_untied(files: WeightFiles, second_names: Mapping[str, str]) -> None:
    """Raises ConfigurationError if tied tensors differ in the files (`from_pretrained` unties them with a warning)."""
    for name, first in second_names.items():
        if {name, first} <= files.names.keys() and not _are_equal(files.slice(name), files.slice(first)):
            raise ConfigurationError(
                f"{WHERE}: config.json in {files.folder} ties '{name}' to '{first}', but the files have two different "
                f"tensors; set tie_word_embeddings: false there, or remove '{name}' from the files"
            )


def _are_equal(one: _Slice, other: _Slice) -> bool:
    """Whether two tensors are equal. Compares a few rows at a time, because these are the largest tensors of a
    model."""
    shape = one.get_shape()
    if shape != other.get_shape():
        return False
    rows = max(1, NUM_COMPARED_ELEMENTS // math.prod(shape[1:]))
    return all(
        torch.equal(one[start : start + rows], other[start : start + rows]) for start in range(0, shape[0], rows)
    )


def _tensor_files(folder: Path) -> dict[str, str]:
    """The names of all tensors of a model's folder: tensor name -> file name. Raises ConfigurationError if the folder
    has no weights, or its index cannot be read."""
    # As in `from_pretrained`, the single file has precedence over the index.
    if (folder / SINGLE_FILE).exists():
        with safe_open(folder / SINGLE_FILE, framework="pt") as reader:
            return dict.fromkeys(reader.keys(), SINGLE_FILE)
    index = folder / INDEX_FILE
    if not index.exists():
        raise ConfigurationError(
            f"{WHERE}: no {SINGLE_FILE} and no {INDEX_FILE} in {folder}; choose a folder with "
            "a model's safetensors files"
        )
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise ConfigurationError(
            f"{WHERE}: {index} has no weight_map that can be read (seen: {weight_map!r:.80}); download it again"
        )
    return weight_map
