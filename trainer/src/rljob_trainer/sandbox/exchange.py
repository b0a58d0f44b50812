"""How the two processes of an assert statement exchange values: the code of the response runs in one process, the
statement in the other.

Only plain data is exchanged (`plain_data`). A value of another kind stays in the code's process and gets a number; the
statement can use it as an object (`Remote`), but it is equal only to values of the code. So an object with an `__eq__`
that always returns true does not make an assert statement pass.
"""

from __future__ import annotations

import builtins
import contextlib
import itertools
import json
import operator
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import BinaryIO, NoReturn

from rljob_trainer.sandbox.plain_data import decode, encode, is_array

MAX_ITEMS = 100_000
"""The maximum number of items when the statement iterates over a value of another kind, such as a generator."""


class UnsupportedTest(Exception):
    """An assert statement passes something to the code that is not plain data: the test cannot be used."""


_OPERATIONS: Mapping[str, Callable[..., object]] = {
    "call": lambda function, *arguments, **keywords: function(*arguments, **keywords),
    "attribute": getattr,
    "set attribute": setattr,
    "item": operator.getitem,
    "set item": operator.setitem,
    "items": lambda value: list(itertools.islice(value, MAX_ITEMS)),
    "next": next,
    "bool": bool,
    "len": len,
    "hash": hash,
    "str": str,
    "repr": repr,
    "is instance": isinstance,
    "==": operator.eq,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
"""The operations that the statement can request; the first argument is a value of the code. No operation may send the
code a value with which a result is compared. So operators such as `-` are missing: with `-`, the test
`abs(f(1) - 3) < 1e-6` would send the expected 3."""


def serve(namespace: Mapping[str, object], requests: BinaryIO, replies: BinaryIO) -> None:
    """Replies to the requests of the statement's process. Runs in the process of the code."""
    kept: list[object] = []
    numbers: dict[int, int] = {}
    """The numbers of the kept values, by their `id`."""

    def keep(value: object) -> int:
        if id(value) not in numbers:
            numbers[id(value)] = len(kept)
            kept.append(value)
        return numbers[id(value)]

    for line in requests:
        request = json.loads(line)
        reply: dict[str, object]
        try:
            arguments = [decode(each, kept.__getitem__) for each in request["arguments"]]
            keywords = {name: decode(each, kept.__getitem__) for name, each in request["keywords"].items()}
            if request["operation"] == "name":
                value = namespace[str(arguments[0])]
            else:
                value = _OPERATIONS[request["operation"]](*arguments, **keywords)
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
        self._remotes: dict[int, Remote] = {}

    def request(
        self, operation: str, arguments: Sequence[object], keywords: Mapping[str, object] | None = None
    ) -> object:
        """Returns the value that the code returns. If the code raises an exception, raises the builtin exception of the
        same name, or Exception if there is none."""
        message = {
            "operation": operation,
            "arguments": [encode(each, _number_of) for each in arguments],
            "keywords": {name: encode(each, _number_of) for name, each in (keywords or {}).items()},
        }
        line = b""
        with contextlib.suppress(BrokenPipeError):
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
        return self._remotes.setdefault(number, Remote(self, number))

    def _update(self, argument: object, changed: object) -> None:
        """Applies the change that the code has made to a list, dictionary, set or array."""
        is_changeable = isinstance(argument, list | deque | dict | set) or is_array(argument)
        if not is_changeable or encode(argument, _number_of) == changed:
            return
        value = decode(changed, self._remote)
        if isinstance(argument, list) and isinstance(value, list):
            argument[:] = value
        elif isinstance(argument, deque) and isinstance(value, deque):
            argument.clear()
            argument.extend(value)
        elif isinstance(argument, dict | set) and isinstance(value, dict | set):
            argument.clear()
            argument.update(value)
        elif is_array(argument) and is_array(value):
            argument[...] = value  # type: ignore[index]


class Remote:
    """A value in the process of the code that is not plain data. All operations are those of the code, but plain data
    is never equal to it, and never greater or less."""

    _connection: Connection
    _number: int

    def __init__(self, connection: Connection, number: int) -> None:
        object.__setattr__(self, "_connection", connection)
        object.__setattr__(self, "_number", number)

    def __call__(self, *arguments: object, **keywords: object) -> object:
        return self._connection.request("call", (self, *arguments), keywords)

    def __getattr__(self, name: str) -> object:
        # Python and NumPy look for methods with such names; they must not get those of the code.
        if name.startswith("__"):
            raise AttributeError(name)
        return self._ask("attribute", name)

    def __setattr__(self, name: str, value: object) -> None:
        self._ask("set attribute", name, value)

    def __getitem__(self, key: object) -> object:
        return self._ask("item", key)

    def __setitem__(self, key: object, value: object) -> None:
        self._ask("set item", key, value)

    def __iter__(self) -> Iterator[object]:
        items = self._ask("items")
        return iter(items) if isinstance(items, list) else iter(())

    def __next__(self) -> object:
        return self._ask("next")

    def __bool__(self) -> bool:
        return self._ask("bool") is True

    def __len__(self) -> int:
        return self._ask("len")  # type: ignore[return-value]

    def __hash__(self) -> int:
        return self._ask("hash")  # type: ignore[return-value]

    def __str__(self) -> str:
        return self._ask("str")  # type: ignore[return-value]

    def __repr__(self) -> str:
        return self._ask("repr")  # type: ignore[return-value]

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, Remote) and instance._ask("is instance", self) is True

    def __eq__(self, other: object) -> bool:
        return self._compare("==", other)

    def __lt__(self, other: object) -> bool:
        return self._compare("<", other)

    def __le__(self, other: object) -> bool:
        return self._compare("<=", other)

    def __gt__(self, other: object) -> bool:
        return self._compare(">", other)

    def __ge__(self, other: object) -> bool:
        return self._compare(">=", other)

    def _compare(self, operation: str, other: object) -> bool:
        """Lets the code compare only its own values. Otherwise the code would get the expected value, and could decide
        that it is equal."""
        return self._ask(operation, other) is True if isinstance(other, Remote) else NotImplemented

    def _ask(self, operation: str, *arguments: object) -> object:
        return self._connection.request(operation, (self, *arguments))


class Names(dict[str, object]):
    """The global names of a statement. A name that the statement does not define, and that is neither one of `modules`
    nor a builtin, is looked up in the process of the code."""

    def __init__(self, connection: Connection, modules: Mapping[str, ModuleType]) -> None:
        super().__init__()
        self._connection = connection
        self._modules = modules

    def __missing__(self, name: str) -> object:
        if name in self._modules:
            return self._modules[name]
        if hasattr(builtins, name):
            raise KeyError(name)
        return self._connection.request("name", (name,))


def _number_of(value: object) -> int:
    if isinstance(value, Remote):
        return value._number
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
