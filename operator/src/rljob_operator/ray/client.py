"""Requests to the dashboards of Ray clusters: the Jobs API, the state API and log files.

What answers is a pod of a user, so nothing about an answer is believed: not its size, its form or how long it takes.
Connections are kept: at the pace at which a running job is looked at, most of the work would be to make new ones.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Self

import aiohttp

from rljob_operator.errors import OperatorError
from rljob_operator.metrics import Metrics
from rljob_operator.raw_json import JsonObject, objects_at

TIMEOUT_SECONDS = 5.0
SUBMIT_TIMEOUT_SECONDS = 30.0
"""Ray answers once the job's supervisor has been placed, which takes some seconds on a busy head."""
KEPT_SECONDS = 60.0
"""How long a connection waits for its next request: longer than the longest pause between two looks at a job, 30 s,
and shorter than the 75 s after which the servers of older Ray versions hang up."""
MAX_ANSWER_BYTES = 8 * 1024 * 1024
REJECTED = (401, 403)
MAX_WORDS = 500
LAST_OF_ITS_CONNECTION = {"Connection": "close"}
"""After a rejection: it may have come from the pod of a former cluster of this name, to which only a connection that
was kept still leads. What is asked next goes to whoever has the name now."""
PROTECTED_PATH = "/api/jobs/"
NO_FILE = "A file is not found at: "
"""How Ray's answer begins where a log file is not there; with the same status as that to any other failure."""


class RayError(OperatorError):
    """A request to a dashboard that did not do what was asked."""


class DashboardUnreachableError(RayError):
    """No answer, or one that only says that Ray is not well; the same request may work later."""


class TokenRejectedError(RayError):
    """The dashboard accepts none of the tokens."""


class DashboardOpenError(RayError):
    """The dashboard answers without a token. Nothing may be submitted to it."""


class RayRefusedError(RayError):
    """Ray understood and did not do it. Holds its words."""


class RayClient:
    """Connections to all dashboards. Made and used as a context within a running event loop."""

    def __init__(self, metrics: Metrics) -> None:
        self._http = aiohttp.ClientSession(
            # No bound on connections: whoever waits for a slow dashboard must not keep others from theirs.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEPT_SECONDS),
            cookie_jar=aiohttp.DummyCookieJar(),
            # A few compressed bytes may become any number of others before they could be counted.
            headers={"Accept-Encoding": "identity"},
            auto_decompress=False,
            trust_env=False,
            # Each request has its own limit, for the whole answer.
            timeout=aiohttp.ClientTimeout(),
        )
        self._metrics = metrics

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.close()

    def dashboard(self, url: str, tokens: Sequence[str]) -> Dashboard:
        """The dashboard of one cluster. `tokens`: those that it may accept, the likeliest first."""
        return Dashboard(self._http, self._metrics, url, tokens)


class Dashboard:
    """One cluster's dashboard. Every method raises DashboardUnreachableError or TokenRejectedError."""

    def __init__(self, http: aiohttp.ClientSession, metrics: Metrics, url: str, tokens: Sequence[str]) -> None:
        self._http = http
        self._metrics = metrics
        self._url = url
        self._tokens = list(tokens)
        self.cluster = (url, *tokens)
        """Whose dashboard it is: tokens are those of one cluster of one job, URLs come again with the job's name."""

    async def require_refusal(self) -> None:
        """Asks without a token, which must be refused. Raises DashboardOpenError where it is not: a KubeRay that is
        too old drops what makes Ray ask for one."""
        async with self._answer("probe", "GET", PROTECTED_PATH, {}, None, None, TIMEOUT_SECONDS) as answer:
            status = answer.status
        if status == 200:
            raise DashboardOpenError(
                f"it answers requests without a token (GET {PROTECTED_PATH}: HTTP 200), so whoever reaches it could run"
                " programs on the job's nodes; use newer versions of KubeRay and Ray"
            )
        if status not in REJECTED:
            raise DashboardUnreachableError(f"HTTP {status} to a request without a token, which is to be refused")

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
        """Starts a job, after one more proof that not everybody can. Raises DashboardOpenError, and RayRefusedError,
        also where the job's id is taken: ask for the job after any error."""
        await self.require_refusal()
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
            for more in ({}, LAST_OF_ITS_CONNECTION):
                headers = {"Authorization": f"Bearer {self._tokens[0]}", **more}
                async with self._answer(operation, method, path, headers, query, body, timeout) as answer:
                    if answer.status not in REJECTED:
                        return answer.status, await _text(answer)
            self._tokens.pop(0)
        raise TokenRejectedError("the dashboard does not accept the token that the operator derives for this cluster")

    @asynccontextmanager
    async def _answer(
        self,
        operation: str,
        method: str,
        path: str,
        headers: Mapping[str, str],
        query: Mapping[str, str] | None,
        body: JsonObject | None,
        timeout: float,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """An answer that is to be read within the context, and counted there."""
        outcome = "unreachable"
        try:
            async with (
                asyncio.timeout(timeout),
                self._http.request(
                    method, self._url + path, params=query, json=body, headers=headers, allow_redirects=False
                ) as answer,
            ):
                yield answer
                outcome = str(answer.status)
        except TimeoutError:
            raise DashboardUnreachableError(f"no answer within {timeout:g} s") from None
        except aiohttp.ClientConnectorError as error:
            raise DashboardUnreachableError(f"no connection: {error.strerror or error}"[:MAX_WORDS]) from error
        except (aiohttp.ClientError, OSError) as error:
            raise DashboardUnreachableError(str(error)[:MAX_WORDS] or type(error).__name__) from error
        finally:
            self._metrics.ray_requests.labels(operation, outcome).inc()


async def _text(answer: aiohttp.ClientResponse) -> str:
    if encoding := answer.headers.get("Content-Encoding"):
        raise DashboardUnreachableError(f"its answer is encoded ({encoding[:MAX_WORDS]})")
    data = bytearray()
    async for chunk in answer.content.iter_any():
        data += chunk
        if len(data) > MAX_ANSWER_BYTES:
            raise DashboardUnreachableError(f"its answer is larger than {MAX_ANSWER_BYTES} bytes")
    return data.decode(errors="replace")


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
