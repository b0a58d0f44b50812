"""Requests to the dashboards of Ray clusters: the Jobs API, the state API and log files.

What answers is a pod of a user, so nothing about an answer is believed: not its size, its form or how long it takes.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

import httpx

from rljob_operator.metrics import Metrics
from rljob_operator.raw_json import JsonObject, objects_at
from rljob_operator.ray.errors import DashboardUnreachableError, RayRefusedError, TokenRejectedError

TIMEOUT_SECONDS = 5.0
SUBMIT_TIMEOUT_SECONDS = 30.0
"""Ray answers once the job's supervisor has been placed, which takes some seconds on a busy head."""
MAX_ANSWER_BYTES = 8 * 1024 * 1024
REJECTED = (401, 403)
MAX_WORDS = 500
NO_FILE = "A file is not found at: "
"""How Ray's answer begins where a log file is not there; with the same status as that to any other failure."""


class RayClient:
    """Connections to all dashboards. Use it as a context."""

    def __init__(self, metrics: Metrics) -> None:
        # No bound on connections: whoever waits for a slow dashboard must not keep others from theirs. None are kept:
        # each request would look through all that are.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._http = httpx.AsyncClient(limits=limits, trust_env=False, follow_redirects=False)
        self._metrics = metrics

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    def dashboard(self, url: str, tokens: Sequence[str]) -> Dashboard:
        """The dashboard of one cluster. `tokens`: those that it may accept, the likeliest first."""
        return Dashboard(self._http, self._metrics, url, tokens)


class Dashboard:
    """One cluster's dashboard. Every method raises DashboardUnreachableError or TokenRejectedError."""

    def __init__(self, http: httpx.AsyncClient, metrics: Metrics, url: str, tokens: Sequence[str]) -> None:
        self._http = http
        self._metrics = metrics
        self._url = url
        self._tokens = list(tokens)

    async def nodes(self) -> tuple[JsonObject, ...]:
        """All nodes that Ray knows, dead ones included."""
        return await self._listing("nodes")

    async def placement_groups(self) -> tuple[JsonObject, ...]:
        """All placement groups, with how their placing goes."""
        return await self._listing("placement_groups")

    async def job(self, submission_id: str) -> JsonObject | None:
        """What Ray knows about a submission; None where it knows none of this id."""
        status, text = await self._ask("job", "GET", f"/api/jobs/{submission_id}")
        return None if status == 404 else _object(_good(status, text))

    async def submit(self, body: JsonObject) -> None:
        """Starts a job. Raises RayRefusedError, also where its id is taken: ask for the job after any error."""
        status, text = await self._ask("submit", "POST", "/api/jobs/", body=body, timeout=SUBMIT_TIMEOUT_SECONDS)
        if status != 200:
            raise RayRefusedError(_last_words(text) or f"HTTP {status}")

    async def stop(self, submission_id: str) -> None:
        """Asks a job to stop; nothing where it has ended or never was."""
        status, text = await self._ask("stop", "POST", f"/api/jobs/{submission_id}/stop")
        if status != 404:
            _good(status, text)

    async def log_file(self, node_id: str, file_name: str, num_lines: int) -> str | None:
        """The last lines of a file in a node's log folder (-1: all of it); None where it is not there."""
        query = {"node_id": node_id, "filename": file_name, "lines": str(num_lines), "format": "text"}
        status, text = await self._ask("log", "GET", "/api/v0/logs/file", query=query)
        return None if status == 500 and text.startswith(NO_FILE) else _good(status, text)

    async def _listing(self, what: str) -> tuple[JsonObject, ...]:
        status, text = await self._ask(what, "GET", f"/api/v0/{what}", query={"detail": "1", "limit": "10000"})
        return objects_at(_object(_good(status, text)), "data", "result", "result")

    async def _ask(
        self,
        operation: str,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: JsonObject | None = None,
        timeout: float = TIMEOUT_SECONDS,
    ) -> tuple[int, str]:
        """Status and text of an answer. A token that works is kept; those that were rejected are not tried again."""
        while self._tokens:
            outcome = "unreachable"
            try:
                status, text = await self._send(method, path, query, body, timeout)
                outcome = str(status)
            finally:
                self._metrics.ray_requests.labels(operation, outcome).inc()
            if status not in REJECTED:
                return status, text
            self._tokens.pop(0)
        raise TokenRejectedError("the dashboard does not accept the token that the operator derives for this cluster")

    async def _send(
        self, method: str, path: str, query: Mapping[str, str] | None, body: JsonObject | None, timeout: float
    ) -> tuple[int, str]:
        # A few compressed bytes may become any number of others before they could be counted.
        headers = {"Authorization": f"Bearer {self._tokens[0]}", "Accept-Encoding": "identity"}
        try:
            # For the whole answer: httpx's own limit begins anew with each byte.
            async with (
                asyncio.timeout(timeout),
                self._http.stream(
                    method, self._url + path, params=query, json=body, headers=headers, timeout=None
                ) as answer,
            ):
                if encoding := answer.headers.get("Content-Encoding"):
                    raise DashboardUnreachableError(f"its answer is encoded ({encoding[:MAX_WORDS]})")
                data = bytearray()
                async for chunk in answer.aiter_raw():
                    data += chunk
                    if len(data) > MAX_ANSWER_BYTES:
                        raise DashboardUnreachableError(f"its answer is larger than {MAX_ANSWER_BYTES} bytes")
                return answer.status_code, data.decode(errors="replace")
        except TimeoutError:
            raise DashboardUnreachableError(f"no answer within {timeout:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise DashboardUnreachableError(str(error) or type(error).__name__) from error


def _good(status: int, text: str) -> str:
    if status != 200:
        raise DashboardUnreachableError(f"HTTP {status}: {_last_words(text)}")
    return text


def _object(text: str) -> JsonObject:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise DashboardUnreachableError(f"its answer is not JSON: {_last_words(text)}") from None
    return found if isinstance(found, dict) else {}


def _last_words(text: str) -> str:
    """The last line that says something: Ray answers errors with the traceback of its server."""
    lines = [line.strip() for line in text.splitlines() if len(line.strip()) > 1]
    return lines[-1][:MAX_WORDS] if lines else ""
