"""Reading what another version wrote: fields that this one does not know are left out and named, the rest is read.

Beside `WireModel.from_newer_wire`, which gives a value or raises: the operator writes status fields back, so it needs
the document as it was read, too, and the errors of a job that stays listed without a value. The command line leaves out
even what cannot be read (`rljob_cli.cluster.readable_parts`), for it only shows."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from rljob_api.base import WireModel
from rljob_api.pydantic_messages import is_echo
from rljob_api.yaml_text import wire_path
from rljob_operator.raw_json import JsonObject

ModelT = TypeVar("ModelT", bound=WireModel)
UNKNOWN = "extra_forbidden"


@dataclass(frozen=True)
class TolerantReading(Generic[ModelT]):
    """What could be read of a document."""

    value: ModelT | None
    document: dict[str, object]
    """Without the fields that are not known; where nothing was wrong, with parts of what was read."""
    unknown_fields: tuple[str, ...]
    """Their places."""
    errors: tuple[ErrorDetails, ...]
    """Why there is no value."""


def read_tolerantly(model: type[ModelT], document: JsonObject) -> TolerantReading[ModelT]:
    """Rules between fields are asked when all unknown ones are out, for they are asked of values only."""
    # A copy costs half as much as the reading, and nearly always there is nothing to take out.
    try:
        return TolerantReading(model.from_wire(document), dict(document), (), ())
    except ValidationError:
        known: dict[str, object] = copy.deepcopy(dict(document))
    unknown: dict[str, None] = {}
    while True:
        try:
            return TolerantReading(model.from_wire(known), known, tuple(unknown), ())
        except ValidationError as error:
            errors = tuple(each for each in error.errors(include_url=False) if not is_echo(each))
        removed = [each["loc"] for each in errors if each["type"] == UNKNOWN and remove(known, each["loc"])]
        unknown |= dict.fromkeys(map(wire_path, removed))
        if not removed:
            return TolerantReading(None, known, tuple(unknown), errors)


def remove(value: object, place: tuple[int | str, ...]) -> bool:
    """Takes a field, or an entry of a list, out of a document; False where there is none."""
    for part in place[:-1]:
        value = _entry(value, part)
    last = place[-1]
    if isinstance(value, dict) and last in value:
        del value[last]
        return True
    if isinstance(value, list) and isinstance(last, int) and last < len(value):
        del value[last]
        return True
    return False


def _entry(value: object, part: int | str) -> object:
    if isinstance(value, Mapping):
        return value.get(part)
    if isinstance(value, list) and isinstance(part, int) and part < len(value):
        return value[part]
    return None
