"""Whether a Protocol, which tells type checkers what a worker group offers, fits the class of the workers."""

from __future__ import annotations

import inspect

from rljob_trainer.dispatch.register import registrations
from rljob_trainer.errors import DispatchError


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
