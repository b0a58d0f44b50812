"""Rows as plain JSON-like values, so that they can be logged and handed to reward processes."""

from __future__ import annotations

import datetime
import decimal
from collections.abc import Mapping


def plain_row(row: Mapping[str, object]) -> dict[str, object]:
    """Times, dates and decimals become strings, decimals in digits (`0.0000001`, not `1E-7`). Columns that hold
    anything else (bytes, images) are left out."""
    plain = {name: _plain(value) for name, value in row.items()}
    return {name: value for name, value in plain.items() if not isinstance(value, _Other)}


class _Other:
    """Stands for a value that has no plain form."""


def _plain(value: object) -> object:
    match value:
        case None | bool() | int() | float() | str():
            return value
        case datetime.date() | datetime.time():
            return value.isoformat()
        case decimal.Decimal():
            return format(value, "f")
        case list() | tuple():
            items = [_plain(item) for item in value]
            return _Other() if any(isinstance(item, _Other) for item in items) else items
        case Mapping():
            return plain_row({str(key): item for key, item in value.items()})
    return _Other()
