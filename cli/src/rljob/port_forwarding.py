"""Connects a local port with a port of a pod. Each connection becomes one WebSocket of the API server."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from rljob.cluster import Cluster
from rljob.errors import RLJobError
from rljob.plain_text import one_line

if TYPE_CHECKING:
    from websocket import WebSocket

_DATA, _ERROR = 0, 1
"""The first byte of each message: the stream that it belongs to. The first message of each stream is the port."""
_PIECE_BYTES = 1 << 16
MAX_CONNECTIONS = 64
"""Further connections wait."""


class PortForwarding:
    """Accepts connections to a local port (a context manager). A connection that breaks affects no other one."""

    def __init__(self, cluster: Cluster, listener: socket.socket, port: int, note: Callable[[str], None]) -> None:
        """Args:
        listener: The local port.
        port: The port of the pod.
        note: Called, from other threads, with a message for users if a connection cannot be made.
        """
        self._cluster = cluster
        self._listener = listener
        self._port = port
        self._note = note
        self._pod_path: str | None = None
        self._free = threading.Semaphore(MAX_CONNECTIONS)
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._accept, daemon=True)

    def __enter__(self) -> PortForwarding:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_stopped.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def use(self, pod_path: str | None) -> None:
        """New connections go to this pod (its URL path); None closes them at once."""
        self._pod_path = pod_path

    def _accept(self) -> None:
        while not self._is_stopped.is_set():
            self._free.acquire()
            try:
                local, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(local,), daemon=True).start()

    def _serve(self, local: socket.socket) -> None:
        path = self._pod_path
        try:
            with local:
                if path is None:
                    return
                remote = self._cluster.websocket(f"{path}/portforward", [("ports", str(self._port))])
                # A dashboard may send nothing for a long time.
                remote.settimeout(None)
                upload = threading.Thread(target=_upload, args=(local, remote), daemon=True)
                upload.start()
                if (failure := _download(remote, local)) is not None:
                    self._note(f"the pod rejected a connection ({failure})")
                # This ends the other thread, which reads from one of them or writes to the other.
                _end(local)
                _end(remote.sock)
                upload.join()
                remote.shutdown()  # type: ignore[no-untyped-call]
        except RLJobError as error:
            self._note(f"a connection failed ({one_line(error)}); reload the page to try again")
        finally:
            self._free.release()


def _upload(local: socket.socket, remote: WebSocket) -> None:
    """Copies what the local program sends until it closes the connection."""
    from websocket import WebSocketException

    with suppress(OSError, WebSocketException):
        while piece := local.recv(_PIECE_BYTES):
            remote.send_binary(bytes([_DATA]) + piece)
    _end(remote.sock)


def _end(connection: socket.socket | None) -> None:
    """Ends a connection. Threads that wait for it go on, which closing it would not do."""
    with suppress(OSError):
        if connection is not None:
            connection.shutdown(socket.SHUT_RDWR)


def _download(remote: WebSocket, local: socket.socket) -> str | None:
    """Copies what the pod sends until the connection ends. Returns the pod's error, if it sends one."""
    from websocket import WebSocketException

    begun = set()
    with suppress(OSError, WebSocketException):
        while message := remote.recv():
            data = message if isinstance(message, bytes) else message.encode()
            stream, content = data[0], data[1:]
            if stream not in begun:
                begun.add(stream)
            elif stream == _DATA:
                local.sendall(content)
            elif stream == _ERROR:
                return one_line(content.decode(errors="replace"))
    return None
