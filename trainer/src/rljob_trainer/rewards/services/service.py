"""Calls of an HTTP service from a scoring process: time limits, rate limits, retries.

A failure of the service says nothing about the response. So a call either returns the service's reply, or raises
ServiceError after all retries; such an error never becomes a score.

A failed attempt is retried after a pause that doubles each time, with a random part, so that many calls are not
repeated at the same moment. All calls of the process respect `Retry-After` of the statuses 429 and 503. The statuses
300 to 499, except 408 and 429, are not retried, because the service rejects the request itself. All other statuses
except 200 are retried.

After a call has failed in all of its attempts, each of the next calls has one attempt, until one succeeds. Otherwise
every call would use all of its attempts during an outage.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import parse_qsl

from rljob_trainer.rewards.base import excerpt

if TYPE_CHECKING:
    import aiohttp

MAX_ATTEMPTS = 6
"""Attempts of a call. Without Retry-After, the pauses between them add up to at most 31 s."""
FIRST_PAUSE_SECONDS = 1.0
MAX_PROBE_SECONDS = 30.0
"""Largest time limit of one attempt of a probe."""
MAX_RETRY_AFTER_SECONDS = 120.0
"""If a service asks for a longer pause, the call is not retried: it would delay the whole step."""
WINDOW_SECONDS = 61.0
"""Rate limits are per minute. The window has one second more, because requests take different times to arrive."""
MAX_REPLY_BYTES = 16 << 20
MAX_BODY_CHARACTERS = 400
"""Characters of a reply that a message shows."""
REQUESTS, RETRIES, SECONDS = "total_requests", "total_retries", "total_call_seconds"
"""What is counted; the last part of the metric's name."""
MIN_SECRET_CHARACTERS = 6
"""Shorter values of a URL's query are shown, because they also occur in other text."""
REQUEST_TIMEOUT, TOO_MANY_REQUESTS = 408, 429

Counts = defaultdict[str, float]
ReplyT = TypeVar("ReplyT")


class ServiceError(Exception):
    """The service gave no usable reply, after all attempts."""

    def __init__(self, message: str, *, is_rejection: bool = False) -> None:
        """`is_rejection`: the service rejects the request itself, so a later attempt would fail, too."""
        super().__init__(message)
        self.is_rejection = is_rejection


class UnusableReplyError(ValueError):
    """A reply with status 200 that is not what the service should send; the call is retried."""


@dataclass(frozen=True)
class ServiceLimits:
    """The share of the job's limits that one process has; None for no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None


class RateLimit:
    """At most `limit` units in any WINDOW_SECONDS. An amount larger than the limit waits until nothing else is in the
    window."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self._used: deque[list[float]] = deque()
        """Time and amount."""

    def seconds_until_free(self, amount: float, now: float) -> float:
        """How long to wait before this amount may be used; 0 if it may be used now."""
        while self._used and self._used[0][0] <= now - WINDOW_SECONDS:
            self._used.popleft()
        total, wait = sum(used for _, used in self._used), 0.0
        for time, used in self._used:
            if total + amount <= self.limit:
                break
            total -= used
            wait = time + WINDOW_SECONDS - now
        return wait

    def use(self, amount: float, now: float) -> list[float]:
        """Records an amount, and returns the record; its second item may be corrected later."""
        record = [now, amount]
        self._used.append(record)
        return record


@dataclass
class _Failure:
    """Why one attempt failed."""

    message: str
    is_rejection: bool = False
    retry_after: float = 0.0


@dataclass
class Service:
    """One URL. Use it in one event loop only."""

    url: str
    key: str | None
    """Sent as `Authorization: Bearer`; never part of a message."""
    timeout_seconds: float
    """Of one attempt."""
    limits: ServiceLimits = field(default_factory=ServiceLimits)

    def __post_init__(self) -> None:
        self.shown_url, _, query = self.url.partition("?")
        """The URL without its query, for messages."""
        self._secrets = [query, *(value for _, value in parse_qsl(query) if len(value) >= MIN_SECRET_CHARACTERS)]
        requests, tokens = self.limits.requests_per_minute, self.limits.tokens_per_minute
        self._requests = None if requests is None else RateLimit(requests)
        self._tokens = None if tokens is None else RateLimit(tokens)
        self._session: aiohttp.ClientSession | None = None
        self._gate = asyncio.Lock()
        self._is_down = False
        """Whether a call has failed in all of its attempts, and no attempt has succeeded since."""
        self.held_until = 0.0
        """Time of the event loop until which the service has asked for no requests; 0 if it has not."""
        self._random = random.Random()

    async def call(
        self,
        body: Mapping[str, object],
        read: Callable[[Mapping[str, object]], ReplyT],
        counts: Counts,
        *,
        num_tokens: float = 0,
        max_attempts: int | None = None,
    ) -> ReplyT:
        """Posts `body` as JSON, and returns the result of `read` for the JSON object in the reply.

        `read` may raise UnusableReplyError. `num_tokens`: an estimate for the limit of tokens. Raises ServiceError."""
        max_attempts, num_done = 1 if self._is_down else max_attempts or MAX_ATTEMPTS, 0
        while True:
            reserved = await self._admitted(num_tokens)
            started = asyncio.get_running_loop().time()
            counts[REQUESTS] += 1
            try:
                found = await self._attempt(body, read, reserved)
            finally:
                counts[SECONDS] += asyncio.get_running_loop().time() - started
            if not isinstance(found, _Failure):
                self._is_down = False
                return found
            num_done += 1
            pause = FIRST_PAUSE_SECONDS * 2 ** (num_done - 1) * self._random.uniform(0.5, 1)
            self._hold(found.retry_after)
            gives_up = found.is_rejection or found.retry_after > MAX_RETRY_AFTER_SECONDS
            if gives_up or num_done >= max_attempts:
                self._is_down = self._is_down or not gives_up
                attempts = f" ({num_done} attempts)" if num_done > 1 else ""
                raise ServiceError(f"{found.message}{attempts}", is_rejection=found.is_rejection)
            counts[RETRIES] += 1
            await asyncio.sleep(pause)

    def for_probe(self) -> Service:
        """Returns a service for the test before the run, which must end before the limit for loading a scorer."""
        return replace(self, timeout_seconds=min(self.timeout_seconds, MAX_PROBE_SECONDS))

    async def is_reachable(self) -> str | None:
        """Sends a GET request. Returns why there was no reply; None if there was one, whatever its status."""
        import aiohttp

        try:
            async with self._opened().get(self.url, allow_redirects=False):
                return None
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return self.cleaned(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)

    async def close(self) -> None:
        """Closes the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _attempt(
        self, body: Mapping[str, object], read: Callable[[Mapping[str, object]], ReplyT], reserved: list[float] | None
    ) -> ReplyT | _Failure:
        import aiohttp

        try:
            async with self._opened().post(self.url, json=body, allow_redirects=False) as response:
                data = await _limited(response.content)
                status, retry_after = response.status, _retry_after(response.headers.get("Retry-After"))
        except TimeoutError:
            return _Failure(f"{self.shown_url} did not reply within {self.timeout_seconds:g} s")
        except (aiohttp.ClientError, OSError) as error:
            return _Failure(self.cleaned(f"{self.shown_url}: {type(error).__name__}: {error}"))
        if status != 200:
            is_rejection = 300 <= status < 500 and status not in (REQUEST_TIMEOUT, TOO_MANY_REQUESTS)
            message = self.cleaned(f"{self.shown_url} returned HTTP status {status}: {_shown(data)}")
            return _Failure(message, is_rejection, retry_after if status in (TOO_MANY_REQUESTS, 503) else 0.0)
        try:
            reply = _json_object(data)
            if reserved is not None and (used := _total_tokens(reply)) is not None:
                reserved[1] = used
            return read(reply)
        except UnusableReplyError as error:
            return _Failure(self.cleaned(f"{self.shown_url} {error} (seen: {_shown(data)})"))

    async def _admitted(self, num_tokens: float) -> list[float] | None:
        """Waits until the limits allow a request, in the order of the calls. Returns the record of its tokens."""
        loop = asyncio.get_running_loop()
        async with self._gate:
            while True:
                now = loop.time()
                waits = [self.held_until - now]
                if self._requests is not None:
                    waits.append(self._requests.seconds_until_free(1, now))
                if self._tokens is not None:
                    waits.append(self._tokens.seconds_until_free(num_tokens, now))
                if max(waits) <= 0:
                    break
                await asyncio.sleep(max(waits))
            if self._requests is not None:
                self._requests.use(1, now)
            return None if self._tokens is None else self._tokens.use(num_tokens, now)

    def _hold(self, seconds: float) -> None:
        if 0 < seconds <= MAX_RETRY_AFTER_SECONDS:
            # A random part, so that the processes of the job do not all send their waiting calls at the same moment.
            until = asyncio.get_running_loop().time() + seconds * self._random.uniform(1.0, 1.1)
            self.held_until = max(self.held_until, until)

    def _opened(self) -> aiohttp.ClientSession:
        import aiohttp

        if self._session is None:
            headers = {} if self.key is None else {"Authorization": f"Bearer {self.key}"}
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                headers=headers,
                timeout=aiohttp.ClientTimeout(total=self.timeout_seconds),
                # Uses the proxies of the job's variables, such as HTTPS_PROXY.
                trust_env=True,
            )
        return self._session

    def cleaned(self, text: str) -> str:
        """The text without the key, which a service might repeat, and without the query of the URL and its values,
        which may be keys, too."""
        for secret in (self.key, *self._secrets):
            text = text.replace(secret, "***") if secret else text
        return text


async def _limited(content: aiohttp.StreamReader) -> bytes:
    """The body of a reply. Of a body that is too long, only one byte more than the limit is read."""
    try:
        return await content.readexactly(MAX_REPLY_BYTES + 1)
    except asyncio.IncompleteReadError as error:
        return error.partial


def _retry_after(value: str | None) -> float:
    """The seconds that the header Retry-After names, as a number or as a date; 0 without a valid one."""
    if value is None:
        return 0.0
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, (parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError):
        return 0.0


def _json_object(data: bytes) -> Mapping[str, object]:
    if len(data) > MAX_REPLY_BYTES:
        raise UnusableReplyError(
            f"returned more than {MAX_REPLY_BYTES >> 20} MiB; a reward service must return a smaller JSON object"
        )
    try:
        reply = json.loads(data)
    except (ValueError, RecursionError):
        raise UnusableReplyError("did not return valid JSON") from None
    if not isinstance(reply, dict):
        raise UnusableReplyError("did not return a JSON object")
    return reply


def _total_tokens(reply: Mapping[str, object]) -> float | None:
    match reply.get("usage"):
        case {"total_tokens": int() as used}:
            return used
    return None


def _shown(data: bytes) -> str:
    """The message of an error in JSON, as the usual servers write it; otherwise an excerpt of the body."""
    text = data.decode(errors="replace")
    try:
        reply = json.loads(text)
    except (ValueError, RecursionError):
        reply = None
    match reply:
        case {"error": {"message": str() as message}} | {"error": str() as message} | {"message": str() as message}:
            text = message
        case {"detail": str() as message}:
            text = message
    return excerpt(" ".join(text.split()), MAX_BODY_CHARACTERS) or "an empty body"
