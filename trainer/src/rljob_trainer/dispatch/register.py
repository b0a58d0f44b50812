"""`@register`: a worker method declares how its arguments are split over a worker group and its results gathered.

A mistake is refused where it is made, at the class's definition, with the method's name.
"""

from __future__ import annotations

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

    Raises DispatchError for what is no method, and for a mode that no `Dispatch` and no `register_dispatch_mode` has
    named before."""

    def attach(method: Callable[P, R]) -> Callable[P, R]:
        if not isinstance(method, FunctionType):
            raise DispatchError(
                f"@register: marks methods (seen: {method!r}); write it next to `def`, below @staticmethod and the like"
            )
        where = method.__qualname__
        if not is_dispatch_mode(str(dispatch)):
            raise DispatchError(
                f"{where}: no dispatch mode is called {str(dispatch)!r} (there are: "
                f"{', '.join(dispatch_mode_names())}); register_dispatch_mode adds one"
            )
        if next(iter(inspect.signature(method).parameters), None) != "self":
            raise DispatchError(f"{where}: @register marks methods of a worker; the first parameter must be self")
        setattr(method, REGISTRATION_ATTRIBUTE, Registration(str(dispatch), execute, blocking, mesh))
        return method

    return attach


def registrations(worker_class: type) -> dict[str, Registration]:
    """All registered methods of a worker class, inherited ones included: name -> registration."""
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
    """The registration stored on the function of that name, or None."""
    for base in worker_class.__mro__:
        function = vars(base).get(name)
        if isinstance(function, FunctionType):
            registration = vars(function).get(REGISTRATION_ATTRIBUTE)
            return registration if isinstance(registration, Registration) else None
    return None
