"""Reads JSON of other programs: a value that is missing or has another type counts as absent and raises no error.

The API server's objects and Ray's responses get new fields with every version, so only the used fields are read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

JsonObject = Mapping[str, object]


def at(value: object, *path: str) -> object:
    """The value at a path of keys, such as `at(pod, "spec", "nodeName")`; None if absent."""
    for part in path:
        if not isinstance(value, Mapping):
            return None
        value = value.get(part)
    return value


def text_at(value: object, *path: str) -> str:
    """The string at a path; empty if absent."""
    found = at(value, *path)
    return found if isinstance(found, str) else ""


def optional_text_at(value: object, *path: str) -> str | None:
    """The string at a path; None if absent or empty."""
    return text_at(value, *path) or None


def integer_at(value: object, *path: str) -> int | None:
    """The integer at a path; None if absent."""
    found = at(value, *path)
    return found if isinstance(found, int) and not isinstance(found, bool) else None


def number_at(value: object, *path: str) -> float:
    """The number at a path; 0 if absent. An integer that is too large for a float becomes infinity."""
    found = at(value, *path)
    if not isinstance(found, int | float) or isinstance(found, bool):
        return 0.0
    try:
        return float(found)
    except OverflowError:
        return math.inf if found > 0 else -math.inf


def flag_at(value: object, *path: str) -> bool:
    """Whether the value at a path is `true`."""
    return at(value, *path) is True


def object_at(value: object, *path: str) -> JsonObject:
    """The object at a path; empty if absent."""
    found = at(value, *path)
    return found if isinstance(found, Mapping) else {}


def objects_at(value: object, *path: str) -> tuple[JsonObject, ...]:
    """The objects in the list at a path; empty if there is no list. Entries that are not objects are omitted."""
    found = at(value, *path)
    if not isinstance(found, Sequence) or isinstance(found, str | bytes):
        return ()
    return tuple(item for item in found if isinstance(item, Mapping))
