"""One request to the API server: JSON in, JSON out, typed errors, a time limit, counted.

The official client brings connections and credentials; its models are not used, because an object that an older or
newer server sends must be readable whatever fields it has.
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
from rljob_operator.kube.errors import UnavailableError, error_of
from rljob_operator.kube.server_clock import ServerClock
from rljob_operator.metrics import Metrics
from rljob_operator.raw_json import JsonObject

TIMEOUT_SECONDS = 10.0
JSON = "application/json"
MERGE_PATCH = "application/merge-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"
USER_AGENT = "rljob-operator"
VERBS = {"GET": "get", "POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}


class KubeClient:
    """Use it as a context; leaving it closes the connections. Each answer tells the clock the server's time."""

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
    ) -> JsonObject:
        """The answer's object. `resource`: what is asked for, for metrics and messages. Raises KubeError."""
        what = f"{VERBS[method]} {resource} {path}"
        code = "none"
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                status, data, retry_after = await self._send(method, path, query or {}, body, content_type)
            code = str(status)
        except TimeoutError:
            raise UnavailableError(f"{what}: no answer within {TIMEOUT_SECONDS:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise UnavailableError(f"{what}: {error or type(error).__name__}") from error
        finally:
            verb = "list" if method == "GET" and path.endswith(f"/{resource}") else VERBS[method]
            self._metrics.kube_requests.labels(verb, resource, code).inc()
        answer = _parse(data)
        if status >= 400:
            text = data.decode(errors="replace")
            raise error_of(what, status, answer, text, retry_after, is_read=method == "GET")
        if not answer:
            raise UnavailableError(f"{what}: the answer is no JSON object (HTTP {status})")
        return answer

    async def _send(
        self, method: str, path: str, query: Mapping[str, str], body: JsonObject | None, content_type: str
    ) -> tuple[int, bytes, str]:
        """Status, body and Retry-After of the answer. The generated client is untyped from here on. It is not given
        the body to prepare: that is JSON already, and it would look at each value of it."""
        sent_method, url, headers, _, _ = await self._api.param_serialize(
            method=method,
            resource_path=path,
            query_params=list(query.items()),
            header_params={"Accept": JSON, "Content-Type": content_type},
            auth_settings=["BearerToken"],
        )
        asked_at = self._clock.monotonic()
        response = await self._api.call_api(sent_method, url, header_params=headers, body=body)
        self._clock.hear(str(response.headers.get("Date", "")), asked_at)
        data = await response.read()  # type: ignore[no-untyped-call]
        return int(response.status), bytes(data), str(response.headers.get("Retry-After", ""))


def _parse(data: bytes) -> JsonObject:
    """The object in an answer; empty for anything else."""
    try:
        found = json.loads(data)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
