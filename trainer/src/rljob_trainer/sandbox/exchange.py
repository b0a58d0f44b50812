"""How the two processes of an assert statement exchange values: the code of the response runs in one process, the
statement in the other.

Only plain data is exchanged, as JSON. A value of another kind stays in the code's process and gets a number; the
statement can call it, read its attributes and iterate over it, but it is equal to nothing. So an object with an
`__eq__` that always returns true does not make an assert statement pass.
"""

from __future__ import annotations

import base64
import builtins
import itertools
import json
import numbers
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import BinaryIO, NoReturn

MAX_ITEMS = 100_000
"""The maximum number of items when the statement iterates over a value of another kind, such as a generator."""


class UnsupportedTest(Exception):
    """An assert statement passes something to the code that is not plain data: the test cannot be used."""


def encode(value: object, keep: Callable[[object], int]) -> object:
    """The value as JSON. `keep` returns the number of a value that is not plain data."""
    if value is None or isinstance(value, bool | str):
        return value if value is None or isinstance(value, bool) else str(value)
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, list):
        return [encode(each, keep) for each in value]
    if isinstance(value, tuple):
        return {"tuple": [encode(each, keep) for each in value]}
    if isinstance(value, set | frozenset):
        return {"set": [encode(each, keep) for each in value]}
    if isinstance(value, dict):
        return {"dict": [[encode(key, keep), encode(each, keep)] for key, each in value.items()]}
    return {"object": keep(value)}


def decode(value: object, find: Callable[[int], object]) -> object:
    """Decodes a value that `encode` has written. `find` returns the value with a number."""
    match value:
        case list():
            return [decode(each, find) for each in value]
        case {"complex": [real, imaginary]}:
            return complex(real, imaginary)
        case {"bytes": str() as text}:
            return base64.b64decode(text)
        case {"tuple": list() as items}:
            return tuple(decode(each, find) for each in items)
        case {"set": list() as items}:
            return {decode(each, find) for each in items}
        case {"dict": list() as pairs}:
            return {decode(key, find): decode(each, find) for key, each in pairs}
        case {"object": int() as number}:
            return find(number)
    return value


def serve(namespace: Mapping[str, object], requests: BinaryIO, replies: BinaryIO) -> None:
    """The server, in the process of the code: replies to the requests of the statement's process."""
    kept: list[object] = []

    def keep(value: object) -> int:
        kept.append(value)
        return len(kept) - 1

    for line in requests:
        request = json.loads(line)
        reply: dict[str, object]
        try:
            target = request["target"]
            value = namespace[target] if isinstance(target, str) else kept[target]
            for name in request["attributes"]:
                value = getattr(value, name)
            arguments = [decode(each, kept.__getitem__) for each in request["arguments"]]
            keywords = {name: decode(each, kept.__getitem__) for name, each in request["keywords"].items()}
            if request["action"] == "call":
                value = value(*arguments, **keywords)  # type: ignore[operator]
            elif request["action"] == "iterate":
                value = list(itertools.islice(value, MAX_ITEMS))  # type: ignore[arg-type]
            reply = {"value": encode(value, keep), "arguments": [encode(each, keep) for each in arguments]}
        except BaseException as error:
            reply = {"raised": type(error).__name__, "text": str(error)[:1000]}
        replies.write(json.dumps(reply).encode() + b"\n")
        replies.flush()


class Connection:
    """The client, in the process of the assert statement: sends requests to the process of the code."""

    def __init__(self, requests: BinaryIO, replies: BinaryIO) -> None:
        self._requests = requests
        self._replies = replies

    def request(
        self,
        action: str,
        target: str | int,
        attributes: Sequence[str],
        arguments: Sequence[object] = (),
        keywords: Mapping[str, object] | None = None,
    ) -> object:
        """Returns the value that the code returns. If the code raises an exception, raises the builtin exception of the
        same name, or Exception if there is none."""
        message = {
            "action": action,
            "target": target,
            "attributes": list(attributes),
            "arguments": [encode(each, _number_of) for each in arguments],
            "keywords": {name: encode(each, _number_of) for name, each in (keywords or {}).items()},
        }
        self._requests.write(json.dumps(message).encode() + b"\n")
        self._requests.flush()
        line = self._replies.readline()
        if not line:
            raise RuntimeError("the code ended its process")
        match json.loads(line):
            case {"value": value, "arguments": list() as after}:
                for argument, changed in zip(arguments, after, strict=False):
                    self._update(argument, changed)
                return decode(value, self._remote)
            case {"raised": str() as name, "text": str() as text}:
                _raise(name, text)
        raise RuntimeError("the code wrote into the connection to the test")

    def _remote(self, number: int) -> Remote:
        return Remote(self, number)

    def _update(self, argument: object, changed: object) -> None:
        """Applies the change that the code has made to a list, dictionary or set."""
        if not isinstance(argument, list | dict | set) or encode(argument, _number_of) == changed:
            return
        value = decode(changed, self._remote)
        if isinstance(argument, list) and isinstance(value, list):
            argument[:] = value
        elif isinstance(argument, dict | set) and isinstance(value, dict | set):
            argument.clear()
            argument.update(value)


class Remote:
    """Something in the process of the code: a name, a value that is not plain data, or an attribute of one."""

    def __init__(self, connection: Connection, target: str | int, attributes: tuple[str, ...] = ()) -> None:
        self._connection = connection
        self._target = target
        self._attributes = attributes

    def __call__(self, *arguments: object, **keywords: object) -> object:
        return self._connection.request("call", self._target, self._attributes, arguments, keywords)

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return _value_or_remote(self._connection, self._target, (*self._attributes, name))

    def __iter__(self) -> Iterator[object]:
        items = self._connection.request("iterate", self._target, self._attributes)
        return iter(items) if isinstance(items, list) else iter(())


class Names(dict[str, object]):
    """The global names of a statement. A name that the statement does not define, and that is not a builtin, is looked
    up in the process of the code."""

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self._connection = connection

    def __missing__(self, name: str) -> object:
        if hasattr(builtins, name):
            raise KeyError(name)
        return _value_or_remote(self._connection, name, ())


def _value_or_remote(connection: Connection, target: str | int, attributes: tuple[str, ...]) -> object:
    value = connection.request("read", target, attributes)
    return Remote(connection, target, attributes) if isinstance(value, Remote) else value


def _number_of(value: object) -> int:
    if isinstance(value, Remote) and isinstance(value._target, int) and not value._attributes:
        return value._target
    raise UnsupportedTest(f"the test passes a value of type {type(value).__name__} to the code; use plain data")


def _raise(name: str, text: str) -> NoReturn:
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            error = kind(text)
        except TypeError:
            # For example UnicodeDecodeError, which needs five arguments.
            error = Exception(f"{name}: {text}")
        raise error
    raise Exception(f"{name}: {text}")
