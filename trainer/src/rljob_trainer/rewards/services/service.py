"""Calls of an HTTP service from a scoring process: time limits, rate limits, retries.

A failure of the service says nothing about the response. So a call either returns what the service answered, or raises
ServiceError after all retries; nobody makes a score of such an error.

A failed attempt is made again after a pause that doubles each time, with a random part, so that many callers do not
return at the same moment. `Retry-After` of the statuses 429 and 503 is respected by all calls of the process. A status
from 400 to 499, except 408 and 429, is not retried, because the service refuses the request itself.

After a call has failed in all of its attempts, each of the next calls has one attempt, until one succeeds. Otherwise an
outage would cost every call all attempts.
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

from rljob_trainer.rewards.base import excerpt

if TYPE_CHECKING:
    import aiohttp

MAX_ATTEMPTS = 6
"""Attempts of a call. Without Retry-After, the pauses between them add up to at most 31 s."""
FIRST_PAUSE_SECONDS = 1.0
MAX_PROBE_SECONDS = 30.0
"""Largest time limit of one attempt of a probe."""
MAX_RETRY_AFTER_SECONDS = 120.0
"""If a service asks for a longer pause, the call is not made again: it would hold up the whole step."""
WINDOW_SECONDS = 61.0
"""Rate limits are per minute. One second more, because requests do not travel equally fast."""
MAX_ANSWER_BYTES = 16 << 20
MAX_BODY_CHARACTERS = 400
"""Characters of an answer that a message shows."""
REQUESTS, RETRIES, SECONDS = "total_requests", "total_retries", "total_call_seconds"
"""What is counted; the last part of the metric's name."""
REQUEST_TIMEOUT, TOO_MANY_REQUESTS = 408, 429

Counts = defaultdict[str, float]
Answer = TypeVar("Answer")


class ServiceError(Exception):
    """The service gave no usable answer, after all attempts."""

    def __init__(self, message: str, *, is_refusal: bool = False) -> None:
        """`is_refusal`: the service does not accept the request, so a later attempt would fail, too."""
        super().__init__(message)
        self.is_refusal = is_refusal


class UnusableAnswerError(ValueError):
    """An answer with status 200 that is not what the service should send; the call is made again."""


@dataclass(frozen=True)
class ServiceLimits:
    """The share of the job's limits that one process has; None for no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None


class RateLimit:
    """At most `limit` units in any WINDOW_SECONDS. Something larger than the limit has a window of its own."""

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
    is_refusal: bool = False
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
        read: Callable[[Mapping[str, object]], Answer],
        counts: Counts,
        *,
        num_tokens: float = 0,
        max_attempts: int | None = None,
    ) -> Answer:
        """Posts `body` as JSON, and returns what `read` makes of the JSON object in the answer.

        `read` may raise UnusableAnswerError. `num_tokens`: an estimate for the limit of tokens. Raises ServiceError."""
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
            gives_up = found.is_refusal or found.retry_after > MAX_RETRY_AFTER_SECONDS
            if gives_up or num_done >= max_attempts:
                self._is_down = self._is_down or not gives_up
                attempts = f" ({num_done} attempts)" if num_done > 1 else ""
                raise ServiceError(f"{found.message}{attempts}", is_refusal=found.is_refusal)
            counts[RETRIES] += 1
            await asyncio.sleep(pause)

    def for_probe(self) -> Service:
        """Returns a service for the test before the run, which must end before the limit for loading a scorer."""
        return replace(self, timeout_seconds=min(self.timeout_seconds, MAX_PROBE_SECONDS))

    async def is_reachable(self) -> str | None:
        """Sends a GET request. Returns why there was no answer; None if there was any, whatever its status."""
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
        self, body: Mapping[str, object], read: Callable[[Mapping[str, object]], Answer], reserved: list[float] | None
    ) -> Answer | _Failure:
        import aiohttp

        try:
            async with self._opened().post(self.url, json=body, allow_redirects=False) as response:
                data = await _limited(response.content)
                status, retry_after = response.status, _retry_after(response.headers.get("Retry-After"))
        except TimeoutError:
            return _Failure(f"{self.url} did not answer within {self.timeout_seconds:g} s")
        except (aiohttp.ClientError, OSError) as error:
            return _Failure(self.cleaned(f"{self.url}: {type(error).__name__}: {error}"))
        if status != 200:
            is_refusal = 300 <= status < 500 and status not in (REQUEST_TIMEOUT, TOO_MANY_REQUESTS)
            message = self.cleaned(f"{self.url} answered HTTP status {status}: {_shown(data)}")
            return _Failure(message, is_refusal, retry_after if status in (TOO_MANY_REQUESTS, 503) else 0.0)
        try:
            answer = _json_object(data)
            if reserved is not None and (used := _total_tokens(answer)) is not None:
                reserved[1] = used
            return read(answer)
        except UnusableAnswerError as error:
            return _Failure(self.cleaned(f"{self.url} {error}; it answered {_shown(data)}"))

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
            # Not all of the waiting calls at the first moment.
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
        """The text without the key, which a service might repeat."""
        return text if not self.key else text.replace(self.key, "***")


async def _limited(content: aiohttp.StreamReader) -> bytes:
    try:
        await content.readexactly(MAX_ANSWER_BYTES)
    except asyncio.IncompleteReadError as error:
        return error.partial
    return b"an answer that is too long"


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
    try:
        answer = json.loads(data)
    except (ValueError, RecursionError):
        raise UnusableAnswerError("did not answer with valid JSON") from None
    if not isinstance(answer, dict):
        raise UnusableAnswerError("did not answer with a JSON object")
    return answer


def _total_tokens(answer: Mapping[str, object]) -> float | None:
    match answer.get("usage"):
        case {"total_tokens": int() as used}:
            return used
    return None


def _shown(data: bytes) -> str:
    """The message of an error in JSON, as the usual servers write it; otherwise an excerpt of the body."""
    text = data.decode(errors="replace")
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError):
        answer = None
    match answer:
        case {"error": {"message": str() as message}} | {"error": str() as message} | {"message": str() as message}:
            text = message
        case {"detail": str() as message}:
            text = message
    return excerpt(" ".join(text.split()), MAX_BODY_CHARACTERS) or "an empty body"
