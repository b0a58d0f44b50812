"""The form of plain data in JSON, in which the two processes of an assert statement exchange values.

None, booleans, numbers, strings and lists are as in JSON. Any other value is an object with one key, the name of its
kind, such as `{"tuple": [1, 2]}`. A value that is not plain data is `{"object": number}`.
"""

from __future__ import annotations

import base64
import numbers
import sys
from collections import Counter, deque
from collections.abc import Callable, ItemsView, KeysView, Mapping, ValuesView
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any

_SIMPLE_KINDS: Mapping[str, tuple[type, Callable[[Any], object], Callable[[Any], object]]] = {
    "complex": (complex, lambda value: [value.real, value.imag], lambda parts: complex(*parts)),
    "bytes": (bytes, lambda value: base64.b64encode(value).decode(), base64.b64decode),
    "bytearray": (bytearray, list, bytearray),
    "range": (range, lambda value: [value.start, value.stop, value.step], lambda parts: range(*parts)),
    "fraction": (Fraction, lambda value: [value.numerator, value.denominator], lambda parts: Fraction(*parts)),
    "decimal": (Decimal, str, Decimal),
    "datetime": (datetime, datetime.isoformat, datetime.fromisoformat),
    "date": (date, date.isoformat, date.fromisoformat),
    "time": (time, time.isoformat, time.fromisoformat),
    "timedelta": (
        timedelta,
        lambda value: [value.days, value.seconds, value.microseconds],
        lambda parts: timedelta(*parts),
    ),
}
"""For each kind its type, and how a value becomes JSON and back. A datetime is also a date, so it comes first."""
_CONTAINER_KINDS: Mapping[str, tuple[type, Callable[[list[Any]], object]]] = {
    "tuple": (tuple, tuple),
    "set": (set, set),
    "frozenset": (frozenset, frozenset),
    "deque": (deque, deque),
    "keys": (KeysView, lambda items: dict.fromkeys(items).keys()),
    "values": (ValuesView, lambda items: dict(enumerate(items)).values()),
    "items": (ItemsView, lambda items: dict(items).items()),
}
"""For each kind of container its type, and how a value is made from a list of its items."""
_ARRAY_KINDS = "biufcU"
"""The kinds of NumPy's data types that are exchanged: booleans, numbers and strings."""


def encode(value: object, keep: Callable[[object], int]) -> object:
    """The value as JSON. `keep` returns the number of a value that is not plain data."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        # Not `str(value)`: of an enum of strings, that is the name.
        return str.__str__(value)
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, list):
        return [encode(each, keep) for each in value]
    if isinstance(value, dict):
        pairs = [[encode(key, keep), encode(each, keep)] for key, each in value.items()]
        return {"counter" if isinstance(value, Counter) else "dict": pairs}
    for name, (kind, make_json, _) in _SIMPLE_KINDS.items():
        if isinstance(value, kind):
            return {name: make_json(value)}
    for name, (kind, _) in _CONTAINER_KINDS.items():
        if isinstance(value, kind):
            return {name: [encode(each, keep) for each in value]}  # type: ignore[attr-defined]
    return _encode_numpy(value, keep) or {"object": keep(value)}


def decode(value: object, find: Callable[[int], object]) -> object:
    """The value of its JSON. `find` returns the value with a number."""
    if isinstance(value, list):
        return [decode(each, find) for each in value]
    if not isinstance(value, dict):
        return value
    [(name, content)] = value.items()
    match name, content:
        case "object", int() as number:
            return find(number)
        case "dict" | "counter", list() as pairs:
            found = {decode(key, find): decode(each, find) for key, each in pairs}
            return Counter(found) if name == "counter" else found
        case "scalar", item:
            return decode(item, find)
        case "array", [str() as kind, list() as shape, list() as items]:
            return sys.modules["numpy"].array(decode(items, find), kind).reshape(shape)
    if name in _CONTAINER_KINDS:
        return _CONTAINER_KINDS[name][1]([decode(each, find) for each in content])
    return _SIMPLE_KINDS[name][2](content)


def is_array(value: object) -> bool:
    """Whether the value is an array of NumPy."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _encode_numpy(value: object, keep: Callable[[object], int]) -> dict[str, object] | None:
    """The JSON of an array or scalar of NumPy; None for other values, and for data types that are not plain data."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.ndarray | numpy.generic):
        return None
    if value.dtype.kind not in _ARRAY_KINDS:
        return None
    items = [encode(each, keep) for each in value.ravel().tolist()]
    if isinstance(value, numpy.generic):
        # It becomes a number of Python. A longdouble has none with the same value.
        return {"scalar": items[0]} if not isinstance(value.item(), numpy.generic) else None
    return {"array": [value.dtype.str, list(value.shape), items]}
