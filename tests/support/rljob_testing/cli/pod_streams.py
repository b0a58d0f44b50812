"""The side of a kubelet that serves programs and ports of pods over WebSockets (protocol v4.channel.k8s.io).

The API server passes such connections on unchanged.
"""

from __future__ import annotations

import base64
import hashlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler

from websocket import ABNF

from rljob_testing.local_servers import shut_down

_STDIN, _STDOUT, _STDERR, _STATUS = range(4)
_GUID = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
"""From RFC 6455."""


class ServerSocket:
    """The server's side of a WebSocket."""

    def __init__(self, handler: BaseHTTPRequestHandler) -> None:
        key = handler.headers["Sec-WebSocket-Key"]
        handler.send_response(101)
        handler.send_header("Upgrade", "websocket")
        handler.send_header("Connection", "Upgrade")
        accept = base64.b64encode(hashlib.sha1((key + _GUID).encode()).digest()).decode()
        handler.send_header("Sec-WebSocket-Accept", accept)
        handler.send_header("Sec-WebSocket-Protocol", "v4.channel.k8s.io")
        handler.end_headers()
        handler.wfile.flush()
        handler.close_connection = True
        self._input = handler.rfile
        self._connection = handler.connection
        self._lock = threading.Lock()

    def send(self, stream: int, data: bytes) -> None:
        """Sends one message."""
        frame = ABNF.create_frame(bytes([stream]) + data, ABNF.OPCODE_BINARY)
        frame.mask_value = 0
        with self._lock:
            self._connection.sendall(frame.format())

    def receive(self) -> tuple[int, bytes] | None:
        """The next message as (stream, data); None at the end of the connection."""
        with suppress(OSError, ValueError):
            while len(head := self._input.read(2)) == 2:
                length = head[1] & 127
                if length > 125:
                    length = int.from_bytes(self._input.read(2 if length == 126 else 8), "big")
                mask = self._input.read(4)
                data = bytes(byte ^ mask[index % 4] for index, byte in enumerate(self._input.read(length)))
                if head[0] & 15 == ABNF.OPCODE_BINARY and data:
                    return data[0], data[1:]
                if head[0] & 15 == ABNF.OPCODE_CLOSE:
                    return None
        return None

    def close(self) -> None:
        """Breaks the connection."""
        shut_down(self._connection)


def serve_program(
    stream: ServerSocket, command: Sequence[str], environment: Mapping[str, str], break_after: int | None
) -> None:
    """Runs a command with this Python, and closes the connection after `break_after` bytes of output."""
    process = subprocess.Popen(
        [sys.executable, *command[1:]],
        env={**os.environ, **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        threading.Thread(target=_copy_input, args=(stream, process), daemon=True).start()
        sent = 0
        with suppress(OSError):
            while piece := os.read(process.stdout.fileno(), 1 << 15):
                piece = piece if break_after is None else piece[: break_after - sent]
                stream.send(_STDOUT, piece)
                sent += len(piece)
                if sent == break_after:
                    break
        process.kill()
    stream.close()


def _copy_input(stream: ServerSocket, process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    while (message := stream.receive()) is not None:
        process.stdin.write(message[1])
        process.stdin.flush()
    process.kill()


def serve_port(stream: ServerSocket, port: int, local_port: int) -> None:
    """Connects a port of a pod with a port of this machine."""
    for channel in (0, 1):
        stream.send(channel, port.to_bytes(2, "little"))
    with socket.create_connection(("127.0.0.1", local_port)) as server:
        threading.Thread(target=_copy_to_port, args=(stream, server), daemon=True).start()
        while piece := server.recv(1 << 15):
            stream.send(0, piece)
    stream.close()


def _copy_to_port(stream: ServerSocket, server: socket.socket) -> None:
    while (message := stream.receive()) is not None:
        server.sendall(message[1])
    with suppress(OSError):
        server.shutdown(socket.SHUT_RDWR)
