"""Reads the raw rows of a dataset block. Each source's library is only imported if it is needed."""

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
"""Maximum nesting of lists and dictionaries. No dataset needs more, and serializing rows for workers fails at a few
hundred levels, because Python limits recursion."""
Block = TypeVar("Block", FileDataset, HuggingFaceDataset, ReasoningGymDataset)


@dataclass(frozen=True)
class RawRow:
    """One row, and its location for messages."""

    location: str
    """File and line (from 1), or dataset and row number (from 0)."""
    columns: Mapping[str, object]


def read_rows(dataset: Dataset, base_folder: Path, where: str) -> Iterator[RawRow]:
    """Yields all rows in order. Raises DatasetError; its message starts with `where` or with the row's location."""
    match dataset.type:
        case DatasetType.FILE:
            return _read_file(_block(dataset.file, where, "file"), base_folder, where, dataset)
        case DatasetType.HUGGING_FACE:
            return _read_hugging_face(_block(dataset.hugging_face, where, "huggingFace"), base_folder, where, dataset)
        case DatasetType.REASONING_GYM:
            return _read_reasoning_gym(_block(dataset.reasoning_gym, where, "reasoningGym"), where)


def local_dataset(dataset: Dataset, base_folder: Path, where: str) -> Path | None:
    """Returns the path of a file or folder dataset; None if its rows come from the hub or a library. Raises
    DatasetError, starting with `where`, if it does not exist."""
    field, text = f"{where}.file.path", dataset.file.path if dataset.file is not None else ""
    if dataset.type is DatasetType.HUGGING_FACE and dataset.hugging_face is not None:
        field, text = f"{where}.huggingFace.path", dataset.hugging_face.path
        text = text if looks_local(text, base_folder) else ""
    if not text:
        return None
    try:
        return local_path(text, base_folder, field)
    except ConfigurationError as error:
        raise DatasetError(str(error)) from error


def _block(block: Block | None, where: str, name: str) -> Block:
    if block is None:
        raise DatasetError(f"{where}.{name}: missing for this type of dataset; add the block")
    return block


def _read_file(spec: FileDataset, base_folder: Path, where: str, dataset: Dataset) -> Iterator[RawRow]:
    path = local_dataset(dataset, base_folder, where)
    assert path is not None
    match path.suffix:
        # Also a folder that is named like a file, as Spark writes.
        case _ if path.is_dir():
            yield from _read_parquet(parquet_files_of(path, where), dataset)
        case ".jsonl":
            yield from _read_json_lines(path)
        case ".parquet":
            yield from _read_parquet([path], dataset)
        case _:
            raise DatasetError(
                f"{where}.file.path: {spec.path!r} is neither a .jsonl nor a .parquet file, nor a folder with .parquet "
                "files; convert it"
            )


def parquet_files_of(path: Path, where: str) -> list[Path]:
    """Returns the Parquet files of a dataset, in the order of their names: those in the folder `path`, or the file
    itself; an empty list if it is a file of another format. Raises DatasetError for a folder without such files."""
    if not path.is_dir():
        return [path] if path.suffix == ".parquet" else []
    below = sorted(each for each in path.rglob("*") if each.suffix.casefold() == ".parquet" and each.is_file())
    found = [each for each in below if each.parent == path]
    if found and len(found) < len(below):
        other = next(each for each in below if each.parent != path)
        raise DatasetError(
            f"{where}.file.path: the folder {path} has .parquet files in its folders, too, which would not be read "
            f"(seen: {other.relative_to(path)}); move all files into one folder, or name each folder as a dataset"
        )
    if not found:
        raise DatasetError(f"{where}.file.path: the folder {path} has no .parquet files; name a folder that has some")
    return found


def _read_parquet(paths: Sequence[Path], dataset: Dataset) -> Iterator[RawRow]:
    from rljob_trainer.datasets.parquet_rows import parquet_rows

    for path in paths:
        for number, columns in enumerate(parquet_rows(path), start=1):
            yield plain_raw_row(columns, f"{path}, row {number}", dataset)


def plain_raw_row(columns: Mapping[str, object], location: str, dataset: Dataset) -> RawRow:
    """Returns the row without columns that have no plain form (see `plain_row`). Raises DatasetError if a column that
    the dataset names has none."""
    _refuse_deep(columns, location)
    plain = plain_row(columns)
    for field in named_fields(dataset):
        name = field if field in columns else field.partition(".")[0]
        if name in columns and name not in plain:
            raise DatasetError(
                f"{location}: column {name!r} contains {_kind(columns[name])}, but prompts, answers, sources and tools "
                "must be strings, numbers, or lists and dictionaries of these; convert the column, or name another one"
            )
    return RawRow(location, plain)


def named_fields(dataset: Dataset) -> list[str]:
    """Returns the fields of rows that the dataset names: prompt and answer, source and tools."""
    fields = (dataset.prompt_field, dataset.answer_field, dataset.source_field, dataset.tools_field)
    return [field for field in fields if field is not None]


def _kind(value: object) -> str:
    kind = type(value).__name__
    return f"a {kind} with bytes, images or similar values" if isinstance(value, list | Mapping) else kind


def _read_json_lines(path: Path) -> Iterator[RawRow]:
    if not path.is_file():
        raise DatasetError(f"{path}: is not a file; name a file with one JSON object per line")
    for number, line in enumerate(_lines(path), start=1):
        if line.strip():
            location = f"{path}, line {number}"
            # Some editors begin a file with a byte-order mark.
            columns = _json_object(line, location, "utf-8-sig" if number == 1 else "utf-8")
            _refuse_deep(columns, location)
            yield RawRow(location, columns)


def _refuse_deep(columns: Mapping[str, object], location: str) -> None:
    """Raises DatasetError for a column with more than MAX_DEPTH levels of nested lists or dictionaries."""
    for name, value in columns.items():
        level, depth = [value], 0
        while level := [item for each in level if isinstance(each, list | tuple | Mapping) for item in _items(each)]:
            depth += 1
            if depth > MAX_DEPTH:
                raise DatasetError(
                    f"{location}: column {name!r} has more than {MAX_DEPTH} levels of nested lists or dictionaries; "
                    "flatten it, or remove the row"
                )


def _items(value: Sequence[object] | Mapping[str, object]) -> Iterable[object]:
    return value.values() if isinstance(value, Mapping) else value


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            yield from file
    except PermissionError as error:
        raise DatasetError(f"{path}: no permission to read it ({error.strerror}); change its permissions") from error
    except OSError as error:
        raise ResourceError(f"{path}: cannot be read ({error.strerror}); check the disk") from error


def _json_object(line: bytes, location: str, encoding: str) -> Mapping[str, object]:
    """Parses one line. Raises DatasetError unless it is a JSON object."""
    try:
        columns: object = json.loads(line.rstrip().decode(encoding))
    except UnicodeDecodeError as error:
        raise DatasetError(
            f"{location}: not UTF-8 text ({error.reason} at byte {error.start + 1}); save the file as UTF-8"
        ) from error
    except json.JSONDecodeError as error:
        seen = error.doc[max(0, error.pos - 20) : error.pos + 20].strip()
        raise DatasetError(
            f"{location}: not valid JSON ({error.msg} at column {error.pos + 1}, near {seen!r}); each line must be one "
            "JSON object"
        ) from error
    except (RecursionError, ValueError) as error:
        raise DatasetError(f"{location}: JSON that cannot be parsed ({error}); fix or remove the row") from error
    if not isinstance(columns, dict):
        raise DatasetError(f"{location}: not a JSON object but a {type(columns).__name__}; write {{...}}")
    return columns


def _read_hugging_face(spec: HuggingFaceDataset, base_folder: Path, where: str, dataset: Dataset) -> Iterator[RawRow]:
    from rljob_trainer.datasets.hugging_face_rows import hugging_face_rows

    source = local_dataset(dataset, base_folder, where)
    rows = hugging_face_rows(str(source or spec.path), spec.subset, spec.split, spec.revision, f"{where}.huggingFace")
    for number, columns in enumerate(rows):
        yield plain_raw_row(columns, f"{spec.path} ({spec.split}), row {number}", dataset)


def _read_reasoning_gym(spec: ReasoningGymDataset, where: str) -> Iterator[RawRow]:
    from rljob_trainer.datasets.reasoning_gym_tasks import create_task, generated

    task = create_task(spec.task, spec.seed, spec.size, dict(spec.config), f"{where}.reasoningGym")
    for number, entry in enumerate(generated(task, spec.task, f"{where}.reasoningGym")):
        yield RawRow(f"{spec.task} (seed {spec.seed}), row {number}", entry)


def plain_row(row: Mapping[str, object]) -> dict[str, object]:
    """Returns the row with plain values only: times, dates and decimals become strings (decimals as `0.0000001`, not
    `1E-7`). Columns with other types (bytes, images) are left out."""
    plain = {name: _plain_value(value) for name, value in row.items()}
    return {name: value for name, value in plain.items() if not isinstance(value, _Other)}


class _Other:
    """Marks a value that has no plain form."""


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
