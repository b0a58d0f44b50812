"""Decides whether an exception of a scorer means that a service that the scorer calls is unreachable.

Such an error says nothing about the response, so the pool retries later. An error of the scorer's own code must not
be hidden, so only exceptions of known kinds count. Libraries are recognized by the names of their exception classes,
without importing them.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator

_BUILTIN = (ConnectionError, TimeoutError, socket.gaierror)
_MISTAKES = (AttributeError, ImportError, LookupError, NameError, SyntaxError, TypeError)
"""If one of these is raised while another exception is handled, the code of the scorer is at fault."""
_CLASSES = frozenset(
    (
        *(("aiohttp", name) for name in ("ClientConnectionError", "ClientPayloadError")),
        *((package, "APIConnectionError") for package in ("anthropic", "openai")),
        *(("httpx", name) for name in ("NetworkError", "RemoteProtocolError", "TimeoutException")),
        *(("requests", name) for name in ("ChunkedEncodingError", "ConnectionError", "Timeout")),
        *(("urllib3", name) for name in ("MaxRetryError", "NewConnectionError", "ProtocolError", "TimeoutError")),
    )
)
"""Package and name of exception classes; their subclasses count, too."""
_STATUS_ATTRIBUTES = {
    ("aiohttp", "ClientResponseError"): ("status",),
    ("anthropic", "APIStatusError"): ("status_code",),
    ("httpx", "HTTPStatusError"): ("response", "status_code"),
    ("openai", "APIStatusError"): ("status_code",),
    ("requests", "HTTPError"): ("response", "status_code"),
    ("urllib", "HTTPError"): ("code",),
}
"""Where these exception classes have the HTTP status."""
_GRPC_CODES = ("DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "UNAVAILABLE")
TOO_MANY_REQUESTS = 429


def is_unreachable(error: BaseException) -> bool:
    """Whether the exception, or one that led to it, is a failure of a connection, a timeout of one, or an HTTP status
    429 or 5xx. For an ExceptionGroup this must be true of each of its exceptions."""
    return any(map(_is_one, _chain(error)))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The exception and those that led to it, up to a group. `raise A from B` leads from A to B; without `from`, the
    exception that was being handled counts unless A is a mistake in the code."""
    seen = set[int]()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        if isinstance(current, BaseExceptionGroup):
            return
        implicit = None if current.__suppress_context__ or isinstance(current, _MISTAKES) else current.__context__
        current = current.__cause__ or implicit


def _is_one(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return all(is_unreachable(each) for each in error.exceptions)
    if isinstance(error, _BUILTIN):
        # A broken pipe is a connection to a program on this machine, and the response may have ended this program.
        return not isinstance(error, BrokenPipeError)
    for kind in type(error).__mro__:
        name = kind.__module__.partition(".")[0], kind.__name__
        if name in _CLASSES:
            return True
        if name in _STATUS_ATTRIBUTES:
            status = _attribute(error, _STATUS_ATTRIBUTES[name])
            return isinstance(status, int) and (status == TOO_MANY_REQUESTS or 500 <= status < 600)
        if name == ("grpc", "RpcError"):
            return _grpc_code(error) in _GRPC_CODES
    return False


def _attribute(error: object, path: tuple[str, ...]) -> object:
    """The attribute at a path, or None; the classes of these libraries cannot be imported here."""
    for name in path:
        error = getattr(error, name, None)
    return error


def _grpc_code(error: BaseException) -> object:
    """The name of grpc's status code. grpc raises subclasses of RpcError that have a method `code`."""
    code = getattr(error, "code", None)
    return _attribute(code(), ("name",)) if callable(code) else None
