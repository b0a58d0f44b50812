"""Raw rows from where the dataset block says. Each source's library is imported only when it is asked for."""

from __future__ import annotations

import datetime
import decimal
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from rljob_api.v1alpha1.dataset import Dataset, DatasetType, FileDataset, HuggingFaceDataset, ReasoningGymDataset
from rljob_trainer.errors import ConfigurationError, DatasetError, ResourceError
from rljob_trainer.source_paths import local_path, looks_local

MAX_DEPTH = 100
"""Lists and dictionaries in each other. No data set needs so many, and Python's own functions for nested values, by
which rows travel, end at a few hundred."""
Block = TypeVar("Block", FileDataset, HuggingFaceDataset, ReasoningGymDataset)


@dataclass(frozen=True)
class RawRow:
    """One row and how people would find it."""

    place: str
    """File and line, or data set and row number; both from 1 for files, from 0 for data sets."""
    columns: Mapping[str, object]


def read_rows(dataset: Dataset, base_folder: Path, where: str) -> Iterator[RawRow]:
    """All rows in order. Raises DatasetError, starting with `where` or with the row's place."""
    match dataset.type:
        case DatasetType.FILE:
            return _read_file(_block(dataset.file, where, "file"), base_folder, where, dataset)
        case DatasetType.HUGGING_FACE:
            return _read_hugging_face(_block(dataset.hugging_face, where, "huggingFace"), base_folder, where, dataset)
        case DatasetType.REASONING_GYM:
            return _read_reasoning_gym(_block(dataset.reasoning_gym, where, "reasoningGym"), where)


def _block(block: Block | None, where: str, name: str) -> Block:
    if block is None:
        raise DatasetError(f"{where}.{name}: missing for this type of dataset; add the block")
    return block


def _read_file(spec: FileDataset, base_folder: Path, where: str, dataset: Dataset) -> Iterator[RawRow]:
    try:
        path = local_path(spec.path, base_folder, f"{where}.file.path")
    except ConfigurationError as error:
        raise DatasetError(str(error)) from error
    match path.suffix:
        case ".jsonl":
            yield from _read_json_lines(path)
        case ".parquet":
            from rljob_trainer.datasets.parquet_rows import parquet_rows

            for number, columns in enumerate(parquet_rows(path), start=1):
                yield _plain(columns, f"{path}, row {number}", dataset)
        case _:
            raise DatasetError(f"{where}.file.path: {spec.path!r} is neither a .jsonl nor a .parquet file; convert it")


def _plain(columns: Mapping[str, object], place: str, dataset: Dataset) -> RawRow:
    """The row without the columns that have no plain form; the prompt and the answer must have one."""
    _refuse_deep(columns, place)
    plain = plain_row(columns)
    for field in (dataset.prompt_field, dataset.answer_field):
        name = field if field in columns else field.partition(".")[0]
        if name in columns and name not in plain:
            raise DatasetError(
                f"{place}: column {name!r} holds {_kind(columns[name])}; prompts and answers must be strings, numbers, "
                "or lists and dictionaries of these: convert the column, or name another one"
            )
    return RawRow(place, plain)


def _kind(value: object) -> str:
    kind = type(value).__name__
    return f"a {kind} with bytes, images or the like in it" if isinstance(value, list | Mapping) else kind


def _read_json_lines(path: Path) -> Iterator[RawRow]:
    if not path.is_file():
        raise DatasetError(f"{path}: is no file; name one that holds a JSON object in each line")
    for number, line in enumerate(_lines(path), start=1):
        if line.strip():
            place = f"{path}, line {number}"
            # Some editors begin a file with a byte-order mark.
            columns = _json_object(line, place, "utf-8-sig" if number == 1 else "utf-8")
            _refuse_deep(columns, place)
            yield RawRow(place, columns)


def _refuse_deep(columns: Mapping[str, object], place: str) -> None:
    for name, value in columns.items():
        level, depth = [value], 0
        while level := [item for each in level if isinstance(each, list | tuple | Mapping) for item in _items(each)]:
            depth += 1
            if depth > MAX_DEPTH:
                raise DatasetError(
                    f"{place}: column {name!r} has more than {MAX_DEPTH} lists or dictionaries in each other; make it "
                    "flat, or leave the row out"
                )


def _items(value: Sequence[object] | Mapping[str, object]) -> Iterable[object]:
    return value.values() if isinstance(value, Mapping) else value


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            yield from file
    except PermissionError as error:
        raise DatasetError(f"{path}: may not be read ({error.strerror}); change its permissions") from error
    except OSError as error:
        raise ResourceError(f"{path}: cannot be read ({error.strerror}); check the disk") from error


def _json_object(line: bytes, place: str, encoding: str) -> Mapping[str, object]:
    try:
        columns: object = json.loads(line.rstrip().decode(encoding))
    except UnicodeDecodeError as error:
        raise DatasetError(
            f"{place}: not UTF-8 text ({error.reason} at byte {error.start + 1}); save the file as UTF-8"
        ) from error
    except json.JSONDecodeError as error:
        seen = error.doc[max(0, error.pos - 20) : error.pos + 20].strip()
        raise DatasetError(
            f"{place}: not valid JSON ({error.msg} at column {error.pos + 1}, near {seen!r}); each line must be one "
            "JSON object"
        ) from error
    except (RecursionError, ValueError) as error:
        raise DatasetError(f"{place}: JSON that cannot be read ({error}); leave the row out") from error
    if not isinstance(columns, dict):
        raise DatasetError(f"{place}: not a JSON object but a {type(columns).__name__}; write {{...}}")
    return columns


def _read_hugging_face(spec: HuggingFaceDataset, base_folder: Path, where: str, dataset: Dataset) -> Iterator[RawRow]:
    from rljob_trainer.datasets.hugging_face_rows import hugging_face_rows

    source = spec.path
    if looks_local(spec.path, base_folder):
        try:
            source = str(local_path(spec.path, base_folder, f"{where}.huggingFace.path"))
        except ConfigurationError as error:
            raise DatasetError(str(error)) from error
    rows = hugging_face_rows(source, spec.subset, spec.split, spec.revision, f"{where}.huggingFace")
    for number, columns in enumerate(rows):
        yield _plain(columns, f"{spec.path} ({spec.split}), row {number}", dataset)


def _read_reasoning_gym(spec: ReasoningGymDataset, where: str) -> Iterator[RawRow]:
    from rljob_trainer.datasets.reasoning_gym_tasks import create_task, generated

    task = create_task(spec.task, spec.seed, spec.size, dict(spec.config), f"{where}.reasoningGym")
    for number, entry in enumerate(generated(task, spec.task, f"{where}.reasoningGym")):
        yield RawRow(f"{spec.task} (seed {spec.seed}), row {number}", entry)


def plain_row(row: Mapping[str, object]) -> dict[str, object]:
    """Times, dates and decimals become strings, decimals in digits (`0.0000001`, not `1E-7`). Columns that hold
    anything else (bytes, images) are left out."""
    plain = {name: _plain_value(value) for name, value in row.items()}
    return {name: value for name, value in plain.items() if not isinstance(value, _Other)}


class _Other:
    """Stands for a value that has no plain form."""


def _plain_value(value: object) -> object:
    match value:
        case None | bool() | int() | float() | str():
            return value
        case datetime.date() | datetime.time():
            return value.isoformat()
        case decimal.Decimal():
            return format(value, "f")
        case list() | tuple():
            items = [_plain_value(item) for item in value]
            return _Other() if any(isinstance(item, _Other) for item in items) else items
        case Mapping():
            return plain_row({str(key): item for key, item in value.items()})
    return _Other()
