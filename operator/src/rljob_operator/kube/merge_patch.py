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


def lost_fields(sent: Mapping[str, object], stored: Mapping[str, object], place: str = "") -> tuple[str, ...]:
    """Places of fields that were sent, without nulls, and are not stored: their definition does not have them."""
    found: list[str] = []
    for name, value in sent.items():
        here = f"{place}{name}"
        if name not in stored:
            found.append(here)
            continue
        found += _lost_within(value, stored[name], here)
    return tuple(found)


def _lost_within(sent: object, stored: object, place: str) -> list[str]:
    if isinstance(sent, Mapping) and isinstance(stored, Mapping):
        return list(lost_fields(sent, stored, f"{place}."))
    if isinstance(sent, list) and isinstance(stored, list):
        pairs = enumerate(zip(sent, stored, strict=False))
        return [lost for number, pair in pairs for lost in _lost_within(*pair, f"{place}[{number}]")]
    return []
