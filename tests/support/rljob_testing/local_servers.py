"""Ports and HTTP servers of tests.

A port that a test takes may be used again after a restart: nobody else takes it meanwhile."""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

# Ray gives its workers ports below it.
FIRST = 20_000
PORTS_PER_BLOCK = 100
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")

_lock = threading.Lock()
_held: list[socket.socket] = []


def free_ports(count: int) -> list[int]:
    """Ports on which nobody listens, outside those that the system gives away. No other call returns them while this
    process lives, in whatever process of this machine. Raises OSError where there are none left."""
    with _lock:
        return list(itertools.islice(_ports, count))


def free_port() -> int:
    """One of them."""
    [port] = free_ports(1)
    return port


def _all_ports() -> Iterator[int]:
    end = int(_EPHEMERAL.read_text().split()[0]) if _EPHEMERAL.exists() else 32_768
    for first in range(FIRST, end - PORTS_PER_BLOCK + 1, PORTS_PER_BLOCK):
        if _is_ours(first):
            yield from filter(_is_free, range(first, first + PORTS_PER_BLOCK))
    raise OSError(f"no port is free from {FIRST} to {end}")


def _is_ours(block: int) -> bool:
    """Whether nobody else has this block: whoever has it holds a Unix socket without a file, which ends with him."""
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
        # What has just ended there does not keep a server from it.
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


class QuietHandler(BaseHTTPRequestHandler):
    """Writes no log, and takes it as it is when a client goes away: a traceback would land in another test's output."""

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
