"""Encodes Python values as JSON for processes that run user code, and keeps tuples and keys that are not strings.

Plain JSON would turn tuples into lists and number keys into strings, but some of reasoning-gym's scorers compare with
tuples. Pickle is not used, because decoding it could run code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

TUPLE_TAG = "__tuple__"
PAIRS_TAG = "__pairs__"
TAGS = (TUPLE_TAG, PAIRS_TAG)


def encode(value: object) -> bytes:
    """The value as bytes. Raises TypeError for anything but None, bool, int, float, str, and lists, tuples and mappings
    of these; RecursionError or ValueError for values that are nested too deep, contain themselves, or have too many
    digits."""
    return json.dumps(_tagged(value)).encode()


def decode(data: bytes) -> object:
    """The value that was encoded; mappings come back as dict."""
    return json.loads(data, object_hook=_untagged)


def _tagged(value: object) -> object:
    if isinstance(value, tuple):
        return {TUPLE_TAG: [_tagged(item) for item in value]}
    if isinstance(value, list):
        return [_tagged(item) for item in value]
    if isinstance(value, Mapping):
        # A mapping that has one of our tags as a key must not be decoded as a tuple or as pairs.
        if all(isinstance(key, str) and key not in TAGS for key in value):
            return {key: _tagged(item) for key, item in value.items()}
        return {PAIRS_TAG: [[_tagged(key), _tagged(item)] for key, item in value.items()]}
    return value


def _untagged(value: dict[str, object]) -> object:
    match value:
        case {"__tuple__": [*items]} if len(value) == 1:
            return tuple(items)
        case {"__pairs__": [*pairs]} if len(value) == 1:
            return {pair[0]: pair[1] for pair in pairs if isinstance(pair, list)}
    return value
