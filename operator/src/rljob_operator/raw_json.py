"""Reading JSON that others wrote: what is missing or of another kind reads as absent, nothing raises.

The API server's objects and Ray's answers grow fields with every version, so only what is used is looked at.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

JsonObject = Mapping[str, object]


def at(value: object, *path: str) -> object:
    """The value at a path of object keys; None where there is none."""
    for part in path:
        if not isinstance(value, Mapping):
            return None
        value = value.get(part)
    return value


def text_at(value: object, *path: str) -> str:
    """The text at a path; empty where there is none."""
    found = at(value, *path)
    return found if isinstance(found, str) else ""


def optional_text_at(value: object, *path: str) -> str | None:
    """The text at a path; None where there is none or it is empty."""
    return text_at(value, *path) or None


def integer_at(value: object, *path: str) -> int | None:
    """The whole number at a path; None where there is none."""
    found = at(value, *path)
    return found if isinstance(found, int) and not isinstance(found, bool) else None


def number_at(value: object, *path: str) -> float:
    """The number at a path; 0 where there is none."""
    found = at(value, *path)
    return float(found) if isinstance(found, int | float) and not isinstance(found, bool) else 0.0


def flag_at(value: object, *path: str) -> bool:
    """Whether a `true` stands at a path."""
    return at(value, *path) is True


def object_at(value: object, *path: str) -> JsonObject:
    """The object at a path; empty where there is none."""
    found = at(value, *path)
    return found if isinstance(found, Mapping) else {}


def objects_at(value: object, *path: str) -> tuple[JsonObject, ...]:
    """The objects of the list at a path."""
    found = at(value, *path)
    if not isinstance(found, Sequence) or isinstance(found, str | bytes):
        return ()
    return tuple(item for item in found if isinstance(item, Mapping))
