"""Kills an operator around each of its requests to the API server and to Ray's dashboards, in every state of a job.

A point is a request, the state of the job, and `before` (the request has no effect) or `after` (the response is lost).
For reads both are the same, so only `after` is used. The operator dies once at each point; after the restart the
request succeeds.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from rljob_testing.operator import api_proxy
from rljob_testing.operator.forked_operator import OperatorProcess
from rljob_testing.operator.testbed import Testbed

SILENT_SECONDS = 0.5
"""The operator is waiting when it has sent no request for this time. Its pauses are shortened in these tests."""
READS = ("get ", "list ")
RAY_WRITES = ("ray submit", "ray stop")


class Point(NamedTuple):
    """The point at which an operator process is killed."""

    attempt: int
    """Number of the newest attempt; 0 before the first."""
    state: str
    """State of that attempt, and the status field that follows it, such as `Ended nextAttempt`."""
    request: str
    moment: str
    detail: str = ""
    """For a write of the status: the conditions before it."""


class OperatorKiller:
    """Kills the operator once at each point of a job's life whose attempt and state are in `deadly`."""

    def __init__(self, place: Testbed, operator: OperatorProcess, deadly: Container[tuple[int, str]]) -> None:
        """`deadly`: pairs of attempt number and state, as in Point."""
        self._place = place
        self.operator = operator
        self._deadly = deadly
        self._lock = threading.Lock()
        self._num_asked = 0
        self._asked_at = time.monotonic()
        self._status: Mapping[str, Any] = {}
        """The job's status as the operator last wrote it."""
        self.victims: list[Point] = []
        """The points at which the operator was killed, in order."""

    def around(self, moment: str, request: str, answer: bytes = b"{}") -> None:
        """Called before and after each request. Raises ConnectionAbortedError if the request must not reach the
        server."""
        with self._lock:
            if request == "patch rljobs/status":
                self._status = json.loads(answer).get("status", self._status)
            self._num_asked += moment == "before"
            self._asked_at = time.monotonic()
            if not self.operator.is_running():
                return
            if moment == "before" and _is_read(request):
                return
            point = self._point(moment, request)
            if point in self.victims or (point.attempt, point.state) not in self._deadly:
                return
            self.operator.kill()
            self.victims.append(point)
            self._place.kuberay.changes.notify(self._place.namespace)
        if moment == "before":
            raise ConnectionAbortedError(f"the operator was killed before {point}")

    def revive(self) -> None:
        """Starts the operator if it does not run."""
        with self._lock:
            if not self.operator.is_running():
                self._num_asked = 0
                self._asked_at = time.monotonic()
                self.operator.start()

    def is_done(self, num_requests: int) -> bool:
        """Whether the operator has made this number of requests since its start and now waits."""
        with self._lock:
            return self._num_asked >= num_requests and time.monotonic() - self._asked_at >= SILENT_SECONDS

    def _point(self, moment: str, request: str) -> Point:
        if request.startswith("list all "):
            return Point(0, "", request, moment)
        status = self._status
        attempts = status.get("attempts", [])
        if not attempts:
            return Point(0, "New", request, moment)
        follows = next((name for name in ("result", "suspendedAt", "nextAttempt") if status.get(name)), "")
        state = f"{attempts[-1]['state']} {follows}".strip()
        detail = ""
        if request == "patch rljobs/status":
            detail = ", ".join(f"{each['type']} {each['status']} {each['reason']}" for each in status["conditions"])
        return Point(attempts[-1]["number"], state, request, moment, detail)


@contextmanager
def killer_at_every_request(place: Testbed, deadly: Container[tuple[int, str]]) -> Iterator[OperatorKiller]:
    """Puts a killer between the API server, the dashboards and an operator that has not been started."""
    with api_proxy.running_proxy(place.server) as proxy:
        killer = OperatorKiller(place, place.with_server_url(proxy.url).operator("operator-1"), deadly)
        proxy.before = lambda request: killer.around("before", api_proxy.request_label(request))
        proxy.after = lambda request, answer: killer.around("after", api_proxy.request_label(request), answer)
        place.dashboards.around[place.namespace] = killer.around
        try:
            yield killer
        finally:
            del place.dashboards.around[place.namespace]
            killer.operator.kill()


def _is_read(request: str) -> bool:
    """Whether the request changes nothing."""
    return request.startswith(READS) or (request.startswith("ray ") and request not in RAY_WRITES)
