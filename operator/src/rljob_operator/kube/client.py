"""Sends requests to the API server: JSON in, JSON out, with typed errors, a timeout and metrics.

The official client provides connections and credentials. Its models are not used, because objects from older and newer
servers must be readable whatever fields they have.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from types import TracebackType
from typing import Self

import aiohttp
from kubernetes.aio.client import ApiClient

from rljob_operator.kube.connection import Connection
from rljob_operator.kube.errors import TimedOutError, TooLongError, UnavailableError, error_of
from rljob_operator.kube.server_clock import ServerClock
from rljob_operator.metrics import Metrics
from rljob_operator.raw_json import JsonObject

TIMEOUT_SECONDS = 10.0
MAX_RESPONSE_BYTES = 8 * 2**20
"""Longest response that is read. A single object is smaller: etcd's limit is about 1.5 MiB. But in a namespace whose
objects other people create, a page of 250 objects may be larger."""
READ_BYTES = 2**16
JSON = "application/json"
MERGE_PATCH = "application/merge-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"
USER_AGENT = "rljob-operator"
VERBS = {"GET": "get", "POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}


class KubeClient:
    """A client for the API server; use it as a context manager. Each response also updates the server clock."""

    def __init__(self, connection: Connection, metrics: Metrics, clock: ServerClock) -> None:
        self._api = ApiClient(connection.configuration)
        self._api.user_agent = USER_AGENT
        self._metrics = metrics
        self._clock = clock

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._api.close()  # type: ignore[no-untyped-call]

    async def request(
        self,
        method: str,
        path: str,
        *,
        resource: str,
        query: Mapping[str, str] | None = None,
        body: JsonObject | None = None,
        content_type: str = JSON,
        accept: str = JSON,
    ) -> JsonObject:
        """Sends a request and returns the JSON object in the response. `resource`: the plural name of the kind of
        object, such as `pods`, for metrics and messages. Raises KubeError; TooLongError if the response is longer than
        `MAX_RESPONSE_BYTES`."""
        what = f"{VERBS[method]} {resource} {path}"
        code = "none"
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                headers = {"Accept": accept, "Content-Type": content_type}
                status, data, retry_after = await self._send(method, path, query or {}, body, headers)
            code = str(status)
        except TimeoutError:
            raise TimedOutError(f"{what}: timed out after {TIMEOUT_SECONDS:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise UnavailableError(f"{what}: {error or type(error).__name__}") from error
        finally:
            verb = "list" if method == "GET" and path.endswith(f"/{resource}") else VERBS[method]
            self._metrics.kube_requests.labels(verb, resource, code).inc()
        response = _parse(data)
        if status >= 400:
            text = data.decode(errors="replace")
            raise error_of(what, status, response, text, retry_after, is_read=method == "GET")
        if len(data) > MAX_RESPONSE_BYTES:
            raise TooLongError(f"{what}: the response is longer than {MAX_RESPONSE_BYTES // 2**20} MiB")
        if not response:
            raise UnavailableError(f"{what}: the response is not a JSON object (HTTP {status})")
        return response

    async def _send(
        self, method: str, path: str, query: Mapping[str, str], body: JsonObject | None, headers: Mapping[str, str]
    ) -> tuple[int, bytearray, str]:
        """Sends a request; returns status, body and Retry-After of the response. Of a body that is longer than
        `MAX_RESPONSE_BYTES`, returns a little more than these bytes."""
        # The body is plain JSON already. `param_serialize` does not get it, because it would copy each of its values.
        sent_method, url, sent_headers, _, _ = await self._api.param_serialize(
            method=method,
            resource_path=path,
            query_params=list(query.items()),
            header_params=dict(headers),
            auth_settings=["BearerToken"],
        )
        requested_at = self._clock.monotonic()
        response = await self._api.call_api(sent_method, url, header_params=sent_headers, body=body)
        self._clock.update(str(response.headers.get("Date", "")), requested_at)
        data = await _read(response.response)
        return int(response.status), data, str(response.headers.get("Retry-After", ""))


async def _read(response: aiohttp.ClientResponse) -> bytearray:
    """The body of a response; only its beginning if it is longer than `MAX_RESPONSE_BYTES`."""
    data = bytearray()
    async for part in response.content.iter_chunked(READ_BYTES):
        data += part
        if len(data) > MAX_RESPONSE_BYTES:
            # The connection cannot be used again: the rest of the body is still to come.
            response.close()
            break
    return data


def _parse(data: bytearray) -> JsonObject:
    """The JSON object in a response; empty for anything else."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
