"""An HTTP proxy in front of an S3 server that injects faults into chosen requests.

It forwards every byte of a request, so signatures stay valid. It sees all requests of the client, including retries.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from io import BufferedReader

SLOW_SECONDS = 0.02


class Fault(StrEnum):
    """What happens to a request."""

    SLOW_DOWN = "503 SlowDown, not forwarded"
    INTERNAL_ERROR = "500, not forwarded"
    FORBIDDEN = "403 AccessDenied, not forwarded"
    LOST_REQUEST = "connection closed, not forwarded"
    LOST_ANSWER = "forwarded, connection closed without an answer"
    FALSE_ANSWER = "forwarded, 503 instead of the answer"
    CUT_ANSWER = "forwarded, connection closed in the middle of the answer"
    IGNORED_CONDITION = "forwarded, answered with 200 although the file exists"
    SLOW_ANSWER = "forwarded, answered late"


@dataclass(frozen=True)
class Request:
    """A request of the client."""

    number: int
    """From 0."""
    method: str
    target: str
    """Path and query."""
    is_conditional: bool
    """Whether it has the header If-None-Match."""

    @property
    def kind(self) -> str:
        """Method, and what it does, such as `PUT if absent`."""
        if self.is_conditional:
            return f"{self.method} if absent"
        query = self.target.partition("?")[2]
        for name, what in (("list-type", "list"), ("uploads", "begin"), ("partNumber", "part"), ("uploadId", "upload")):
            if name in query:
                return f"{self.method} {what}"
        return self.method


Choose = Callable[[Request], Fault | Callable[[bool], None] | None]
"""The fault of a request; or a function that is called before the request is forwarded (with False), and before it is
answered (with True)."""


_STATUS = {
    Fault.SLOW_DOWN: (503, "Service Unavailable", "SlowDown"),
    Fault.INTERNAL_ERROR: (500, "Internal Server Error", "InternalError"),
    Fault.FORBIDDEN: (403, "Forbidden", "AccessDenied"),
}
_NOT_FORWARDED = {*_STATUS, Fault.LOST_REQUEST}


class FaultProxy:
    """The proxy. `choose` may be replaced at any time."""

    def __init__(self, port: int) -> None:
        self._target = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self._lock = threading.Lock()
        self.requests: list[Request] = []
        self.choose: Choose = lambda _: None

    @property
    def endpoint(self) -> str:
        """URL of the proxy."""
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def reset(self, choose: Choose = lambda _: None) -> None:
        """Forgets the requests, and sets `choose`."""
        with self._lock:
            self.requests, self.choose = [], choose

    def serve(self) -> None:
        """Accepts connections until `close`."""
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._serve_client, args=(connection,), daemon=True).start()

    def close(self) -> None:
        """Ends `serve`."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _serve_client(self, client: socket.socket) -> None:
        with suppress(OSError, EOFError), client, socket.create_connection(self._target) as server:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            from_client, from_server = client.makefile("rb"), server.makefile("rb")
            with from_client, from_server:
                while self._exchange(client, server, from_client, from_server):
                    pass

    def _exchange(
        self, client: socket.socket, server: socket.socket, requests: BufferedReader, answers: BufferedReader
    ) -> bool:
        """Forwards one request and its answer. Returns whether the connection continues."""
        head, fields = _head(requests)
        body = requests.read(int(fields.get("content-length", "0")))
        method, target, _ = head.split(b"\r\n", 1)[0].decode().split(" ")
        with self._lock:
            request = Request(len(self.requests), method, target, "if-none-match" in fields)
            self.requests.append(request)
            fault = self.choose(request)
        if callable(fault):
            fault(False)
        elif fault in _NOT_FORWARDED:
            return _send_fault(client, fault)
        server.sendall(head + body)
        answer = _answer(answers, method)
        if callable(fault):
            fault(True)
        elif fault is Fault.LOST_ANSWER:
            return False
        elif fault is Fault.CUT_ANSWER:
            client.sendall(answer[: len(answer) // 2])
            return False
        elif fault is Fault.FALSE_ANSWER:
            return _send_fault(client, Fault.SLOW_DOWN)
        elif fault is Fault.IGNORED_CONDITION and answer.startswith(b"HTTP/1.1 412"):
            answer = b'HTTP/1.1 200 OK\r\nETag: "1"\r\nContent-Length: 0\r\n\r\n'
        elif fault is Fault.SLOW_ANSWER:
            time.sleep(SLOW_SECONDS)
        client.sendall(answer)
        return True


@contextmanager
def fault_proxy(port: int) -> Iterator[FaultProxy]:
    """Runs a proxy in front of the server at `port` within the context."""
    proxy = FaultProxy(port)
    threading.Thread(target=proxy.serve, daemon=True).start()
    try:
        yield proxy
    finally:
        proxy.close()


def _head(stream: BufferedReader) -> tuple[bytes, dict[str, str]]:
    """The first line and the fields of a message, as bytes and parsed. Raises EOFError at the end of the stream."""
    lines = []
    while (line := stream.readline()) not in (b"\r\n", b""):
        lines.append(line)
    if not lines:
        raise EOFError
    pairs = (line.decode("latin-1").partition(":") for line in lines[1:])
    return b"".join(lines) + b"\r\n", {name.lower(): value.strip() for name, _, value in pairs}


def _answer(stream: BufferedReader, method: str) -> bytes:
    """One answer, with its body."""
    head, fields = _head(stream)
    if method == "HEAD" or head.split(b" ")[1] in (b"204", b"304"):
        return head
    if fields.get("transfer-encoding") != "chunked":
        return head + stream.read(int(fields.get("content-length", "0")))
    parts = [head]
    while True:
        length = stream.readline()
        parts.append(length + stream.read(int(length, 16) + 2))
        if int(length, 16) == 0:
            return b"".join(parts)


def _send_fault(client: socket.socket, fault: Fault) -> bool:
    """Answers with an error, or closes the connection. Returns whether the connection continues."""
    if fault is Fault.LOST_REQUEST:
        return False
    status, reason, code = _STATUS[fault]
    body = f'<?xml version="1.0"?><Error><Code>{code}</Code></Error>'.encode()
    head = f"HTTP/1.1 {status} {reason}\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\n\r\n"
    client.sendall(head.encode() + body)
    return True
