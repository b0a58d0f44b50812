"""`@register`: a worker method declares how its arguments are split over a worker group and its results gathered.

A mistake is refused where it is made, at the class's definition, with the method's name.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import ParamSpec, TypeVar

from rljob_trainer.dispatch.modes import Dispatch, Execute, dispatch_mode_names, is_dispatch_mode
from rljob_trainer.errors import DispatchError

REGISTRATION_ATTRIBUTE = "rljob_registration"
DEFAULT_MESH = "dp"

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Registration:
    """What `@register` said. `dispatch` is the name of a mode; `mesh` names the worker's mesh that defines the
    data-parallel ranks. With `blocking` false the caller gets a `Pending` at once."""

    dispatch: str
    execute: Execute
    blocking: bool
    mesh: str


def register(
    dispatch: Dispatch | str = Dispatch.DP_COMPUTE_PROTO,
    *,
    execute: Execute = Execute.ALL,
    blocking: bool = True,
    mesh: str = DEFAULT_MESH,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Marks a worker method, `async` ones included, as callable from the controller through its group.

    Raises DispatchError for what is no method, for parameters that can only be named or have no names, for anything
    else than the types above, and for a mode that no `Dispatch` and no `register_dispatch_mode` has named before."""
    if isinstance(dispatch, FunctionType):
        raise DispatchError(f"{dispatch.__qualname__}: write @register(), with parentheses and what they should say")

    def attach(method: Callable[P, R]) -> Callable[P, R]:
        if not isinstance(method, FunctionType):
            raise DispatchError(
                f"@register: marks methods (seen: {method!r}); write it next to `def`, on an ordinary method"
            )
        where = method.__qualname__
        if not is_dispatch_mode(str(dispatch)):
            raise DispatchError(
                f"{where}: no dispatch mode is called {str(dispatch)!r} (there are: "
                f"{', '.join(dispatch_mode_names())}); register_dispatch_mode adds one"
            )
        if execute not in list(Execute):
            raise DispatchError(
                f"{where}: execute must be {' or '.join(map(repr, map(str, Execute)))} (seen: {execute!r})"
            )
        if not isinstance(blocking, bool) or not isinstance(mesh, str):
            raise DispatchError(
                f"{where}: blocking must be True or False, and mesh a text (seen: {blocking!r}, {mesh!r})"
            )
        _check_method(where, method)
        setattr(method, REGISTRATION_ATTRIBUTE, Registration(str(dispatch), Execute(execute), blocking, mesh))
        return method

    return attach


def _check_method(where: str, method: FunctionType) -> None:
    parameters = list(inspect.signature(method).parameters.values())
    if not parameters or parameters[0].name != "self":
        raise DispatchError(f"{where}: @register marks methods of a worker; the first parameter must be self")
    if method.__name__.startswith("_"):
        raise DispatchError(f"{where}: a group has no private methods; give it a name without _ at its beginning")
    if inspect.isgeneratorfunction(method) or inspect.isasyncgenfunction(method):
        raise DispatchError(f"{where}: what it yields cannot travel; return a list or a DataProto")
    for parameter in parameters:
        if parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_KEYWORD):
            raise DispatchError(
                f"{where}: parameter '{parameter}' can only be given by name, and arguments travel by their places; "
                "make it an ordinary one"
            )


def registrations(worker_class: type) -> dict[str, Registration]:
    """All registered methods of a worker class, inherited ones included: name -> registration.

    Raises DispatchError for a method that is wrapped so that it cannot be called through a group, and for one that
    overrides a registered method and is not registered itself. A class that sets the name to None takes it away."""
    found: dict[str, Registration] = {}
    for name in dir(worker_class):
        registration = _find(worker_class, name)
        if registration is not None:
            found[name] = registration
    return found


def registration_of(worker_class: type, method: str) -> Registration:
    """The registration of one method. Raises DispatchError when the method is missing or not registered."""
    registration = _find(worker_class, method)
    if registration is None:
        raise DispatchError(f"{worker_class.__name__}.{method}: not callable through a group; mark it with @register")
    return registration


def _find(worker_class: type, name: str) -> Registration | None:
    """The registration of what the class has under that name, or None."""
    owners = [base for base in worker_class.__mro__ if name in vars(base)]
    if not owners:
        return None
    values = [vars(owner)[name] for owner in owners]
    first = values[0]
    registration = _attached(first)
    if registration is not None and not isinstance(first, FunctionType):
        raise DispatchError(
            f"{owners[0].__name__}.{name}: a {type(first).__name__} around a registered method; only ordinary methods "
            "are called through a group"
        )
    if registration is None and isinstance(first, FunctionType):
        for owner, value in zip(owners[1:], values[1:], strict=True):
            if _attached(value) is not None:
                raise DispatchError(
                    f"{owners[0].__name__}.{name}: overrides {owner.__name__}.{name}, which is registered; mark it "
                    "with @register, too"
                )
    return registration


def _attached(value: object) -> Registration | None:
    """What `register` has attached to a function, or to the one within a staticmethod, property or other wrapper."""
    match value:
        case staticmethod() | classmethod():
            return _attached(value.__func__)
        case property():
            return _attached(value.fget)
        case FunctionType() | functools.partial() | functools.partialmethod():
            attached = vars(value).get(REGISTRATION_ATTRIBUTE)
        case _:
            # What functools.update_wrapper has made, such as a cache, holds the attributes of the function.
            attached = inspect.getattr_static(value, REGISTRATION_ATTRIBUTE, None)
    return attached if isinstance(attached, Registration) else None


def check_protocol(protocol: type, worker_class: type) -> None:
    """Every method of the Protocol must be registered on the worker class, with parameters of the same names, in the
    same order, and with defaults for the same ones. The Protocol need not have all methods; types are not compared,
    because a mode gives the caller another type than the worker returns.

    Raises DispatchError with all differences."""
    registered = registrations(worker_class)
    differences = []
    for name in protocol_methods(protocol):
        if name not in registered:
            is_there = hasattr(worker_class, name)
            differences.append(f"{name} is {'not marked with @register' if is_there else 'missing'}")
            continue
        seen, declared = _parameters(worker_class, name), _parameters(protocol, name)
        if seen != declared:
            differences.append(f"{name}({', '.join(declared)}) takes ({', '.join(seen)})")
    if differences:
        raise DispatchError(
            f"{protocol.__name__} does not fit {worker_class.__name__}: there, {'; '.join(differences)}; make the two "
            "alike"
        )


def protocol_methods(protocol: type) -> list[str]:
    """The methods that a Protocol declares, inherited ones included."""
    found: dict[str, None] = {}
    for base in reversed(protocol.__mro__):
        # What typing puts into protocols is private.
        found |= {name: None for name, value in vars(base).items() if inspect.isfunction(value) and name[0] != "_"}
    return list(found)


def _parameters(owner: type, method: str) -> list[str]:
    """Names and defaults, without self."""
    parameters = list(inspect.signature(getattr(owner, method)).parameters.values())[1:]
    return [str(each.replace(annotation=each.empty)) for each in parameters]
