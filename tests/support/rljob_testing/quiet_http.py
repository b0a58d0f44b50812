"""HTTP servers of tests."""

from __future__ import annotations

from contextlib import suppress
from http.server import BaseHTTPRequestHandler


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
