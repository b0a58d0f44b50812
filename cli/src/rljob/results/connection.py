"""Connections to the program in the pod (`pod_file_server`), over `exec` of the API server."""

from __future__ import annotations

import json
import ssl
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

from rljob.errors import ClusterError
from rljob.plain_text import one_line

if TYPE_CHECKING:
    from websocket import WebSocket

ResultT = TypeVar("ResultT")

_STDIN, _STDOUT, _STDERR, _STATUS = range(4)
"""The first byte of each message: the stream that it belongs to. `_STATUS`: how the program ended, as JSON."""
_MAX_STDIN_BYTES = 16 * 1024
"""Bytes of standard input in one message. Some proxies reject long messages."""
_MAX_STDERR_BYTES = 4096


class BrokenConnectionError(Exception):
    """The connection ended before the response was complete; another connection may succeed."""


class PodGoneError(BrokenConnectionError):
    """The pod does not exist any more, or it has ended; another pod may succeed."""


class Connection(Protocol):
    """Standard input and standard output of a program. All methods may raise BrokenConnectionError."""

    def send(self, data: bytes) -> None:
        """Writes to standard input."""

    def receive(self) -> bytes:
        """The next bytes of standard output, at least one."""

    def close(self) -> None:
        """Closes the connection; the program gets the end of its standard input. Raises nothing."""


class ExecConnection:
    """A program that was started in a container by `exec`, over a WebSocket (protocol v4.channel.k8s.io)."""

    def __init__(self, socket: WebSocket) -> None:
        self._socket = socket
        self._stderr = b""

    def send(self, data: bytes) -> None:
        """Writes to standard input."""
        for start in range(0, len(data), _MAX_STDIN_BYTES):
            piece = bytes([_STDIN]) + data[start : start + _MAX_STDIN_BYTES]
            _unbroken(partial(self._socket.send_binary, piece))

    def receive(self) -> bytes:
        """The next bytes of standard output. Raises ClusterError if the program could not be started."""
        while True:
            message = _unbroken(self._socket.recv)
            data = message if isinstance(message, bytes) else message.encode()
            if not data:
                raise BrokenConnectionError(self._ending("the connection was closed"))
            channel, content = data[0], data[1:]
            if channel == _STDOUT and content:
                return content
            if channel == _STDERR:
                self._stderr = (self._stderr + content)[-_MAX_STDERR_BYTES:]
            if channel == _STATUS:
                raise self._ended(content)

    def close(self) -> None:
        """Closes the connection without waiting for the other side."""
        self._socket.shutdown()  # type: ignore[no-untyped-call]

    def _ending(self, reason: str) -> str:
        stderr = one_line(self._stderr.decode(errors="replace"))
        return f"{reason}: {stderr}" if stderr else reason

    def _ended(self, content: bytes) -> Exception:
        """The error for a program that has ended. `content`: a `Status` object of Kubernetes."""
        try:
            status = json.loads(content)
            message = str(status.get("message", "")) if isinstance(status, dict) else ""
        except ValueError:
            message = content.decode(errors="replace")
        reason = self._ending(one_line(message) or "the program in the pod ended")
        if "executable file not found" in reason or "no such file or directory" in reason:
            return ClusterError(
                f"the image of the pod cannot run python3 ({reason}); use an image that has it with --image"
            )
        if "container not found" in reason or "not running" in reason:
            return PodGoneError(reason)
        return BrokenConnectionError(reason)


def _unbroken(action: Callable[[], ResultT]) -> ResultT:
    from websocket import WebSocketException

    try:
        return action()
    except (WebSocketException, OSError, ssl.SSLError) as error:
        raise BrokenConnectionError(one_line(error) or type(error).__name__) from error
