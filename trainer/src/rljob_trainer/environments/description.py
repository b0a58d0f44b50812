"""What a user's environment class offers: its tools and its optional methods.

The rules are those of TRL 1.16, with three additions. Every public method is a tool except `reset` and `get_reward`.
Here `respond` is no tool either, nor is `close` if it takes no arguments; and `reusable = True` allows reuse of an
object. So classes that were written for TRL usually run unchanged.

Neither this module nor a process that runs environments imports transformers. Only `describe_class` does.
"""

from __future__ import annotations

import asyncio
import enum
import functools
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import get_type_hints

from rljob_trainer.errors import ConfigurationError, described
from rljob_trainer.processes.child_program import describe_error
from rljob_trainer.user_functions import find_named, kind_of, last_lines

RESET = "reset"
RESPOND = "respond"
GET_REWARD = "get_reward"
CLOSE = "close"
NAME_COLUMN = "environment"
"""The column of a row that names the class, if the job has several."""
_FLAGS = ("has_respond", "has_reward", "is_async")
_GENERATORS = (inspect.isgeneratorfunction, inspect.isasyncgenfunction)


@dataclass(frozen=True)
class ClassSpec:
    """One of the job's environment classes, or its agent's function."""

    name: str
    path: str
    """`package.module:Class`"""
    arguments: Mapping[str, object]
    """Keyword arguments of the constructor."""
    where: str
    """The field of the job, for messages: `spec.training.environment.classes[0]`."""
    is_agent: bool = False
    """True: not a class, but an agent's function `run(session, row)`; the arguments are those of the function."""

    def to_list(self) -> list[object]:
        """The fields as values that can be sent."""
        return [self.name, self.path, dict(self.arguments), self.where, self.is_agent]


@dataclass(frozen=True)
class EnvironmentDescription:
    """What a class offers. Can be sent as JSON."""

    name: str
    """Name of the class in the job."""
    tools: tuple[Mapping[str, object], ...]
    """A JSON schema for each tool, as chat templates take them: `{"type": "function", "function": {"name": ...}}`."""
    has_respond: bool
    has_reward: bool
    is_async: bool = False
    """Of an agent's function: whether it is async, so that several rollouts can share a process."""

    @property
    def tool_names(self) -> tuple[str, ...]:
        """The names of the tools."""
        functions = (tool["function"] for tool in self.tools)
        return tuple(str(each["name"]) for each in functions if isinstance(each, Mapping))

    def to_json(self) -> dict[str, object]:
        """The fields as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, object]) -> EnvironmentDescription:
        """The description from the result of `to_json`, also after it was written as JSON. Raises ValueError if the
        value has another form."""
        match value:
            case {"name": str() as name, "tools": [*tools]}:
                schemas = tuple(dict(tool) for tool in tools if isinstance(tool, Mapping))
                flags = [value.get(flag) is True for flag in _FLAGS]
                return cls(name, schemas, *flags)
        raise ValueError(f"not a description of an environment: {value!r:.200}")


def load_class(spec: ClassSpec) -> type:
    """Imports the class. Raises ConfigurationError if it cannot be imported, is not a class, or has no usable `reset`,
    `respond` or `get_reward`."""
    where = f"{spec.where}.path"
    found = find_named(spec.path, where)
    if not isinstance(found, type):
        raise ConfigurationError(f"{where}: {spec.path} is {kind_of(found)}; name a class")
    if not hasattr(found, RESET):
        raise ConfigurationError(
            f"{where}: {spec.path} has no method `reset`; add `def reset(self, **row)`, which begins a rollout and "
            "returns its first message or None"
        )
    for name, arguments in ((RESET, None), (RESPOND, ["message"]), (GET_REWARD, [])):
        if hasattr(found, name):
            _check_method(found, name, arguments, f"{where}: {spec.path}.{name}")
    return found


def load_function(spec: ClassSpec) -> Callable[..., object]:
    """Imports an agent's function. Raises ConfigurationError if it cannot be imported, or if it cannot be called with
    a session, a row and the job's arguments."""
    where = f"{spec.where}.path"
    found = find_named(spec.path, where)
    if isinstance(found, type) or not callable(found) or any(is_generator(found) for is_generator in _GENERATORS):
        raise ConfigurationError(
            f"{where}: {spec.path} is {kind_of(found)}; name a function `def run(session, row)`, which may be async"
        )
    try:
        signature = inspect.signature(found)
        signature.bind("session", {}, **spec.arguments)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"{where}: {spec.path} cannot be called with a session, a row and the arguments "
            f"{dict(spec.arguments)!r:.200} ({error}); write `def run(session, row)`, with a parameter for each"
        ) from error
    return found


def describe_function(function: Callable[..., object], spec: ClassSpec) -> EnvironmentDescription:
    """Describes an agent's function."""
    return EnvironmentDescription(spec.name, (), True, True, inspect.iscoroutinefunction(function))


def tool_names(cls: type) -> tuple[str, ...]:
    """The names of the methods that are tools, sorted. They are looked up on the class, because looking at an object
    would call the code of its properties."""
    special = {RESET, RESPOND, GET_REWARD, *([CLOSE] if is_closable(cls) else [])}
    public = [name for name in sorted(dir(cls)) if not name.startswith("_") and name not in special]
    return tuple(name for name in public if _is_method(inspect.getattr_static(cls, name, None)))


def _is_method(found: object) -> bool:
    """Whether what a class has under a name is a method of the user's, also one with a decorator: `functools.wraps`,
    which those of functools use, too, notes the function in `__wrapped__`. A property cannot be called."""
    if isinstance(found, classmethod | staticmethod):
        found = found.__func__
    if isinstance(found, functools.partialmethod | functools.singledispatchmethod) or inspect.isfunction(found):
        return True
    return callable(found) and not isinstance(found, type) and hasattr(found, "__wrapped__")


def is_closable(cls: type) -> bool:
    """Whether the class has a method `close` that takes no arguments. One with arguments is a tool."""
    close = inspect.getattr_static(cls, CLOSE, None)
    if not inspect.isfunction(close):
        return False
    return len(inspect.signature(close).parameters) == 1


def is_reusable(cls: type) -> bool:
    """Whether the class allows that an object is used for one rollout after another."""
    return getattr(cls, "reusable", False) is True


def takes_seed(cls: type) -> bool:
    """Whether `reset` has a parameter named `seed`; `**kwargs` is none."""
    seed = inspect.signature(getattr(cls, RESET)).parameters.get("seed")
    return seed is not None and seed.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def required_arguments(instance: object) -> list[str]:
    """The parameters of the object's `reset` without a default value, which the columns of a row must give."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(getattr(instance, RESET)).parameters.values()
    return [each.name for each in parameters if each.kind in named and each.default is each.empty]


def describe_class(cls: type, spec: ClassSpec) -> EnvironmentDescription:
    """Makes one object of the class and describes it. Raises ConfigurationError if the constructor fails, or if a tool
    has no type hints or no docstring."""
    # Imported here because it takes most of a second, and only the process that describes classes needs it.
    from transformers.utils import get_json_schema

    try:
        instance = cls(**spec.arguments)
    except BaseException as error:
        raise _constructor_failed(error, cls, spec) from error
    description = EnvironmentDescription(
        name=spec.name,
        tools=tuple(_schema(getattr(instance, name), name, spec, get_json_schema) for name in tool_names(cls)),
        has_respond=hasattr(cls, RESPOND),
        has_reward=hasattr(cls, GET_REWARD),
    )
    if is_closable(cls):
        _close(instance)
    return description


def _close(instance: object) -> None:
    """Closes an object outside of rollouts. An error of `close` is only logged."""
    try:
        closing = getattr(instance, CLOSE)()
        if inspect.iscoroutine(closing):
            asyncio.run(closing)
    except BaseException as error:
        print(f"close() {describe_error(error)}", file=sys.stderr)


def _check_method(cls: type, name: str, arguments: Sequence[str] | None, where: str) -> None:
    """Raises ConfigurationError, starting with `where`, if the method cannot be called with these positional arguments.
    None: its arguments are not known."""
    method = getattr(cls, name)
    if not callable(method):
        raise ConfigurationError(f"{where} is {kind_of(method)}; make it a method")
    if any(is_generator(method) for is_generator in _GENERATORS):
        raise ConfigurationError(f"{where} is {kind_of(method)}; use `return` instead of `yield`")
    try:
        signature = inspect.signature(method)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"{where} has no signature that Python can read ({error}); make it a method"
        ) from error
    if arguments is None:
        return
    own = [] if isinstance(inspect.getattr_static(cls, name), staticmethod | classmethod) else ["self"]
    try:
        signature.bind(*own, *arguments)
    except TypeError as error:
        shown = ", ".join(["self", *arguments])
        raise ConfigurationError(
            f"{where}{signature} cannot be called: {error}; write `def {name}({shown})`"
        ) from error


def _constructor_failed(error: BaseException, cls: type, spec: ClassSpec) -> ConfigurationError:
    try:
        inspect.signature(cls).bind(**spec.arguments)
    except TypeError as mismatch:
        seen = dict(spec.arguments)
        return ConfigurationError(
            f"{spec.where}.arguments: {spec.path}{inspect.signature(cls)} cannot be constructed with {seen!r:.200}: "
            f"{mismatch}; give the constructor the arguments that it needs"
        )
    except ValueError:
        # A class written in C may have no signature.
        pass
    return ConfigurationError(
        f"{spec.where}.path: the constructor of {spec.path} failed; fix this error:\n{last_lines(error)}"
    )


def _describe_enums(method: Callable[..., object], schema: object) -> None:
    """Describes parameters that are enums of strings by their values; transformers would write that they are objects.
    The method gets one of the values as a string. Raises TypeError for other enums."""
    match schema:
        case {"function": {"parameters": {"properties": dict() as properties}}}:
            for name, hint in get_type_hints(method).items():
                if name not in properties or not isinstance(hint, type) or not issubclass(hint, enum.Enum):
                    continue
                if not issubclass(hint, str):
                    raise TypeError(f"{name} is an enum of values that are not strings; use Literal, or an enum of str")
                properties[name] |= {"type": "string", "enum": [each.value for each in hint]}


def _schema(
    method: Callable[..., object], name: str, spec: ClassSpec, make_schema: Callable[[Callable[..., object]], object]
) -> Mapping[str, object]:
    where = f"{spec.where}.path: {spec.path}.{name}"
    if any(is_generator(method) for is_generator in _GENERATORS):
        raise ConfigurationError(f"{where} is {kind_of(method)}; use `return` instead of `yield`, or name it _{name}")
    try:
        if "self" in inspect.signature(method).parameters:
            raise TypeError("it cannot be called with named arguments")
        schema = make_schema(method)
        _describe_enums(method, schema)
    except Exception as error:
        raise ConfigurationError(
            f"{where} is a public method and therefore a tool, but its description cannot be made "
            f"({described(error)}); give each parameter a type hint and a line below `Args:` in the docstring, or name "
            f"the method _{name} if the model must not call it"
        ) from error
    if not isinstance(schema, Mapping):
        raise ConfigurationError(f"{where}: transformers made no schema but {schema!r:.200}; check its type hints")
    return dict(schema)
