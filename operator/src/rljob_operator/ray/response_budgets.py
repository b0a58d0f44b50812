"""How much of a dashboard's response the operator reads, for each request and over all jobs.

A dashboard runs in a user's pod. Without these limits, the heads of one tenant could take all memory of the operator,
or all time of its event loop: JSON of many small values takes 25 times its size while it is parsed, and 256 KiB of it
take 4 ms. A thread would not help, because the parser keeps Python's interpreter lock until it has finished. So the
number of values has a limit, too.
"""

from __future__ import annotations

import asyncio
import functools
import weakref
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import aiohttp
from aiohttp.client_proto import ResponseHandler

KIB = 1024
MAX_HEADERS = 32
MAX_HEADER_BYTES = 2 * KIB
"""For the status line and each header. Ray sends five short headers."""
SHORT_BYTES = 64 * KIB
"""For responses that are a line or a traceback, such as those to a request to stop."""
JOB_BYTES = 256 * KIB
"""For a Ray job. Ray's message has at most 20,000 characters, each of which takes up to 12 bytes."""
RUN_STATE_BYTES = 256 * KIB
"""For a run state file, which has at most `dashboard_responses.MAX_RUN_STATE_CHARACTERS` of up to 4 bytes."""
LOG_BYTES = 4 * 1024 * KIB
"""For the last lines of a log. Only the last `KEPT_LOG_BYTES` of them stay in memory."""
KEPT_LOG_BYTES = 64 * KIB
NODE_BYTES = 2 * KIB
"""For each Ray node. A real one takes 0.5 KiB, and its resources and labels can be more."""
MAX_NODE_LISTING_BYTES = 6 * 1024 * KIB
"""0.75 KiB for each node of the largest jobs, which have 8 pools of 1,024 nodes."""
NODE_VALUES = 64
"""For each Ray node. A real one has about 25 values."""
MAX_NODE_LISTING_VALUES = 256 * 1024
MORE_NODES = 16
"""A listing may have twice as many nodes as the cluster has pods, and this number more: for a while, Ray lists nodes
whose pods were already deleted and replaced."""
GROUP_BYTES = 24 * KIB
"""For each placement group. The trainer has one for each pod, with a bundle of 0.35 KiB for each of up to 64 GPUs."""
GROUP_VALUES = 1024
"""For each placement group: a bundle has about 10 values."""
MAX_LISTED_GROUPS = 64
LISTING_BYTES = 64 * KIB
"""A listing has this budget in addition to that for each entry."""
LISTING_VALUES = 4096
"""A listing may have this number of values in addition to those of each entry."""
BYTES_IN_FLIGHT = 16 * 1024 * KIB
"""Limit for all responses together that are being read, without the first `STEP_BYTES` of each."""
STEP_BYTES = 64 * KIB
SLICE_BYTES = 16 * KIB
"""How much of what a connection received is parsed at once."""
LONG_RESPONSES_OF_NAMESPACE = 4
"""How many responses of one namespace with more than `STEP_BYTES` are read at the same time."""
LONG_RESPONSE_SECONDS = 2.0
"""How long the rest of such a response may take, once it can be read."""


class ResponseTooLargeError(Exception):
    """A response has more bytes than its budget."""


class ResponseTooSlowError(Exception):
    """The rest of a long response takes longer than `LONG_RESPONSE_SECONDS`."""


@dataclass(frozen=True)
class ListingBudget:
    """What a listing of the state API may have."""

    entries: int
    """Further entries are ignored."""
    num_bytes: int
    values: int
    """Strings, numbers, lists, objects and so on, in all entries together."""


def node_listing(num_pods: int) -> ListingBudget:
    """The budget for a listing of the Ray nodes of a cluster with this number of pods."""
    return ListingBudget(
        2 * num_pods + MORE_NODES,
        min(MAX_NODE_LISTING_BYTES, LISTING_BYTES + num_pods * NODE_BYTES),
        min(MAX_NODE_LISTING_VALUES, LISTING_VALUES + num_pods * NODE_VALUES),
    )


def group_listing(num_pods: int) -> ListingBudget:
    """The budget for a listing of the placement groups in a cluster with this number of pods."""
    num_groups = min(MAX_LISTED_GROUPS, num_pods)
    return ListingBudget(
        MAX_LISTED_GROUPS, LISTING_BYTES + num_groups * GROUP_BYTES, LISTING_VALUES + num_groups * GROUP_VALUES
    )


def num_values_at_most(text: str) -> int:
    """An upper limit of the number of values in a JSON text, much faster than the parser: each value is the first of a
    list or object, or comes after a comma. Characters in strings count, too."""
    return 1 + text.count(",") + text.count("[") + text.count("{")


class BodyReader:
    """Reads the bodies of responses. `bytes_in_flight`: how many bytes all bodies together may have while they are
    read; the first `STEP_BYTES` of each do not count, so that many long responses delay no short one.

    The long responses of one namespace cannot delay those of another one without end: only a few of them are read or
    wait for their turn at the same time, and each has little time."""

    def __init__(self, bytes_in_flight: int = BYTES_IN_FLIGHT) -> None:
        self._steps = asyncio.Semaphore(bytes_in_flight // STEP_BYTES)
        self._turn = asyncio.Lock()
        """Held while a response waits for its steps. Without it, several responses could wait for each other's."""
        self._of_namespaces: weakref.WeakValueDictionary[str, asyncio.Semaphore] = weakref.WeakValueDictionary()

    async def read(self, response: aiohttp.ClientResponse, max_bytes: int, namespace: str) -> bytearray:
        """Reads a body; waits while all bodies together, or the bodies of this namespace, have too many bytes. Raises
        ResponseTooLargeError and ResponseTooSlowError."""
        data, is_long = bytearray(), False
        _reject_long(response, max_bytes)
        num_bytes = max_bytes if response.content_length is None else response.content_length
        try:
            async with AsyncExitStack() as held:
                async for chunk in response.content.iter_any():
                    data += chunk
                    if len(data) > max_bytes:
                        raise ResponseTooLargeError(_too_large(f"at least {len(data)}", max_bytes))
                    if len(data) > STEP_BYTES and not is_long:
                        is_long = True
                        await held.enter_async_context(self._steps_for(num_bytes, namespace))
                        await held.enter_async_context(asyncio.timeout(LONG_RESPONSE_SECONDS))
        except TimeoutError:
            raise ResponseTooSlowError(
                f"too slow (more than {LONG_RESPONSE_SECONDS:g} s after the first {STEP_BYTES} bytes)"
            ) from None
        # The caller has parsed and dropped the body before another task runs, so it no longer counts.
        return data

    @asynccontextmanager
    async def _steps_for(self, num_bytes: int, namespace: str) -> AsyncIterator[None]:
        """Waits until a response with this number of bytes may be read, and lets others wait until it was read."""
        num_steps = 0
        async with self._of_namespaces.setdefault(namespace, asyncio.Semaphore(LONG_RESPONSES_OF_NAMESPACE)):
            try:
                async with self._turn:
                    while num_steps < -(-num_bytes // STEP_BYTES) - 1:
                        await self._steps.acquire()
                        num_steps += 1
                yield
            finally:
                for _ in range(num_steps):
                    self._steps.release()

    async def read_end(self, response: aiohttp.ClientResponse, max_bytes: int, kept_bytes: int) -> bytearray:
        """Reads a body, of which only the last `kept_bytes` stay in memory. Raises ResponseTooLargeError."""
        data, num_read = bytearray(), 0
        _reject_long(response, max_bytes)
        async for chunk in response.content.iter_any():
            num_read += len(chunk)
            if num_read > max_bytes:
                raise ResponseTooLargeError(_too_large(f"at least {num_read}", max_bytes))
            data += chunk
            del data[:-kept_bytes]
        return data


class OneResponseConnector(aiohttp.TCPConnector):
    """Opens connections that fail when they receive a second response to a request, or interim responses. Ray sends
    none; a head that sends them without end would take all time of the event loop before any body is read."""

    def __init__(self, keepalive_timeout: float) -> None:
        # No connection limit: a slow dashboard must not delay requests to others.
        super().__init__(limit=0, keepalive_timeout=keepalive_timeout)
        self._factory = functools.partial(_new_protocol, self._loop)


class _OneResponseProtocol(ResponseHandler):
    """Parses what it receives in small slices, and stops at the second response that nobody has requested."""

    def data_received(self, data: bytes) -> None:
        for start in range(0, len(data), SLICE_BYTES) if data else (0,):
            super().data_received(data[start : start + SLICE_BYTES])
            if len(self._buffer) > 1:
                self.set_exception(aiohttp.ServerDisconnectedError("more than one response to a request"))
                if self.transport is not None:
                    self.transport.abort()
                return


def _new_protocol(loop: asyncio.AbstractEventLoop) -> ResponseHandler:
    return _OneResponseProtocol(loop)


def _reject_long(response: aiohttp.ClientResponse, max_bytes: int) -> None:
    if response.content_length is not None and response.content_length > max_bytes:
        raise ResponseTooLargeError(_too_large(str(response.content_length), max_bytes))


def _too_large(seen: str, max_bytes: int) -> str:
    return f"too large ({seen} bytes, at most {max_bytes})"
