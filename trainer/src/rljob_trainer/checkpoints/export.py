"""Writing a model as a Hugging Face folder, which `AutoModelForCausalLM.from_pretrained` and vLLM load.

The weights come one whole tensor at a time, best from a committed checkpoint (`CheckpointReader.read_all`): that needs
one process and no collective, so nothing can hang where a rank fails.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rljob_trainer.checkpoints.errors import CheckpointError
from rljob_trainer.checkpoints.layout import TEMPORARY_SUFFIX
from rljob_trainer.checkpoints.storage import durable_file, make_folder, storage_errors, sync_folder, write_all
from rljob_trainer.checkpoints.tensor_file import num_tensor_bytes, write_tensor_file

MAX_FILE_BYTES = 5 * 1000**3
"""Of one weight file, as the Hub recommends; a larger tensor gets a file of its own."""

_METADATA = {"format": "pt"}
_CONFIG_FILE = "config.json"
_INDEX_FILE = "model.safetensors.index.json"
_COPIED_SUFFIXES = {".json", ".jinja", ".txt", ".model", ".tiktoken"}


def write_huggingface(
    folder: Path,
    source: Path,
    named: Iterable[tuple[str, torch.Tensor]],
    dtype: torch.dtype,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Writes the model to `folder`, which appears complete or not at all and replaces an earlier export.

    `source` is the folder of the model that was trained: its configuration, tokenizer and generation settings are
    copied, with `dtype` as the model's dtype. `named` gives whole tensors by their name in the `transformers` model;
    floating-point ones are converted to `dtype`, and tensors tied to another one are left out.

    Raises CheckpointError where a tensor of the model is missing, unknown or of another shape (`from_pretrained` would
    fill it with random numbers and only warn), and where writing fails.
    """
    expected, tied = _model_shapes(source)
    temporary = folder.with_name(folder.name + TEMPORARY_SUFFIX)
    with storage_errors(folder, "exporting the model"):
        make_folder(folder.parent)
        shutil.rmtree(temporary, ignore_errors=True)
        os.mkdir(temporary)
        try:
            writer = _WeightFiles(temporary, max_file_bytes)
            for name, tensor in named:
                if name not in tied:
                    _check_shape(folder, name, tensor, expected)
                    writer.add(name, tensor.to(dtype) if tensor.is_floating_point() else tensor)
            writer.finish()
            missing = sorted(expected.keys() - writer.names)
            if missing:
                raise CheckpointError(
                    f"{folder}: {len(missing)} tensors of the model were not given, the first is {missing[0]}; "
                    f"give all of them under the names of the model in {source}"
                )
            _copy_settings(source, temporary, dtype)
            _replace_folder(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def _model_shapes(source: Path) -> tuple[dict[str, tuple[int, ...]], set[str]]:
    """Shapes of the tensors that a file of the model holds, and the names that are only second names of those."""
    config = AutoConfig.from_pretrained(source, local_files_only=True)
    with torch.device("meta"):
        model: torch.nn.Module = AutoModelForCausalLM.from_config(config)
    once = {name for name, _ in model.named_parameters()}
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - once
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name not in tied}, tied


def _check_shape(folder: Path, name: str, tensor: torch.Tensor, expected: dict[str, tuple[int, ...]]) -> None:
    if expected.get(name) != tuple(tensor.shape):
        wanted = f"shape {list(expected[name])}" if name in expected else "no such tensor"
        raise CheckpointError(
            f"{folder}: tensor {name} of shape {list(tensor.shape)} was given, the model has {wanted}; "
            f"export the model that was trained"
        )


class _WeightFiles:
    """Collects tensors and writes a file whenever the next one would make it too large."""

    def __init__(self, folder: Path, max_file_bytes: int) -> None:
        self._folder = folder
        self._max_file_bytes = max_file_bytes
        self._waiting: dict[str, torch.Tensor] = {}
        self._files: list[list[str]] = []
        self._num_bytes = 0

    @property
    def names(self) -> set[str]:
        return {name for names in self._files for name in names}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        waiting_bytes = sum(num_tensor_bytes(waiting) for waiting in self._waiting.values())
        if self._waiting and waiting_bytes + num_tensor_bytes(tensor) > self._max_file_bytes:
            self._write()
        self._waiting[name] = tensor
        self._num_bytes += num_tensor_bytes(tensor)

    def finish(self) -> None:
        """Writes the rest and gives the files their names, which hold the number of files, and the index."""
        self._write()
        if len(self._files) == 1:
            os.rename(self._part(0), self._folder / "model.safetensors")
            return
        weight_map = {}
        for index, names in enumerate(self._files):
            file_name = f"model-{index + 1:05d}-of-{len(self._files):05d}.safetensors"
            os.rename(self._part(index), self._folder / file_name)
            weight_map.update(dict.fromkeys(names, file_name))
        index_document = {"metadata": {"total_size": self._num_bytes}, "weight_map": weight_map}
        _write_json(self._folder / _INDEX_FILE, index_document)

    def _write(self) -> None:
        write_tensor_file(self._part(len(self._files)), self._waiting, _METADATA)
        self._files.append(list(self._waiting))
        self._waiting = {}

    def _part(self, index: int) -> Path:
        return self._folder / f"part-{index:05d}.safetensors"


def _copy_settings(source: Path, target: Path, dtype: torch.dtype) -> None:
    for path in sorted(source.iterdir()):
        is_index = path.name.endswith(".index.json")
        if path.is_file() and path.suffix in _COPIED_SUFFIXES and not is_index and path.name != _CONFIG_FILE:
            with durable_file(target / path.name) as descriptor:
                write_all(descriptor, path.read_bytes())
    config: dict[str, object] = json.loads((source / _CONFIG_FILE).read_bytes())
    # from_pretrained loads with the dtype that stands here; older versions of transformers read the second name.
    config["dtype"] = config["torch_dtype"] = str(dtype).removeprefix("torch.")
    _write_json(target / _CONFIG_FILE, config)


def _write_json(path: Path, document: dict[str, object]) -> None:
    with durable_file(path) as descriptor:
        write_all(descriptor, json.dumps(document, indent=2).encode() + b"\n")


def _replace_folder(temporary: Path, folder: Path) -> None:
    sync_folder(temporary)
    outdated = folder.with_name(folder.name + ".old")
    shutil.rmtree(outdated, ignore_errors=True)
    if folder.exists():
        os.rename(folder, outdated)
    os.rename(temporary, folder)
    sync_folder(folder.parent)
    shutil.rmtree(outdated, ignore_errors=True)
