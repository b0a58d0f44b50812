"""Lists the differences between two specs of a job, with one line for each value that differs."""

from __future__ import annotations

import json
from collections.abc import Iterator

from rljob_api.v1alpha1.spec import RLJobSpec

_LONGEST_SHOWN = 60
"""Most characters of a value that are shown."""


def differences(old: RLJobSpec, new: RLJobSpec) -> list[str]:
    """Lines such as `spec.pools[main].nodes: 1 -> 2`. Default values are compared, too.

    If all entries of two lists have names, entries with the same name are compared; those that are in both lists must
    have the same order. Entries of other lists are compared by their position if the lists have the same length."""
    return [
        f"{place}: {_shown(before)} -> {_shown(after)}"
        for place, before, after in _differing(old.to_full_wire(), new.to_full_wire(), "spec")
    ]


def named_entries(value: object) -> dict[str, dict[str, object]] | None:
    """The entries of a list by their names; None if it is not a list of entries with names."""
    entries = value if isinstance(value, list) else []
    named = {str(entry["name"]): entry for entry in entries if isinstance(entry, dict) and "name" in entry}
    return named if named and len(named) == len(entries) else None


def _differing(old: object, new: object, place: str) -> Iterator[tuple[str, object, object]]:
    before, after = named_entries(old), named_entries(new)
    if isinstance(old, dict) and isinstance(new, dict):
        for key in (*old, *(key for key in new if key not in old)):
            yield from _differing(old.get(key), new.get(key), f"{place}.{key}")
    elif before is not None and after is not None and _has_the_same_order(list(before), list(after)):
        for name in (*before, *(name for name in after if name not in before)):
            yield from _differing(before.get(name), after.get(name), f"{place}[{name}]")
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, pair in enumerate(zip(old, new, strict=True)):
            yield from _differing(*pair, f"{place}[{index}]")
    elif old != new:
        yield place, old, new


def _has_the_same_order(before: list[str], after: list[str]) -> bool:
    return [name for name in before if name in after] == [name for name in after if name in before]


def _shown(value: object) -> str:
    if value is None:
        return "unset"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."
