"""Exporting a model that was trained with adapters: the merged model, and the adapters beside it.

A checkpoint holds the adapters alone; the weights that they are added to come from the files of the model that training
began from.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel

from rljob_api.v1alpha1.model import Lora, Model
from rljob_trainer.checkpoints.errors import CheckpointError
from rljob_trainer.checkpoints.export import Told, tell_nobody, write_huggingface
from rljob_trainer.checkpoints.layout import TensorEntry
from rljob_trainer.checkpoints.load import CheckpointReader
from rljob_trainer.checkpoints.storage import sync_folder
from rljob_trainer.checkpoints.tensor_file import DTYPE_NAMES
from rljob_trainer.engines.train.lora import AdapterPair, AdapterSettings, adapter_pairs, merged_weight
from rljob_trainer.engines.train.model import build_on_meta, named_tensors
from rljob_trainer.engines.train.weight_loading import WeightFiles
from rljob_trainer.models.adapter_files import SUFFIX, write_adapter
from rljob_trainer.models.weight_conversion import FileGroup, expert_endings, file_groups, whole_window

log = logging.getLogger(__name__)

ADAPTER_FOLDER = "adapter"
"""In an export."""


def write_merged_huggingface(
    folder: Path,
    source: Path,
    adapters: CheckpointReader,
    prefix: str,
    settings: AdapterSettings,
    base_model: Model,
    dtype: torch.dtype,
    told: Told = tell_nobody,
) -> None:
    """As `write_huggingface`: the model in `source` with the adapters added, which are the checkpoint's tensors whose
    names begin with `prefix`. They are also written to ADAPTER_FOLDER of it, in 32 bits; `base_model` is what the
    files there say that they belong to."""

    def write_adapters(export: Path) -> None:
        names = [name for name in adapters.names if name.startswith(prefix)]
        tensors = {name.removeprefix(prefix): adapters.read(name) for name in names}
        if endings := mistaken_for_experts(weights.model, tensors):
            log.warning(
                "export: without %s/: peft would put the adapters of %s beside the experts of the model",
                ADAPTER_FOLDER,
                ", ".join(endings),
            )
            return
        _write_durably(export / ADAPTER_FOLDER, tensors, settings.lora, base_model)

    with WeightFiles(source) as files:
        weights = MergedWeights(files, adapters, prefix, settings.scaling)
        write_huggingface(folder, source, weights, "", dtype, write_more=write_adapters, told=told)


class MergedWeights:
    """The tensors of a model in memory, made of its files and a checkpoint's adapters when they are read. Names have no
    prefix."""

    def __init__(self, files: WeightFiles, adapters: CheckpointReader, prefix: str, scaling: float) -> None:
        self.folder = files.folder
        self._files = files
        self._adapters = adapters
        self._prefix = prefix
        self._scaling = scaling
        self.model = build_on_meta(files.folder)
        self._tensors = dict(named_tensors(self.model))
        self._groups: dict[str, FileGroup] = {
            target: group for group in file_groups(self.model, files.names, self._tensors) for target in group.targets
        }
        named = ((name.removeprefix(prefix), self._meta(name)) for name in adapters.names if name.startswith(prefix))
        self._pairs = adapter_pairs(named)

    @property
    def names(self) -> tuple[str, ...]:
        """Of all tensors that the files have."""
        return tuple(name for name in self._tensors if name in self._groups)

    def entry(self, name: str) -> TensorEntry:
        """Shape and dtype; in 32 bits where something is added."""
        tensor = self._tensors[name]
        dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
        return TensorEntry(name=name, dtype=DTYPE_NAMES[dtype], global_shape=tuple(tensor.shape), pieces=())

    def read(self, name: str) -> torch.Tensor:
        """Whole. Raises CheckpointError where the files cannot be read."""
        group = self._groups[name]
        windows = {target: whole_window(self._tensors[target].shape) for target in group.targets}
        try:
            weight = group.load(self.model, self._files.read, windows)[name]
        except (OSError, SafetensorError, RuntimeError, ValueError) as error:
            raise CheckpointError(
                f"{self.folder}: tensor {name} cannot be read ({error}); the export needs the weights that training "
                "began from"
            ) from error
        pair = self._pairs.get(name)
        return weight if pair is None else self._merged(weight, pair)

    def _merged(self, weight: torch.Tensor, pair: AdapterPair) -> torch.Tensor:
        first, second = (self._adapters.read(self._prefix + each) for each in (pair.first_name, pair.second_name))
        return merged_weight(weight.float(), first, second, self._scaling)

    def _meta(self, name: str) -> torch.Tensor:
        return torch.empty(self._adapters.entry(name).global_shape, device="meta")


def mistaken_for_experts(model: PreTrainedModel, names: Iterable[str]) -> list[str]:
    """The last names of layers with adapters that are also those of experts in the model's files. `names` are those of
    peft's files. peft (0.21.2) takes them for the experts when it loads, whatever layer they are of."""
    of_experts = expert_endings(model)
    layers = {name.removesuffix(SUFFIX).rpartition(".")[2] for name in names if name.endswith(SUFFIX)}
    return sorted(layers & of_experts)


def _write_durably(folder: Path, tensors: dict[str, torch.Tensor], lora: Lora, base_model: Model) -> None:
    folder.mkdir()
    write_adapter(folder, tensors, lora, base_model)
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    sync_folder(folder)
