"""`@register`: a worker method declares how its arguments are split over a worker group and its results gathered.

A mistake raises a DispatchError with the method's name when the class is defined.
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
    """The arguments of `@register`. `dispatch` is the name of a mode; `mesh` names the worker's mesh that defines the
    data-parallel ranks. If `blocking` is False, the call does not wait for the result: the caller gets a `Pending`."""

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
    """Marks a method of a worker (it may be `async`) as callable from the controller through the worker's group.

    Raises DispatchError for anything that is not a method, for private methods and generators, for keyword-only and
    **kwargs parameters, for an unknown mode, and for other arguments of the wrong type."""
    if isinstance(dispatch, FunctionType):
        raise DispatchError(f"{dispatch.__qualname__}: write @register(...) with parentheses")

    def attach(method: Callable[P, R]) -> Callable[P, R]:
        if not isinstance(method, FunctionType):
            raise DispatchError(
                f"@register: must decorate a method (seen: {method!r}); put it directly above the `def` of an ordinary "
                "method"
            )
        where = method.__qualname__
        if not is_dispatch_mode(str(dispatch)):
            raise DispatchError(
                f"{where}: unknown dispatch mode {str(dispatch)!r} (there are: "
                f"{', '.join(dispatch_mode_names())}); add a mode with register_dispatch_mode"
            )
        if execute not in list(Execute):
            raise DispatchError(
                f"{where}: execute must be {' or '.join(map(repr, map(str, Execute)))} (seen: {execute!r})"
            )
        if not isinstance(blocking, bool) or not isinstance(mesh, str):
            raise DispatchError(
                f"{where}: blocking must be True or False, and mesh a string (seen: {blocking!r}, {mesh!r})"
            )
        _check_method(where, method)
        setattr(method, REGISTRATION_ATTRIBUTE, Registration(str(dispatch), Execute(execute), blocking, mesh))
        return method

    return attach


def _check_method(where: str, method: FunctionType) -> None:
    parameters = list(inspect.signature(method).parameters.values())
    if not parameters or parameters[0].name != "self":
        raise DispatchError(f"{where}: @register is for methods of a worker; the first parameter must be self")
    if method.__name__.startswith("_"):
        raise DispatchError(f"{where}: private methods cannot be registered; remove the _ at the start of the name")
    if inspect.isgeneratorfunction(method) or inspect.isasyncgenfunction(method):
        raise DispatchError(f"{where}: generators cannot be registered; return a list or a DataProto")
    for parameter in parameters:
        if parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_KEYWORD):
            raise DispatchError(
                f"{where}: parameter '{parameter}' is keyword-only, but arguments are passed by position; make it an "
                "ordinary parameter"
            )


def registrations(worker_class: type) -> dict[str, Registration]:
    """Returns all registered methods of a worker class, also inherited ones: name -> registration.

    Raises DispatchError for a registered method inside a wrapper such as staticmethod, and for an unregistered method
    that overrides a registered one. A subclass can remove an inherited method by setting its name to None."""
    found: dict[str, Registration] = {}
    for name in dir(worker_class):
        registration = _find(worker_class, name)
        if registration is not None:
            found[name] = registration
    return found


def registration_of(worker_class: type, method: str) -> Registration:
    """Returns the registration of one method. Raises DispatchError if the method is missing or not registered."""
    registration = _find(worker_class, method)
    if registration is None:
        raise DispatchError(f"{worker_class.__name__}.{method}: not callable through a group; mark it with @register")
    return registration


def _find(worker_class: type, name: str) -> Registration | None:
    """Returns the registration of a class attribute; None if the attribute does not exist or is not registered."""
    owners = [base for base in worker_class.__mro__ if name in vars(base)]
    if not owners:
        return None
    values = [vars(owner)[name] for owner in owners]
    first = values[0]
    registration = _attached(first)
    if registration is not None and not isinstance(first, FunctionType):
        raise DispatchError(
            f"{owners[0].__name__}.{name}: a {type(first).__name__} wraps a registered method; a group can only call "
            "ordinary methods"
        )
    if registration is None and isinstance(first, FunctionType):
        for owner, value in zip(owners[1:], values[1:], strict=True):
            if _attached(value) is not None:
                raise DispatchError(
                    f"{owners[0].__name__}.{name}: overrides {owner.__name__}.{name}, which is registered; mark it "
                    "with @register as well"
                )
    return registration


def _attached(value: object) -> Registration | None:
    """Returns what `register` has attached to a function, or to the function inside a staticmethod, property or other
    wrapper."""
    match value:
        case staticmethod() | classmethod():
            return _attached(value.__func__)
        case property():
            return _attached(value.fget)
        case FunctionType() | functools.partial() | functools.partialmethod():
            attached = vars(value).get(REGISTRATION_ATTRIBUTE)
        case _:
            # Wrappers made with functools.update_wrapper, such as a cache, have the function's attributes.
            attached = inspect.getattr_static(value, REGISTRATION_ATTRIBUTE, None)
    return attached if isinstance(attached, Registration) else None


def check_protocol(protocol: type, worker_class: type) -> None:
    """Checks that every method of the Protocol is registered on the worker class, with the same parameter names, order
    and defaults. The worker class may have more methods. Types are not compared, because a mode may return another type
    to the caller than the worker returns.

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
            differences.append(f"{name}({', '.join(declared)}) has the parameters ({', '.join(seen)})")
    if differences:
        raise DispatchError(
            f"{protocol.__name__} does not match {worker_class.__name__}, where {'; '.join(differences)}; make both "
            "equal"
        )


def protocol_methods(protocol: type) -> list[str]:
    """Returns the names of the methods that a Protocol declares, also inherited ones."""
    found: dict[str, None] = {}
    for base in reversed(protocol.__mro__):
        # Methods that `typing` adds to protocols are private.
        found |= {name: None for name, value in vars(base).items() if inspect.isfunction(value) and name[0] != "_"}
    return list(found)


def _parameters(owner: type, method: str) -> list[str]:
    """Returns each parameter of a method as a string with name and default, such as `rows=1`, without self."""
    parameters = list(inspect.signature(getattr(owner, method)).parameters.values())[1:]
    return [str(each.replace(annotation=each.empty)) for each in parameters]
