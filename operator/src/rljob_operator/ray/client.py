"""Sends requests to the dashboards of Ray clusters: the Jobs API, the state API and log files.

A dashboard runs in a user's pod, so nothing about a response is trusted: not its size, its format or its duration.
`response_budgets` has the limits of the sizes. Connections are reused, because running jobs are polled often and new
connections would be most of the work.
"""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Self

import aiohttp

from rljob_operator.errors import OperatorError
from rljob_operator.metrics import Metrics
from rljob_operator.raw_json import JsonObject, at, objects_at, text_at
from rljob_operator.ray.response_budgets import (
    JOB_BYTES,
    KEPT_LOG_BYTES,
    LOG_BYTES,
    MAX_HEADER_BYTES,
    MAX_HEADERS,
    RUN_STATE_BYTES,
    SHORT_BYTES,
    BodyReader,
    ListingBudget,
    OneResponseConnector,
    ResponseTooLargeError,
    ResponseTooSlowError,
    group_listing,
    node_listing,
    num_values_at_most,
)

TIMEOUT_SECONDS = 5.0
"""Timeout of a request, including its whole response."""
SUBMIT_TIMEOUT_SECONDS = 30.0
"""Ray responds only after it has started a supervisor process for the Ray job, which takes some seconds if the head pod
is busy."""
IDLE_CONNECTION_SECONDS = 60.0
"""How long an idle connection stays open: longer than the longest time between two polls of a dashboard (30 s), and
shorter than the 75 s after which servers of older Ray versions close it."""
REJECTED_STATUSES = (401, 403)
"""HTTP statuses of requests that were rejected because of a wrong or missing token."""
MAX_ERROR_CHARACTERS = 500
HIDDEN_TOKEN = "<token>"
MAX_LAST_LINE = 10_000
"""The last line of an error response is searched in this number of its last characters."""
CLOSE_CONNECTION = {"Connection": "close"}
"""Header of the second request with a token, after the first one was rejected. Through a reused connection, the
rejection may come from a pod of an earlier cluster of this name. The header closes this connection, so that later
requests reach the cluster that has the name now."""
PROTECTED_PATH = "/api/jobs/"
"""A path whose requests need a token."""
NO_FILE = "A file is not found at: "
"""Start of Ray's response if a log file does not exist; the HTTP status is the same as for other failures."""


class RayError(OperatorError):
    """A request to a dashboard failed."""


class DashboardUnreachableError(RayError):
    """The dashboard does not respond, or its response shows that Ray is unhealthy; a retry may succeed."""


class LargeResponseError(DashboardUnreachableError):
    """The response has more bytes or values than its budget."""


class TokenRejectedError(RayError):
    """The dashboard accepts none of the tokens."""


class DashboardOpenError(RayError):
    """The dashboard accepts requests without a token. Nothing may be submitted to it."""


class RayRefusedError(RayError):
    """Ray rejected a Ray job that was submitted. Contains Ray's message."""


class RayClient:
    """The HTTP connections to all dashboards. Create it and use it as a context manager in a running event loop."""

    def __init__(self, metrics: Metrics) -> None:
        self._http = aiohttp.ClientSession(
            connector=OneResponseConnector(IDLE_CONNECTION_SECONDS),
            cookie_jar=aiohttp.DummyCookieJar(),
            # No compression: a small compressed response could expand to any size before it is counted.
            headers={"Accept-Encoding": "identity"},
            auto_decompress=False,
            max_line_size=MAX_HEADER_BYTES,
            max_field_size=MAX_HEADER_BYTES,
            max_headers=MAX_HEADERS,
            trust_env=False,
            # Each request has its own timeout for the whole response.
            timeout=aiohttp.ClientTimeout(),
        )
        self._metrics = metrics
        self._reader = BodyReader()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.close()

    def dashboard(self, url: str, namespace: str, tokens: Sequence[str]) -> Dashboard:
        """A client for the dashboard of a cluster in this namespace. `tokens`: the tokens to try, the most likely
        first."""
        return Dashboard(self._http, self._metrics, self._reader, url, namespace, tokens)


class Dashboard:
    """A client for one cluster's dashboard. Every method can raise DashboardUnreachableError, and every method that
    sends a token can raise TokenRejectedError."""

    def __init__(
        self,
        http: aiohttp.ClientSession,
        metrics: Metrics,
        reader: BodyReader,
        url: str,
        namespace: str,
        tokens: Sequence[str],
    ) -> None:
        self._http = http
        self._metrics = metrics
        self._reader = reader
        self._url = url
        self._namespace = namespace
        self._tokens = list(tokens)
        self._secrets = tuple(tokens)
        self.cluster = (url, *tokens)
        """Identifies the cluster. The URL is not enough: a later job with the same name gets the same URLs, but other
        tokens."""

    async def check_token_is_required(self) -> None:
        """Sends a request without a token; raises DashboardOpenError if the dashboard accepts it. A KubeRay that is too
        old drops the setting that turns on token authentication."""
        async with self._response("probe", "GET", PROTECTED_PATH, {}, None, None, TIMEOUT_SECONDS) as response:
            status = response.status
        if status == 200:
            raise DashboardOpenError(
                f"the dashboard accepts requests without a token (GET {PROTECTED_PATH}: HTTP 200), so anybody who"
                " reaches it can run programs on the job's nodes; use newer versions of KubeRay and Ray"
            )
        if status not in REJECTED_STATUSES:
            raise DashboardUnreachableError(f"HTTP {status} for a request without a token (expected: 401 or 403)")

    async def nodes(self, num_pods: int) -> tuple[JsonObject, ...]:
        """The nodes that Ray reports as alive. `num_pods`: the number of running pods of the cluster, which limits how
        many nodes are read."""
        return await self._listing("nodes", "ALIVE", "0", node_listing(num_pods))

    async def pending_groups(self, num_pods: int) -> tuple[JsonObject, ...]:
        """Placement groups that Ray has not created yet, with their bundles and their scheduling state; at most
        `MAX_LISTED_GROUPS`. `num_pods` as in `nodes`."""
        return await self._listing("placement_groups", "PENDING", "1", group_listing(num_pods))

    async def job(self, submission_id: str) -> JsonObject | None:
        """The Ray job with this submission id; None if Ray knows no such job."""
        status, text = await self._ask("job", "GET", f"/api/jobs/{submission_id}", max_bytes=JOB_BYTES)
        return None if status == 404 else _object(_text_if_ok(status, text))

    async def submit(self, body: JsonObject) -> None:
        """Submits a Ray job, but first checks that the dashboard requires a token. Raises DashboardOpenError if it
        requires none, and RayRefusedError if Ray rejects the Ray job, for example because its id exists already. After
        any error except DashboardOpenError, Ray may have the Ray job: the caller must check this with `job`."""
        await self.check_token_is_required()
        status, text = await self._ask("submit", "POST", "/api/jobs/", body=body, timeout=SUBMIT_TIMEOUT_SECONDS)
        if status != 200:
            raise RayRefusedError(_last_line(text) or f"HTTP {status}")

    async def stop(self, submission_id: str) -> None:
        """Asks a Ray job to stop. Does nothing if the Ray job has ended or does not exist."""
        status, text = await self._ask("stop", "POST", f"/api/jobs/{submission_id}/stop")
        if status != 404:
            _text_if_ok(status, text)

    async def run_state_file(self, node_id: str, file_name: str) -> str | None:
        """The content of a run state file in a node's log folder; None if it does not exist. Raises LargeResponseError
        if it is too long to be a run state.

        About one in thousands of Ray's responses is empty although the file is not. So an empty one is requested again,
        and two of them are a dashboard that does not respond.
        """
        for _ in range(2):
            text = await self._log_file(node_id, file_name, "-1", RUN_STATE_BYTES)
            if text != "":
                return text
        raise DashboardUnreachableError("the response with the run state is empty")

    async def log_end(self, node_id: str, file_name: str, num_lines: int) -> str | None:
        """The last lines of a file in a node's log folder, and of them at most the last `KEPT_LOG_BYTES`; None if it
        does not exist. Raises LargeResponseError if the lines are longer than `LOG_BYTES`."""
        return await self._log_file(node_id, file_name, str(num_lines), LOG_BYTES, KEPT_LOG_BYTES)

    async def _log_file(
        self, node_id: str, file_name: str, lines: str, max_bytes: int, kept_bytes: int | None = None
    ) -> str | None:
        query = {"node_id": node_id, "filename": file_name, "lines": lines, "format": "text"}
        status, text = await self._ask(
            "log", "GET", "/api/v0/logs/file", query=query, max_bytes=max_bytes, kept_bytes=kept_bytes
        )
        return None if status == 500 and text.startswith(NO_FILE) else _text_if_ok(status, text)

    async def _listing(self, what: str, state: str, detail: str, budget: ListingBudget) -> tuple[JsonObject, ...]:
        """The entries of a listing of the state API that have this state; Ray applies the limit to them."""
        query = {"detail": detail, "limit": str(budget.entries)}
        query |= {"filter_keys": "state", "filter_predicates": "=", "filter_values": state}
        status, text = await self._ask(what, "GET", f"/api/v0/{what}", query=query, max_bytes=budget.num_bytes)
        text = _text_if_ok(status, text)
        if num_values_at_most(text) > budget.values:
            raise LargeResponseError(
                f"the response to the request `{what}` is too large (up to {num_values_at_most(text)} values, at most"
                f" {budget.values})"
            )
        found = at(_object(text), "data", "result", "result")
        # The entries beyond the limit are not looked at: there may be very many small ones.
        entries = objects_at({"entries": found[: budget.entries] if isinstance(found, list) else ()}, "entries")
        return tuple(entry for entry in entries if text_at(entry, "state") == state)

    async def _ask(
        self,
        operation: str,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: JsonObject | None = None,
        timeout: float = TIMEOUT_SECONDS,
        max_bytes: int = SHORT_BYTES,
        kept_bytes: int | None = None,
    ) -> tuple[int, str]:
        """Sends a request with the first token that the dashboard accepts. Returns the HTTP status and the text of the
        response. This object does not send a token again that was rejected twice.

        Args:
            operation: The name of the request in the metrics and in errors.
            max_bytes: The budget of the response; a longer one raises LargeResponseError.
            kept_bytes: If it is not None, only the last bytes of the response are returned.
        """
        while self._tokens:
            for more_headers in ({}, CLOSE_CONNECTION):
                headers = {"Authorization": f"Bearer {self._tokens[0]}", **more_headers}
                async with self._response(operation, method, path, headers, query, body, timeout) as response:
                    if response.status not in REJECTED_STATUSES:
                        text = await self._text(operation, response, max_bytes, kept_bytes)
                        return response.status, self._without_tokens(text)
            self._tokens.pop(0)
        raise TokenRejectedError(
            "the dashboard rejects the token that the operator derives for this cluster; if the key in the operator's"
            " Secret was replaced, restore the old key as previous-key"
        )

    async def _text(
        self, operation: str, response: aiohttp.ClientResponse, max_bytes: int, kept_bytes: int | None
    ) -> str:
        """Reads a response that is not compressed and has at most `max_bytes`."""
        if encoding := response.headers.get("Content-Encoding"):
            raise DashboardUnreachableError(
                "the response is compressed, although the request does not allow this (Content-Encoding:"
                f" {encoding[:20]})"
            )
        try:
            if kept_bytes is None:
                data = await self._reader.read(response, max_bytes, self._namespace)
            else:
                data = await self._reader.read_end(response, max_bytes, kept_bytes)
        except ResponseTooLargeError as error:
            raise LargeResponseError(f"the response to the request `{operation}` is {error}") from None
        except ResponseTooSlowError as error:
            raise DashboardUnreachableError(f"the response to the request `{operation}` is {error}") from None
        return data.decode(errors="replace")

    @asynccontextmanager
    async def _response(
        self,
        operation: str,
        method: str,
        path: str,
        headers: Mapping[str, str],
        query: Mapping[str, str] | None,
        body: JsonObject | None,
        timeout: float,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Sends one request and counts it in the metrics. The response must be read within the context."""
        outcome = "unreachable"
        try:
            async with (
                asyncio.timeout(timeout),
                self._http.request(
                    method, self._url + path, params=query, json=body, headers=headers, allow_redirects=False
                ) as response,
            ):
                yield response
                outcome = str(response.status)
        except TimeoutError:
            raise DashboardUnreachableError(f"timed out after {timeout:g} s") from None
        except aiohttp.ClientConnectorError as error:
            text = f"cannot connect: {error.strerror or error}"
            raise DashboardUnreachableError(text[:MAX_ERROR_CHARACTERS]) from error
        except (aiohttp.ClientError, OSError) as error:
            text = self._without_tokens(str(error))
            raise DashboardUnreachableError(text[:MAX_ERROR_CHARACTERS] or type(error).__name__) from error
        finally:
            self._metrics.ray_requests.labels(operation, outcome).inc()

    def _without_tokens(self, text: str) -> str:
        """The text of a dashboard without the tokens that were sent to it: it becomes part of messages in statuses,
        events and logs, and a dashboard, or a program that logs its requests, may repeat what it got."""
        for token in self._secrets:
            text = text.replace(token, HIDDEN_TOKEN)
        return text


def _text_if_ok(status: int, text: str) -> str:
    """The text of a response with status 200. Raises DashboardUnreachableError for other statuses."""
    if status != 200:
        raise DashboardUnreachableError(f"HTTP {status}: {_last_line(text)}")
    return text


def _object(text: str) -> JsonObject:
    """Parses a JSON object; empty if the text is JSON, but not an object. Raises DashboardUnreachableError if it is not
    JSON."""
    # The garbage collector would look at all objects again and again while their number grows, in vain: up to ten times
    # the time of the parser.
    gc.disable()
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise DashboardUnreachableError(f"the response is not JSON: {_last_line(text)}") from None
    finally:
        gc.enable()
    return found if isinstance(found, dict) else {}


def _last_line(text: str) -> str:
    """The last line of at least two characters, at most `MAX_ERROR_CHARACTERS` of it. Ray's error responses contain a
    traceback, which ends with the error."""
    lines = [line.strip() for line in text[-MAX_LAST_LINE:].splitlines() if len(line.strip()) > 1]
    return lines[-1][:MAX_ERROR_CHARACTERS] if lines else ""
