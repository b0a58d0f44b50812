"""A way to a TCP server that can be shut and opened again, for tests of lost connections."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from types import TracebackType
from typing import Self


class TcpGate:
    """Listens on `port` and passes everything on; while it is closed, connections are refused and old ones cut."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._listener: socket.socket | None = None
        self._open_sockets: list[socket.socket] = []
        self.port = 0

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def open(self) -> None:
        """Takes connections, on the same port as before."""
        self._listener = socket.create_server(("127.0.0.1", self.port), reuse_port=False)
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def close(self) -> None:
        """Cuts everything; no more connections."""
        sockets = [*self._open_sockets, *([self._listener] if self._listener else [])]
        self._listener, self._open_sockets = None, []
        for each in sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                near, _ = listener.accept()
                far = socket.create_connection(self._target)
                self._open_sockets += [near, far]
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=_pump, args=(source, sink), daemon=True).start()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
    with suppress(OSError):
        sink.shutdown(socket.SHUT_WR)
