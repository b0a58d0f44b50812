"""The smallest merge patch (RFC 7386) from one JSON object to another."""

from __future__ import annotations

from collections.abc import Mapping


def merge_patch(old: Mapping[str, object], new: Mapping[str, object]) -> dict[str, object]:
    """What turns `old` into `new`; empty where nothing differs. A null in either means an absent field."""
    patch: dict[str, object] = {
        name: None for name, value in old.items() if value is not None and new.get(name) is None
    }
    for name, value in new.items():
        before = old.get(name)
        if value is None or value == before:
            continue
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            inner = merge_patch(before, value)
            if inner:
                patch[name] = inner
        else:
            patch[name] = value
    return patch


def without_nulls(value: object) -> object:
    """A JSON value without the fields that are null, at any depth."""
    if isinstance(value, Mapping):
        return {name: without_nulls(item) for name, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [without_nulls(item) for item in value]
    return value
