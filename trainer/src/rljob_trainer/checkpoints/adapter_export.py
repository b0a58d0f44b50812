"""Exports a model that was trained with adapters: the merged model, and the adapters in a subfolder.

A checkpoint contains only the adapters. The base weights come from the files of the model that training started from.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel

from rljob_api.v1alpha1.model import Lora, Model
from rljob_trainer.checkpoints.errors import CheckpointError
from rljob_trainer.checkpoints.export import OnProgress, ignore_progress, write_huggingface
from rljob_trainer.checkpoints.layout import TensorEntry
from rljob_trainer.checkpoints.load import CheckpointReader
from rljob_trainer.checkpoints.local_storage import sync_folder
from rljob_trainer.checkpoints.storage import Location, write_file
from rljob_trainer.checkpoints.tensor_file import DTYPE_NAMES
from rljob_trainer.engines.train.lora import AdapterPair, AdapterSettings, adapter_pairs, merged_weight
from rljob_trainer.engines.train.model import build_on_meta, named_tensors
from rljob_trainer.engines.train.weight_loading import WeightFiles
from rljob_trainer.models.adapter_files import LORA_A_SUFFIX, write_adapter
from rljob_trainer.models.weight_conversion import FileGroup, expert_endings, file_groups, whole_window

log = logging.getLogger(__name__)

ADAPTER_FOLDER = "adapter"
"""Name of the subfolder of an export."""


def write_merged_huggingface(
    folder: Location,
    source: Path,
    adapters: CheckpointReader,
    prefix: str,
    settings: AdapterSettings,
    base_model: Model,
    dtype: torch.dtype,
    on_progress: OnProgress = ignore_progress,
) -> None:
    """Like `write_huggingface`, for the model in `source` merged with adapters: the checkpoint's tensors whose names
    begin with `prefix`. The adapters are also written to ADAPTER_FOLDER, in float32, with `base_model` as their base
    model; except if peft would apply them to the wrong layers (`names_shared_with_experts`)."""

    def write_adapters(export: Location) -> None:
        names = [name for name in adapters.names if name.startswith(prefix)]
        tensors = {name.removeprefix(prefix): adapters.read(name) for name in names}
        if endings := names_shared_with_experts(weights.model, tensors):
            log.warning(
                "export: %s/ is not written, because peft would apply the adapters of %s to the experts of the model",
                ADAPTER_FOLDER,
                ", ".join(endings),
            )
            return
        _write_adapter(export / ADAPTER_FOLDER, tensors, settings.lora, base_model)

    with WeightFiles(source) as files:
        weights = MergedWeights(files, adapters, prefix, settings.scaling)
        write_huggingface(folder, source, weights, "", dtype, write_more=write_adapters, on_progress=on_progress)


class MergedWeights:
    """The tensors of a merged model. A tensor is computed from the model's files and a checkpoint's adapters when
    `read` is called. Names have no prefix."""

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
        """Names of all tensors that the files have."""
        return tuple(name for name in self._tensors if name in self._groups)

    def entry(self, name: str) -> TensorEntry:
        """Returns shape and dtype; floating-point tensors are float32."""
        tensor = self._tensors[name]
        dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
        return TensorEntry(name=name, dtype=DTYPE_NAMES[dtype], global_shape=tuple(tensor.shape), pieces=())

    def read(self, name: str) -> torch.Tensor:
        """Returns the whole tensor. Raises CheckpointError if the files cannot be read."""
        group = self._groups[name]
        windows = {target: whole_window(self._tensors[target].shape) for target in group.targets}
        try:
            weight = group.load(self.model, self._files.read, windows)[name]
        except (OSError, SafetensorError, RuntimeError, ValueError) as error:
            raise CheckpointError(
                f"{self.folder}: tensor {name} cannot be read ({error}); the export needs the base weights that "
                "training started from"
            ) from error
        pair = self._pairs.get(name)
        return weight if pair is None else self._merged(weight, pair)

    def _merged(self, weight: torch.Tensor, pair: AdapterPair) -> torch.Tensor:
        first, second = (self._adapters.read(self._prefix + each) for each in (pair.first_name, pair.second_name))
        return merged_weight(weight.float(), first, second, self._scaling)

    def _meta(self, name: str) -> torch.Tensor:
        return torch.empty(self._adapters.entry(name).global_shape, device="meta")


def names_shared_with_experts(model: PreTrainedModel, names: Iterable[str]) -> list[str]:
    """Returns the layer names (last parts, such as `gate_proj`) that have adapters and are also names of experts in the
    model's files. `names`: tensor names of peft's file. When peft (0.21.2) loads such a file, it applies these adapters
    to the experts, even if the adapters belong to other layers."""
    of_experts = expert_endings(model)
    layers = {name.removesuffix(LORA_A_SUFFIX).rpartition(".")[2] for name in names if name.endswith(LORA_A_SUFFIX)}
    return sorted(layers & of_experts)


def _write_adapter(folder: Location, tensors: dict[str, torch.Tensor], lora: Lora, base_model: Model) -> None:
    if not isinstance(folder, Path):
        with tempfile.TemporaryDirectory() as temporary:
            write_adapter(Path(temporary), tensors, lora, base_model)
            for path in Path(temporary).iterdir():
                write_file(folder / path.name, path.read_bytes())
        return
    folder.mkdir()
    write_adapter(folder, tensors, lora, base_model)
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    sync_folder(folder)
