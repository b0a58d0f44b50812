"""Changes of a job file that do not come from the file: `--set spec.training.steps=10` and `--name other`.

A path has the form of the paths in error messages: `spec.pools[0].nodes`. An entry of a list may also be given by its
name (`spec.pools[main].nodes`), and a key of a mapping in brackets (`metadata.labels[kueue.x-k8s.io/queue-name]`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from enum import Enum
from types import UnionType
from typing import Annotated, Literal, Union, get_args, get_origin

from pydantic import JsonValue

from rljob_api.base import WireModel
from rljob_api.errors import JobFileError, Problem
from rljob_api.v1alpha1.spec import Metadata, RLJobSpec
from rljob_api.yaml_faults import Path, YamlProblem
from rljob_api.yaml_text import Document, Plain, read_yaml, wire_path

SET_OPTION, NAME_OPTION = "--set", "--name"
_ROOTS: dict[str, type[WireModel]] = {"metadata": Metadata, "spec": RLJobSpec}
_PART = re.compile(r"\.?([A-Za-z][A-Za-z0-9_-]*)|\[([^\[\]]+)\]")
_UNSET = "null"
_ANY = object()
"""Stands for the type of a value that may be any JSON value, such as an argument of a user's function."""


@dataclass(frozen=True)
class Change:
    """A value that replaces the one in the file."""

    path: str
    """Path of the field, such as `spec.training.steps`."""
    value: str
    """The value as the user wrote it. It becomes a string where the field is a string, and is YAML otherwise; `null`
    removes the field."""
    option: str = SET_OPTION
    """Name of the option, for messages."""

    def arguments(self) -> list[str]:
        """The option and its value, for a command line."""
        return [self.option, self.value if self.option == NAME_OPTION else f"{self.path}={self.value}"]


def read_change(text: str) -> Change:
    """The change of an option such as `spec.training.steps=10`. Raises JobFileError."""
    path, equals, value = text.partition("=")
    if not equals or not path.strip():
        raise _error(Change(path.strip(), ""), f"must have the form PATH=VALUE (seen: {text!r}); write for example"
                     " --set spec.training.steps=10")  # fmt: skip
    return Change(path.strip(), value)


def renamed(name: str) -> Change:
    """The change of the job's name."""
    return Change("metadata.name", name, NAME_OPTION)


def apply_changes(document: Document, changes: Sequence[Change]) -> None:
    """Applies the changes to the document's value, in their order. Problems of changed values are later reported with
    the option instead of a line. Raises JobFileError for a path that does not exist and for a value that is not YAML.
    """
    if not isinstance(document.value, dict):
        # The file is no job, which is reported when it is validated.
        return
    for change in changes:
        path, kind = _resolved(change, document)
        value = _value(change, kind)
        _forget(document, path)
        parent = _parent(document, path, change)
        # `null` is a valid name of a job.
        if change.value == _UNSET and change.option == SET_OPTION:
            if isinstance(parent, list):
                where = wire_path(path[:-1])
                raise _error(change, f"cannot be removed; set the whole list, as in '{where}=[...]'")
            parent.pop(str(path[-1]), None)
            continue
        if isinstance(parent, dict):
            parent[str(path[-1])] = value
        else:
            parent[int(path[-1])] = value
        _mark(document, path, value)
        document.options[path] = change.option


def _resolved(change: Change, document: Document) -> tuple[Path, object]:
    """The path with the indices of named entries, and the type of the value there."""
    parts = _parts(change)
    first = parts[0]
    if parts in (["apiVersion"], ["kind"]):
        raise _error(change, "cannot be changed; change the file")
    if first not in _ROOTS or len(parts) == 1:
        raise _unknown(change)
    kind: object = _ROOTS[first]
    path: Path = (first,)
    for part in parts[1:]:
        kind = _without_wrapping(kind)
        if kind is _ANY:
            path = (*path, part)
        elif isinstance(kind, type) and issubclass(kind, WireModel):
            found = next((info for info in kind.model_fields.values() if info.alias == part), None)
            if found is None:
                raise _unknown(change)
            kind, path = found.annotation, (*path, part)
        elif get_origin(kind) is tuple:
            kind, path = get_args(kind)[0], (*path, _index(change, part, path, document))
        elif get_origin(kind) is dict:
            kind, path = get_args(kind)[1], (*path, part)
        else:
            raise _unknown(change)
    return path, _without_wrapping(kind)


def _parts(change: Change) -> list[str]:
    """The names, indices and keys of the path."""
    found, position = [], 0
    while match := _PART.match(change.path, position):
        found.append(match[1] or match[2])
        position = match.end()
    if position != len(change.path) or not found:
        raise _unknown(change)
    return found


def _index(change: Change, part: str, path: Path, document: Document) -> int:
    """The index of an entry of the list at `path` that is given by its index or its name."""
    entries = _existing(document, path)
    where = wire_path(path)
    if not isinstance(entries, list) or not entries:
        raise _error(change, f"the file has no entries in {where}; set the whole list, as in '{where}=[...]'")
    names = [str(entry.get("name")) if isinstance(entry, dict) and "name" in entry else "" for entry in entries]
    if part in names:
        return names.index(part)
    if part.isdecimal() and len(part) < 10 and int(part) < len(entries):
        return int(part)
    known = ", ".join(filter(None, names)) or f"indices 0 to {len(entries) - 1}"
    raise _error(change, f"{where} has no entry {part}; use one of: {known}")


def _existing(document: Document, path: Path) -> Plain:
    """The value at the path; None if there is none."""
    found = document.value
    for part in path:
        if isinstance(found, dict):
            found = found.get(str(part))
        elif isinstance(found, list) and isinstance(part, int) and part < len(found):
            found = found[part]
        else:
            return None
    return found


def _parent(document: Document, path: Path, change: Change) -> dict[str, Plain] | list[Plain]:
    """The mapping or list that contains the value. Mappings that the file does not have are added."""
    assert isinstance(document.value, dict), "only mappings are changed"
    found: dict[str, Plain] | list[Plain] = document.value
    for length in range(1, len(path)):
        part, at = path[length - 1], path[:length]
        following = found.get(str(part)) if isinstance(found, dict) else found[int(part)]
        if following is not None and not isinstance(following, dict | list):
            raise _error(change, f"the value of {wire_path(at)} in the file has no fields; correct the file")
        if following is None:
            following = {}
            if isinstance(found, dict):
                found[str(part)] = following
            else:
                found[int(part)] = following
            document.value_positions[at] = (0, 0)
            document.options[at] = change.option
        found = following
    return found


def _forget(document: Document, path: Path) -> None:
    """Removes the positions of a value that is replaced."""
    for positions in (document.value_positions, document.key_positions):
        for known in [each for each in positions if each[: len(path)] == path]:
            del positions[known]


def _mark(document: Document, path: Path, value: Plain) -> None:
    """Records that this value and the values in it do not come from the file: their line is 0."""
    document.value_positions[path] = (0, 0)
    if isinstance(value, dict):
        for key, entry in value.items():
            _mark(document, (*path, key), entry)
    elif isinstance(value, list):
        for index, entry in enumerate(value):
            _mark(document, (*path, index), entry)


def _value(change: Change, kind: object) -> Plain:
    if _is_string(kind):
        return change.value
    try:
        return read_yaml(change.value).value if change.value.strip() else ""
    except YamlProblem as error:
        raise _error(change, error.problem.message) from None


def _is_string(kind: object) -> bool:
    """Whether the field has only strings, so that `1.0`, `no` and `[a]` need no quotes."""
    if get_origin(kind) is Literal:
        return all(isinstance(choice, str) for choice in get_args(kind))
    return isinstance(kind, type) and (issubclass(kind, str) or issubclass(kind, Enum))


def _without_wrapping(kind: object) -> object:
    """The type without `Annotated` and without `| None`; `_ANY` for a type that may be any JSON value."""
    if get_origin(kind) is Annotated:
        return _without_wrapping(get_args(kind)[0])
    if kind is JsonValue or kind is object:
        return _ANY
    if get_origin(kind) in (Union, UnionType):
        given = [each for each in get_args(kind) if each is not type(None)]
        return _without_wrapping(given[0]) if len(given) == 1 else kind
    return kind


def _unknown(change: Change) -> JobFileError:
    return _error(change, f"is not a field of a job; did you mean {_nearest(change.path)}?")


def _nearest(path: str) -> str:
    """The most similar path of the schema: above all with the same last name, or with this path as its end."""
    wanted = _plain(path)
    last = wanted.rpartition(".")[2]

    def similarity(known: str) -> float:
        plain = _plain(known)
        same_end = plain.endswith(f".{wanted}") + 0.5 * (plain.rpartition(".")[2] == last)
        return same_end + SequenceMatcher(None, wanted, plain).ratio()

    known = [f"{name}{path}" for name, root in _ROOTS.items() for path in _paths(root)]
    return max(known, key=similarity)


def _plain(path: str) -> str:
    return re.sub(r"\[[^\]]*\]", "", path).lower()


def _paths(kind: object) -> Iterator[str]:
    """All paths below a value of this type, each with its leading `.` or `[`."""
    kind = _without_wrapping(kind)
    if isinstance(kind, type) and issubclass(kind, WireModel):
        for name, info in kind.model_fields.items():
            yield f".{info.alias or name}"
            yield from (f".{info.alias or name}{rest}" for rest in _paths(info.annotation))
    elif get_origin(kind) is tuple:
        yield from (f"[NAME]{rest}" for rest in _paths(get_args(kind)[0]))
    elif get_origin(kind) is dict:
        yield "[KEY]"


def _error(change: Change, message: str) -> JobFileError:
    return JobFileError(change.option, [Problem(change.path, message, option=change.option)])
