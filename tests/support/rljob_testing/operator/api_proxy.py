"""A proxy between the operator and the API server that records every request and can act before and after each one.

With it a test kills the operator before a write reaches the server or before the response comes back, or responds
instead of the server.
"""

from __future__ import annotations

import http.client
import json
import re
import ssl
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from email.utils import format_datetime, parsedate_to_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from rljob_testing.cluster.api_server import ApiServer
from rljob_testing.local_servers import QuietHandler, running_http_server, shut_down

VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
CHUNK_BYTES = 65536
DROPPED_HEADERS = {"host", "connection", "content-length", "transfer-encoding"}
PATH = re.compile(
    r"/(?:api|apis/(?P<group>[^/]+))/v[^/]+(?:/namespaces/(?P<namespace>[^/]+))?"
    r"/(?P<plural>[^/]+)(?:/(?P<name>[^/]+)(?P<sub>/[^/]+)?)?$"
)


@dataclass(frozen=True)
class SeenRequest:
    """One request in the terms of role-based access control."""

    verb: str
    group: str
    resource: str
    """Resource with its subresource, such as `rljobs/status`."""
    name: str
    labels: str = ""
    """The label selector of a list request."""
    token: str = field(default="", compare=False, repr=False)
    """The bearer token of the request."""

    @property
    def is_write(self) -> bool:
        """Whether the request changes an object."""
        return self.verb in VERBS.values()

    def __str__(self) -> str:
        return f"{self.verb} {self.resource}"


@dataclass(frozen=True)
class Fault:
    """A response that the proxy sends instead of the server's."""

    status: int
    reason: str
    headers: Mapping[str, str] = field(default_factory=dict)
    body: str | None = None
    """Body of the response; None for a Status object."""
    num_sent: int | None = None
    """The connection breaks after this number of bytes of the body; None sends all of it."""


class _Upstream(http.client.HTTPSConnection):
    is_cut = False


class ApiProxy:
    """Forwards requests to the API server.

    `before` and `after` are called around each request that is not a watch; `after` also gets the response. If `before`
    raises ConnectionAbortedError, the request does not reach the server. If `fault` returns a Fault, it is sent instead
    of the server's response. `events` maps each event of a watch (one line) to the events that are forwarded.
    """

    def __init__(self, server: ApiServer) -> None:
        self._target = urlsplit(server.url)
        self._tls = ssl.create_default_context(cafile=str(server.certificate))
        self._lock = threading.Lock()
        self._upstreams: list[_Upstream] = []
        self.requests: list[SeenRequest] = []
        self.before: Callable[[SeenRequest], None] = lambda _: None
        self.after: Callable[[SeenRequest, bytes], None] = lambda _, __: None
        self.fault: Callable[[SeenRequest], Fault | None] = lambda _: None
        self.events: Callable[[SeenRequest, bytes], Iterable[bytes]] = lambda _, event: (event,)
        self.seconds_ahead = 0.0
        """How far the `Date` header of responses is ahead of the real time."""
        proxy = self

        class Handler(QuietHandler):
            upstream: _Upstream | None = None

            def handle_one_request(self) -> None:
                try:
                    super().handle_one_request()
                except http.client.HTTPException:
                    self.close_connection = True

            def finish(self) -> None:
                if self.upstream is not None:
                    self.upstream.close()
                super().finish()

            def do_GET(self) -> None:
                if self.upstream is None:
                    self.upstream = proxy.connect()
                proxy.forward(self, self.upstream)

            do_POST = do_PUT = do_PATCH = do_DELETE = do_GET

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        """The proxy's address: plain HTTP on this machine."""
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def num_requests(self, what: str) -> int:
        """Number of requests with this label, such as `watch pods`."""
        with self._lock:
            return sum(str(request) == what for request in self.requests)

    def connect(self) -> _Upstream:
        """Opens a connection to the server."""
        assert self._target.hostname is not None
        made = _Upstream(self._target.hostname, self._target.port, context=self._tls, timeout=400)
        with self._lock:
            self._upstreams.append(made)
        return made

    def cut(self) -> None:
        """Breaks all connections to the server, also those of watches, for which a stopping server would wait."""
        with self._lock:
            for upstream in self._upstreams:
                upstream.is_cut = True
                if upstream.sock is not None:
                    shut_down(upstream.sock)
            self._upstreams.clear()

    def forward(self, client: BaseHTTPRequestHandler, upstream: _Upstream) -> None:
        """Forwards one request."""
        body = client.rfile.read(int(client.headers.get("Content-Length") or 0))
        token = (client.headers.get("Authorization") or "").rpartition(" ")[2]
        seen = seen_request(client.command, client.path, token)
        if seen is not None:
            with self._lock:
                self.requests.append(seen)
            fault = self.fault(seen)
            if fault is not None:
                text = fault.body if fault.body is not None else json.dumps(_status(fault))
                _answer(client, fault.status, fault.headers, text.encode(), fault.num_sent)
                return
            if seen.verb != "watch":
                self.before(seen)
        headers = {name: value for name, value in client.headers.items() if name.lower() not in DROPPED_HEADERS}
        upstream.request(client.command, client.path, body=body or None, headers=headers)
        if upstream.is_cut:
            raise ConnectionResetError("the proxy closed its connections meanwhile")
        answer = upstream.getresponse()
        kept = {name: value for name, value in answer.getheaders() if name.lower() not in DROPPED_HEADERS}
        if seen is not None and seen.verb == "watch":
            _stream(client, answer, kept, lambda event: self.events(seen, event))
            return
        if self.seconds_ahead:
            ahead = timedelta(seconds=self.seconds_ahead)
            kept["Date"] = format_datetime(parsedate_to_datetime(kept["Date"]) + ahead, usegmt=True)
        data = answer.read()
        if seen is not None:
            self.after(seen, data)
        _answer(client, answer.status, kept, data)


@contextmanager
def running_proxy(server: ApiServer) -> Iterator[ApiProxy]:
    """Runs a proxy until the end of the context."""
    proxy = ApiProxy(server)
    try:
        with running_http_server(proxy.server):
            yield proxy
    finally:
        proxy.cut()


def seen_request(method: str, path: str, token: str = "") -> SeenRequest | None:
    """Parses a request; None for API discovery."""
    url = urlsplit(path)
    found = PATH.match(url.path)
    if found is None:
        return None
    name, query = found["name"] or "", parse_qs(url.query)
    read = "watch" if query.get("watch") else "get" if name else "list"
    verb = read if method == "GET" else VERBS[method]
    labels = query.get("labelSelector", [""])[0]
    return SeenRequest(verb, found["group"] or "", found["plural"] + (found["sub"] or ""), name, labels, token)


def request_label(request: SeenRequest) -> str:
    """Verb and resource, such as `patch rljobs/status`. The label of a list over all namespaces begins with `list
    all`."""
    is_of_a_job = "=" in request.labels or request.resource == "events"
    return f"list all {request.resource}" if request.verb == "list" and not is_of_a_job else str(request)


def _status(fault: Fault) -> dict[str, object]:
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "reason": fault.reason,
        "message": f"injected {fault.reason}",
        "code": fault.status,
    }


def _answer(
    client: BaseHTTPRequestHandler,
    status: int,
    headers: Mapping[str, str],
    data: bytes,
    num_sent: int | None = None,
) -> None:
    client.send_response_only(status)
    for name, value in headers.items():
        client.send_header(name, value)
    client.send_header("Content-Length", str(len(data)))
    client.end_headers()
    client.wfile.write(data[:num_sent])
    client.close_connection |= num_sent is not None


def _stream(
    client: BaseHTTPRequestHandler,
    answer: http.client.HTTPResponse,
    headers: Mapping[str, str],
    events: Callable[[bytes], Iterable[bytes]],
) -> None:
    """Forwards a watch event by event."""
    client.send_response_only(answer.status)
    for name, value in headers.items():
        client.send_header(name, value)
    client.send_header("Transfer-Encoding", "chunked")
    client.end_headers()
    rest = b""
    while data := answer.read1(CHUNK_BYTES):
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            for event in events(line):
                client.wfile.write(f"{len(event) + 1:x}\r\n".encode() + event + b"\n\r\n")
        client.wfile.flush()
    client.wfile.write(b"0\r\n\r\n")
