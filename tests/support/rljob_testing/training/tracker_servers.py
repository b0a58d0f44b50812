"""Servers on this machine that take the place of a tracker's server and misbehave."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from rljob_testing.local_servers import running_http_server


@contextmanager
def hanging_server() -> Iterator[str]:
    """The address of a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        connections: list[socket.socket] = []

        def accept() -> None:
            with suppress(OSError):
                while True:
                    connections.append(server.accept()[0])

        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        # Wakes the thread.
        server.shutdown(socket.SHUT_RDWR)
        for connection in connections:
            connection.close()


@contextmanager
def answering_server(status: int, seconds: float = 0.0) -> Iterator[str]:
    """The address of a server that answers every request with this status and an empty JSON object, after some
    seconds."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            time.sleep(seconds)
            with suppress(OSError):
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", "2")
                self.end_headers()
                self.wfile.write(b"{}")

        do_POST = do_PUT = do_PATCH = do_GET

        def log_message(self, format: str, *arguments: object) -> None:
            """Nothing, because a test's output is not for requests."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    with running_http_server(server):
        yield f"http://127.0.0.1:{server.server_address[1]}"
