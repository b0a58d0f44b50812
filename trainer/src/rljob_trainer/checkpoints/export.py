"""Exports a model as a Hugging Face folder, which `AutoModelForCausalLM.from_pretrained` and vLLM can load.

The weights come from a committed checkpoint. The export needs only one process and no collective, so a failing rank
cannot make it hang. One tensor at a time is copied from file to file, without computing digests.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rljob_api.v1alpha1.checkpoint import ExportDtype
from rljob_trainer.checkpoints.errors import CheckpointError
from rljob_trainer.checkpoints.layout import TensorEntry
from rljob_trainer.checkpoints.local_storage import TEMPORARY_SUFFIX, make_folder, sync_folder
from rljob_trainer.checkpoints.run_source import CONFIG_FILE, TRAINED_MODEL_FILE, settings_files
from rljob_trainer.checkpoints.storage import Location, storage_errors, stored, write_file
from rljob_trainer.checkpoints.tensor_file import DTYPE_NAMES, DTYPES, TensorSpec, stream_tensor_file
from rljob_trainer.models.model_files import INDEX_FILE, SINGLE_FILE
from rljob_trainer.models.weight_conversion import HubNames, float32_names

MAX_FILE_BYTES = 5 * 1000**3
"""Maximum size of a weight file, as the Hub recommends; a larger tensor gets a separate file."""

_METADATA = {"format": "pt"}
FLOAT16_MAX = torch.finfo(torch.float16).max
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Possible dtypes of an export, by their names in config.json."""


class SavedWeights(Protocol):
    """The source of an export's tensors: a `CheckpointReader`, or `adapter_export.MergedWeights`."""

    @property
    def folder(self) -> Location:
        """Where the tensors are, for messages."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors."""

    def entry(self, name: str) -> TensorEntry:
        """Returns shape and dtype."""

    def read(self, name: str) -> torch.Tensor:
        """Returns the whole tensor."""


OnProgress = Callable[[int, int], None]
"""Progress callback: (number of tensors read, number of all tensors)."""


def ignore_progress(_number: int, _of: int) -> None:
    """Ignores the progress."""


def export_dtype(choice: ExportDtype, source: Path) -> torch.dtype:
    """Returns the dtype of an export of the model in the folder `source`.

    For `Auto` this is the dtype with which `from_pretrained` would load the source: the dtype in its config.json,
    otherwise that of the first floating-point tensor in its first weight file. It is float32 if neither exists (a model
    of the hub may have no weights on the controller) or if the source has another dtype than those in _DTYPES.
    """
    if choice is not ExportDtype.AUTO:
        return torch.float32 if choice is ExportDtype.FLOAT32 else torch.bfloat16
    config = _read_config(source)
    name = config.get("dtype") or config.get("torch_dtype")
    if isinstance(name, str):
        return _DTYPES.get(name, torch.float32)
    for path in sorted(source.glob("*.safetensors")):
        with safe_open(path, framework="pt") as weights:
            names = {DTYPE_NAMES[dtype]: dtype for dtype in _DTYPES.values()}
            stored = (weights.get_slice(each).get_dtype() for each in weights.keys())  # noqa: SIM118
            return next((names[each] for each in stored if each in names), torch.float32)
    return torch.float32


def write_huggingface(
    folder: Location,
    source: Path,
    weights: SavedWeights,
    prefix: str,
    dtype: torch.dtype,
    max_file_bytes: int = MAX_FILE_BYTES,
    write_more: Callable[[Location], None] | None = None,
    on_progress: OnProgress = ignore_progress,
) -> None:
    """Writes the model to `folder`, which appears complete or not at all and replaces an earlier export. In a bucket
    config.json is written last: without this file the folder cannot be loaded.

    `source` is the folder of the model that was trained. Its configuration, tokenizer and generation settings are
    copied, with `dtype` as the model's dtype. The weights are the tensors of the checkpoint whose names begin with
    `prefix`; the rest of a name is the tensor's name in the `transformers` model. The weights are written with the
    names and layouts of the model's files on the hub; floating-point tensors are converted to `dtype`, and tied tensors
    are left out. Only the saved tensors that are converted together (mostly a single one, such as all experts of a
    layer) and their converted form are in memory at a time. `write_more` may add files to the folder. `on_progress` is
    called after each tensor.

    Raises CheckpointError if a tensor of the model is missing, unknown or of another shape (`from_pretrained` would
    fill it with random numbers and only warn), if a value is out of range for `dtype`, or if reading or writing fails.
    """
    tensors = _ExportedTensors(folder, source, weights, prefix, dtype)
    specs = tensors.specs
    num_bytes = sum(spec.num_bytes for spec in specs.values())
    with storage_errors(folder, "exporting the model", num_bytes), _replaced_folder(folder) as target:
        _write_weights(target, specs, _counted(tensors.read, len(specs), on_progress), max_file_bytes)
        _copy_settings(source, target)
        if write_more is not None:
            write_more(target)
        _write_config(source, target, dtype)


@contextmanager
def _replaced_folder(folder: Location) -> Iterator[Location]:
    """Yields the folder into which the export is written."""
    if not isinstance(folder, Path):
        stored(folder).remove_folder(first=CONFIG_FILE)
        yield folder
        return
    temporary = folder.with_name(folder.name + TEMPORARY_SUFFIX)
    make_folder(folder.parent)
    shutil.rmtree(temporary, ignore_errors=True)
    os.mkdir(temporary)
    try:
        yield temporary
        _replace_folder(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


class _ExportedTensors:
    """The tensors of an export, read from a checkpoint when they are written."""

    def __init__(self, folder: Location, source: Path, weights: SavedWeights, prefix: str, dtype: torch.dtype) -> None:
        self._folder, self._weights, self._prefix = folder, weights, prefix
        model = _meta_model(source)
        saved = self._saved(source, model)
        self._hub = HubNames(model)
        self._group_of: dict[str, tuple[str, ...]] = {}
        self._group: tuple[str, ...] = ()
        self._converted: dict[str, torch.Tensor] = {}
        self.specs: dict[str, TensorSpec] = {}
        """Specs of the written tensors by their names on the hub, in the order in which they are read."""
        in_float32 = float32_names(model, saved)
        for group in self._hub.groups(saved):
            wanted = torch.float32 if in_float32.intersection(group) else dtype
            for name, tensor in self._hub.converted({each: saved[each] for each in group}).items():
                self._group_of[name] = group
                self.specs[name] = TensorSpec(
                    wanted if tensor.is_floating_point() else tensor.dtype, tuple(tensor.shape)
                )

    def read(self, name: str) -> torch.Tensor:
        """Returns a tensor in the form in which it is written. Consecutive tensors of a group are converted
        together."""
        group = self._group_of[name]
        if group != self._group:
            self._converted = {}
            self._converted = self._hub.converted({each: self._weights.read(self._prefix + each) for each in group})
            self._group = group
        tensor, dtype = self._converted.pop(name), self.specs[name].dtype
        if dtype is torch.float16 and tensor.numel() and (largest := float(tensor.abs().max())) > FLOAT16_MAX:
            raise CheckpointError(
                f"{self._folder}: tensor {name} has values up to {largest:g}, which is out of range for float16; "
                f"set checkpoint.exportDtype to Float32 or BFloat16"
            )
        return tensor.to(dtype).contiguous()

    def _saved(self, source: Path, model: PreTrainedModel) -> dict[str, torch.Tensor]:
        """Returns the saved tensors by the model's names, on the meta device, after checking them against the model."""
        expected, tied = _model_shapes(model)
        saved: dict[str, torch.Tensor] = {}
        for full_name in self._weights.names:
            name = full_name.removeprefix(self._prefix)
            if not full_name.startswith(self._prefix) or name in tied:
                continue
            entry = self._weights.entry(full_name)
            _check_shape(self._folder, name, entry.global_shape, expected)
            saved[name] = torch.empty(entry.global_shape, dtype=DTYPES[entry.dtype], device="meta")
        missing = sorted(expected.keys() - saved.keys())
        if missing:
            raise CheckpointError(
                f"{self._folder}: {len(missing)} tensors of the model are missing in {self._weights.folder} (first: "
                f"{missing[0]}); the checkpoint must contain all tensors of the model in {source}"
            )
        return saved


def _meta_model(source: Path) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(source, local_files_only=True)
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model


def _model_shapes(model: PreTrainedModel) -> tuple[dict[str, tuple[int, ...]], set[str]]:
    """Returns the shapes of a model's tensors, and the names of tied tensors. A tied tensor is the same tensor under a
    second name."""
    first_names = {name for name, _ in model.named_parameters()}
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - first_names
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name not in tied}, tied


def _check_shape(folder: Location, name: str, shape: tuple[int, ...], expected: dict[str, tuple[int, ...]]) -> None:
    if expected.get(name) != shape:
        wanted = f"shape {list(expected[name])}" if name in expected else "no such tensor"
        raise CheckpointError(
            f"{folder}: tensor {name} was saved with shape {list(shape)}, but the model has {wanted}; "
            f"export the model that was trained"
        )


def _counted(
    read: Callable[[str], torch.Tensor], num_tensors: int, on_progress: OnProgress
) -> Callable[[str], torch.Tensor]:
    numbers = itertools.count(1)

    def read_and_report(name: str) -> torch.Tensor:
        tensor = read(name)
        on_progress(next(numbers), num_tensors)
        return tensor

    return read_and_report


def _write_weights(
    folder: Location, specs: Mapping[str, TensorSpec], read: Callable[[str], torch.Tensor], max_file_bytes: int
) -> None:
    """Writes one weight file, or several and an index."""
    parts = _parts(specs, max_file_bytes)
    if len(parts) == 1:
        stream_tensor_file(folder / SINGLE_FILE, specs, read, _METADATA)
        return
    weight_map = {}
    for number, names in enumerate(parts, start=1):
        file_name = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        stream_tensor_file(folder / file_name, {name: specs[name] for name in names}, read, _METADATA)
        weight_map.update(dict.fromkeys(names, file_name))
    total_size = sum(spec.num_bytes for spec in specs.values())
    _write_json(folder / INDEX_FILE, {"metadata": {"total_size": total_size}, "weight_map": weight_map})


def _parts(specs: Mapping[str, TensorSpec], max_file_bytes: int) -> Sequence[Sequence[str]]:
    """Returns the tensor names of each file, in the order of `specs`. A new file begins if the next tensor would exceed
    the maximum size."""
    parts: list[list[str]] = [[]]
    num_bytes = 0
    for name, spec in specs.items():
        if parts[-1] and num_bytes + spec.num_bytes > max_file_bytes:
            parts.append([])
            num_bytes = 0
        parts[-1].append(name)
        num_bytes += spec.num_bytes
    return parts


def _copy_settings(source: Path, target: Location) -> None:
    """Copies the tokenizer and the generation settings."""
    for path in settings_files(source):
        if path.name not in (CONFIG_FILE, TRAINED_MODEL_FILE):
            write_file(target / path.name, path.read_bytes())


def _write_config(source: Path, target: Location, dtype: torch.dtype) -> None:
    """Writes the configuration, with `dtype`."""
    config = _read_config(source)
    # from_pretrained uses this dtype; older versions of transformers read `torch_dtype`.
    config["dtype"] = config["torch_dtype"] = str(dtype).removeprefix("torch.")
    _write_json(target / CONFIG_FILE, config)


def _read_config(source: Path) -> dict[str, object]:
    config: dict[str, object] = json.loads((source / CONFIG_FILE).read_bytes())
    return config


def _write_json(path: Location, document: dict[str, object]) -> None:
    write_file(path, json.dumps(document, indent=2).encode() + b"\n")


def _replace_folder(temporary: Path, folder: Path) -> None:
    sync_folder(temporary)
    outdated = folder.with_name(folder.name + ".old")
    shutil.rmtree(outdated, ignore_errors=True)
    if folder.exists():
        os.rename(folder, outdated)
    os.rename(temporary, folder)
    sync_folder(folder.parent)
    shutil.rmtree(outdated, ignore_errors=True)
