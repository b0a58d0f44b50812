"""Reads what another version wrote as far as it can be read here: what is unknown is passed over, what cannot be read
is left out and named. What a command shows of a job must not hang on one field that it does not know.

Programs that act on what they read are stricter: `WireModel.from_newer_wire` leaves out only what is unknown."""

from __future__ import annotations

import copy
import json
from typing import TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from rljob_api.base import WireModel
from rljob_api.yaml_text import Path, wire_path

ModelT = TypeVar("ModelT", bound=WireModel)

_LONGEST_SHOWN = 40


def readable_part(kind: type[ModelT], wire: object, name: str) -> tuple[ModelT, tuple[str, ...]]:
    """The value, and what of it cannot be read here, such as `status.pools[0].ready (seen: "all")` where its name is
    status. `kind` must have a default for each of its fields; an entry of a list without what it must have is left out
    as a whole."""
    unread: list[str] = []
    data = copy.deepcopy(wire)
    while True:
        try:
            return kind.model_validate(data, by_alias=True, by_name=False, extra="ignore"), tuple(unread)
        except ValidationError as error:
            # One at a time: taking out an entry of a list moves those behind it.
            problem = error.errors(include_url=False)[0]
        is_missing = problem["type"] == "missing"
        unread.append(f"{wire_path((name, *problem['loc']))} ({'missing' if is_missing else _seen(problem['input'])})")
        data = _without(data, problem, problem["loc"][:-1] if is_missing else problem["loc"])


def _without(data: object, problem: ErrorDetails, place: Path) -> object:
    """The data without what stands at the place; of what is too long the part that counts stays. All of the data goes
    if there is no such place."""
    if not place:
        return {}
    holder, key = _at(data, place[:-1]), place[-1]
    if isinstance(holder, dict) and isinstance(key, str) and key in holder:
        value = holder[key]
        if problem["type"] == "too_long" and isinstance(value, list):
            # The newest entries come last.
            holder[key] = value[-problem["ctx"]["max_length"] :]
        elif problem["type"] == "string_too_long" and isinstance(value, str):
            holder[key] = value[: problem["ctx"]["max_length"]]
        else:
            del holder[key]
        return data
    if isinstance(holder, list) and isinstance(key, int) and key < len(holder):
        del holder[key]
        return data
    return {}


def _at(data: object, place: Path) -> object:
    """What stands there; None where nothing does."""
    for part in place:
        if isinstance(data, dict) and isinstance(part, str):
            data = data.get(part)
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):
            data = data[part]
        else:
            return None
    return data


def _seen(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return f"seen: {text if len(text) <= _LONGEST_SHOWN else f'{text[:_LONGEST_SHOWN]}...'}"
