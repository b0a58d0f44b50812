"""`@register`: a worker method declares how its arguments are split over a worker group and its results gathered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from types import FunctionType
from typing import ParamSpec, TypeVar

from rljob_trainer.errors import DispatchError

REGISTRATION_ATTRIBUTE = "rljob_registration"

P = ParamSpec("P")
R = TypeVar("R")


class Dispatch(StrEnum):
    """How arguments reach the workers and what the caller gets back."""

    ONE_TO_ALL = "ONE_TO_ALL"
    """Every worker gets the same arguments; the caller gets a list with one result per worker."""
    ALL_TO_ALL = "ALL_TO_ALL"
    """Every argument is a list with one element per worker; so is the result."""
    RANK_ZERO = "RANK_ZERO"
    """Only worker 0 runs; the caller gets its result."""
    DP_COMPUTE_PROTO = "DP_COMPUTE_PROTO"
    """DataProto arguments are split by data-parallel rank, others are copied; the result is put together again."""
    DP_COMPUTE_METRIC = "DP_COMPUTE_METRIC"
    """Arguments as DP_COMPUTE_PROTO; the result is a dictionary of metrics, reduced over the workers."""


@dataclass(frozen=True)
class Registration:
    """What `@register` said. `mesh` names the worker's mesh that defines the data-parallel ranks."""

    dispatch: Dispatch
    mesh: str


def register(
    dispatch: Dispatch = Dispatch.DP_COMPUTE_PROTO, mesh: str = "dp"
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Marks a worker method as callable from the controller through its group."""

    def attach(method: Callable[P, R]) -> Callable[P, R]:
        setattr(method, REGISTRATION_ATTRIBUTE, Registration(dispatch, mesh))
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
