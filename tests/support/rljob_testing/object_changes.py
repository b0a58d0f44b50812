"""Watches objects on an API server, and wakes who waits for a change, so that nobody need ask over and over."""

from __future__ import annotations

import json
import socket
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

import httpx

CONNECT_SECONDS = 0.2
"""Until a watch that has ended begins anew: a server may go away, and a kind may not be there."""
EVERYWHERE = ""


class ObjectChanges:
    """Of all objects at some paths. `watch` and `stop` are for its owner; the others for any thread."""

    def __init__(self, http: httpx.Client, paths: Sequence[str]) -> None:
        self._http = http
        self._told = threading.Condition()
        self._numbers: Counter[str] = Counter()
        self._sockets: dict[str, socket.socket] = {}
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=self._watch, args=(path,), daemon=True) for path in paths]

    def watch(self) -> None:
        """Begins to watch; does not wait."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Ends all watches: a server waits for them when it stops."""
        self._stopped.set()
        for each in list(self._sockets.values()):
            # Not SSLSocket's own form: it forgets the encryption first, and what is read then is ciphertext.
            with suppress(OSError):
                socket.socket.shutdown(each, socket.SHUT_RDWR)
        self.tell(EVERYWHERE)

    def tell(self, namespace: str) -> None:
        """There is a change."""
        with self._told:
            self._numbers.update({namespace, EVERYWHERE})
            self._told.notify_all()

    def number(self, namespace: str) -> int:
        """Of the changes in a namespace, or everywhere, until now."""
        with self._told:
            return self._numbers[namespace]

    def wait(self, namespace: str, number: int, seconds: float) -> None:
        """Until there are more than `number`, or the time is over."""
        with self._told:
            self._told.wait_for(lambda: self._numbers[namespace] > number, seconds)

    def _watch(self, path: str) -> None:
        query = {**httpx.URL(path).params, "watch": "1"}
        while not self._stopped.is_set():
            with (
                suppress(httpx.HTTPError),
                self._http.stream("GET", path, params=query, timeout=httpx.Timeout(30.0, read=None)) as answer,
            ):
                self._sockets[path] = answer.extensions["network_stream"].get_extra_info("socket")
                for line in answer.iter_lines():
                    if answer.status_code != 200 or self._stopped.is_set():
                        break
                    self.tell(json.loads(line)["object"].get("metadata", {}).get("namespace", EVERYWHERE))
            self._stopped.wait(CONNECT_SECONDS)
