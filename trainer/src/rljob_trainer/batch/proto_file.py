"""A batch in one file, without pickle: tensors and ragged columns as safetensors, objects and meta as JSON among them.

Any safetensors reader can open the tensors. A digest over everything tells a damaged file, which the format alone does
not.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import cast
from uuid import uuid4

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from rljob_trainer.batch.meta import coerced_meta
from rljob_trainer.batch.proto import DataProto
from rljob_trainer.batch.ragged import RaggedColumn
from rljob_trainer.batch.wire import pack, unpack
from rljob_trainer.errors import DataError

FORMAT = "rljob-batch-1"
_TENSOR, _VALUES, _LENGTHS, _TEXT = "tensor/", "ragged-values/", "ragged-lengths/", "json"
"""Beginnings of the names in the file; the JSON text is one tensor of bytes."""
_NO_SAFETENSORS = (torch.complex32, torch.complex128)
_MAX_INTEGER_BITS = 64


def save_batch(batch: DataProto, path: Path) -> None:
    """Writes a batch, durably; a file of that name is replaced at once and as a whole.

    Values of object columns may be texts, numbers, truth values, None, and lists, tuples and dictionaries of these.
    Raises DataError, naming the column, for anything else and for remote columns; OSError when the file cannot be
    written.
    """
    for block in batch.remote:
        raise DataError(f"{path}: column '{min(block.columns)}' is remote and cannot be saved; fetch it first")
    try:
        stored = _stored_tensors(path, batch)
    except RecursionError as error:
        raise DataError(f"{path}: an object column holds lists within lists, too deep to be saved") from error
    # Others may save to the same path, also from other machines.
    unfinished = path.with_name(f".{path.name[:100]}.{uuid4().hex}.unfinished")
    try:
        save_file(stored, unfinished, {"format": FORMAT, "digest": _digest(stored)})
        _make_durable(unfinished)
        unfinished.replace(path)
        _make_durable(path.parent)
    except SafetensorError as error:
        raise OSError(f"{path}: cannot be written: {error}") from error
    except (KeyError, UnicodeEncodeError) as error:
        raise DataError(f"{path}: the format has no such dtype, or no such name: {error}") from error
    finally:
        unfinished.unlink(missing_ok=True)


def load_batch(path: Path) -> DataProto:
    """The batch that was saved, equal in every value and dtype.

    Raises DataError, naming the file, when it cannot be read, is no such file, or is damaged.
    """
    try:
        with safe_open(path, framework="pt") as reader:
            header: Mapping[str, str] = reader.metadata() or {}
            if header.get("format") != FORMAT:
                found = header.get("format")
                raise DataError(f"{path}: no file of a batch, or of another version (format: {found})")
            stored: dict[str, torch.Tensor] = {name: reader.get_tensor(name) for name in reader.keys()}  # noqa: SIM118
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    except SafetensorError as error:
        raise DataError(f"{path}: damaged, or no file of a batch: {error}") from error
    if header.get("digest") != _digest(stored):
        raise DataError(f"{path}: damaged: its content does not have the digest with which it was written")
    try:
        return _batch_of(stored)
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise DataError(f"{path}: not as a batch is written: {error}") from error


def _make_durable(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _stored_tensors(path: Path, batch: DataProto) -> dict[str, torch.Tensor]:
    columns = {_TENSOR + name: tensor for name, tensor in batch.tensors.items()}
    columns |= {_VALUES + name: column.values for name, column in batch.ragged.items()}
    columns |= {_LENGTHS + name: column.lengths for name, column in batch.ragged.items()}
    text = json.dumps(
        {
            "objects": {name: _encoded(f"{path}: column '{name}'", list(v)) for name, v in batch.objects.items()},
            "meta": {name: _encoded(f"{path}: meta '{name}'", value) for name, value in batch.meta.items()},
        }
    )
    columns[_TEXT] = torch.from_numpy(np.frombuffer(bytearray(text.encode()), dtype=np.uint8))
    stored: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in columns.items():
        if tensor.dtype in _NO_SAFETENSORS:
            raise DataError(f"{path}: column '{name}' of {tensor.dtype} cannot be saved; convert it")
        plain = unpack(pack(name, tensor))
        # Columns may share memory, which the library refuses.
        stored[name] = plain.clone() if plain.data_ptr() in seen else plain
        seen.add(plain.data_ptr())
    return stored


def _batch_of(stored: Mapping[str, torch.Tensor]) -> DataProto:
    text = json.loads(stored[_TEXT].numpy().tobytes())
    return DataProto(
        {name.removeprefix(_TENSOR): tensor for name, tensor in stored.items() if name.startswith(_TENSOR)},
        {name: tuple(_values_of(name, values)) for name, values in text["objects"].items()},
        coerced_meta({name: _decoded(value) for name, value in text["meta"].items()}),
        {
            name.removeprefix(_VALUES): RaggedColumn(values, stored[_LENGTHS + name.removeprefix(_VALUES)])
            for name, values in stored.items()
            if name.startswith(_VALUES)
        },
    )


def _values_of(name: str, values: object) -> list[object]:
    if not isinstance(values, list):
        raise DataError(f"column '{name}' is no list of values")
    return [_decoded(value) for value in values]


def _digest(stored: Mapping[str, torch.Tensor]) -> str:
    """Of all names, dtypes, shapes and bytes."""
    running = sha256()
    for name, tensor in sorted(stored.items()):
        running.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        running.update(pack(name, tensor).data.data)
    return running.hexdigest()


def _encoded(where: str, value: object) -> object:
    """JSON values stand for themselves; {"tuple": [...]} is a tuple and {"dict": {...}} a dictionary.

    Types are compared exactly: JSON would turn an enum or a NumPy number into something else without a word."""
    if value is None or type(value) is bool or (isinstance(value, str) and type(value) is str and _is_text(value)):
        return value
    if isinstance(value, int) and type(value) is int and value.bit_length() <= _MAX_INTEGER_BITS:
        return value
    if isinstance(value, float) and type(value) is float and np.isfinite(value):
        return value
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        items = [_encoded(where, item) for item in value]
        return items if isinstance(value, list) else {"tuple": items}
    if isinstance(value, dict) and type(value) is dict and all(type(key) is str for key in value):
        return {"dict": {key: _encoded(where, item) for key, item in value.items()}}
    raise DataError(
        f"{where} holds {value!r:.100} ({type(value).__name__}), which JSON cannot hold; use texts, finite numbers of "
        "at most 64 bits, truth values, None, and lists, tuples and dictionaries (keys: texts) of these"
    )


def _is_text(value: str) -> bool:
    """Whether JSON gives it back as it is: it joins the halves of a surrogate pair."""
    return value.isascii() or json.loads(json.dumps(value)) == value


def _decoded(value: object) -> object:
    if isinstance(value, list):
        return [_decoded(item) for item in value]
    if isinstance(value, dict):
        if "tuple" in value:
            return tuple(_decoded(item) for item in cast("list[object]", value["tuple"]))
        return {key: _decoded(item) for key, item in cast("dict[str, object]", value["dict"]).items()}
    return value
