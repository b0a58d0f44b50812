"""Free ports and HTTP servers for tests.

A test may use its port again after it restarts a server: no other test takes the port in the meantime.
"""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

# Ray assigns ports below this one to its workers.
FIRST = 20_000
PORTS_PER_BLOCK = 100
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")

_lock = threading.Lock()
_held: list[socket.socket] = []


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, outside the system's ephemeral range.

    While this process lives, no other call on this machine returns them. Raises OSError if none is left.
    """
    with _lock:
        return list(itertools.islice(_ports, count))


def free_port() -> int:
    """One port, as `free_ports` returns it."""
    [port] = free_ports(1)
    return port


def _all_ports() -> Iterator[int]:
    end = int(_EPHEMERAL.read_text().split()[0]) if _EPHEMERAL.exists() else 32_768
    for first in range(FIRST, end - PORTS_PER_BLOCK + 1, PORTS_PER_BLOCK):
        if _is_ours(first):
            yield from filter(_is_free, range(first, first + PORTS_PER_BLOCK))
    raise OSError(f"no port is free from {FIRST} to {end}")


def _is_ours(block: int) -> bool:
    """Tries to reserve a block of ports for this process. The holder of a block binds an abstract Unix socket, which
    the kernel releases when the process ends."""
    holder = socket.socket(socket.AF_UNIX)
    try:
        holder.bind(f"\0rljob-tests-ports-{block}")
    except OSError:
        holder.close()
        return False
    _held.append(holder)
    return True


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # Connections in TIME_WAIT must not make a port look used.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True


_ports = _all_ports()


@contextmanager
def running_http_server(server: ThreadingHTTPServer) -> Iterator[None]:
    """Serves requests in threads until the end of the context."""
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()


def shut_down(connection: socket.socket) -> None:
    """Breaks a connection, also one that another thread reads from.

    SSLSocket.shutdown would drop the encryption first, so that the reader would get ciphertext.
    """
    with suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


class QuietHandler(BaseHTTPRequestHandler):
    """A request handler without a log. It ignores clients that disconnect: the traceback would appear in another test's
    output."""

    protocol_version = "HTTP/1.1"

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except OSError:
            self.close_connection = True

    def finish(self) -> None:
        with suppress(OSError):
            super().finish()

    def log_message(self, format: str, *args: object) -> None:
        pass
