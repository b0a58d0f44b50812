"""Lists the differences between two specs of a job, with one line for each value that differs."""

from __future__ import annotations

import json
from collections.abc import Iterator

from rljob_api.v1alpha1.spec import RLJobSpec

_MAX_CHARACTERS = 60
"""The largest number of characters of a value that are shown."""


def differences(old: RLJobSpec, new: RLJobSpec) -> list[str]:
    """Lines such as `spec.pools[main].nodes: 1 -> 2`. Fields with default values are compared, too.

    Entries of two lists are compared by their names if all entries have one and the common names have the same order;
    otherwise by their positions if the lists have the same length. Other lists are compared as a whole."""
    return [f"{path}: {before} -> {after}" for path, before, after in differing_values(old, new)]


def differing_values(old: RLJobSpec, new: RLJobSpec) -> list[tuple[str, str, str]]:
    """The same as (path, old value, new value)."""
    return [
        (path, _shown(before), _shown(after))
        for path, before, after in _differing(old.to_full_wire(), new.to_full_wire(), "spec")
    ]


def named_entries(value: object) -> dict[str, dict[str, object]] | None:
    """The entries of a list by their names. None if the value is not a list or is empty, or if an entry has no name or
    the same name as another."""
    entries = value if isinstance(value, list) else []
    named = {str(entry["name"]): entry for entry in entries if isinstance(entry, dict) and "name" in entry}
    return named if named and len(named) == len(entries) else None


def _differing(old: object, new: object, path: str) -> Iterator[tuple[str, object, object]]:
    before, after = named_entries(old), named_entries(new)
    if isinstance(old, dict) and isinstance(new, dict):
        for key in (*old, *(key for key in new if key not in old)):
            yield from _differing(old.get(key), new.get(key), f"{path}.{key}")
    elif before is not None and after is not None and _has_the_same_order(list(before), list(after)):
        for name in (*before, *(name for name in after if name not in before)):
            yield from _differing(before.get(name), after.get(name), f"{path}[{name}]")
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, pair in enumerate(zip(old, new, strict=True)):
            yield from _differing(*pair, f"{path}[{index}]")
    elif old != new:
        yield path, old, new


def _has_the_same_order(before: list[str], after: list[str]) -> bool:
    return [name for name in before if name in after] == [name for name in after if name in before]


def _shown(value: object) -> str:
    if value is None:
        return "unset"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}..."
