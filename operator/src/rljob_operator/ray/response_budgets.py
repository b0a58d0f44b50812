"""How many bytes of a dashboard's response the operator reads, for each request and over all jobs.

A dashboard runs in a user's pod. Without these limits, the heads of one tenant could take all memory of the operator,
or all time of its event loop: JSON of many small objects takes 25 times its size while it is parsed, and 256 KiB of it
take up to 15 ms.
"""

from __future__ import annotations

import asyncio
import functools

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
GROUP_BYTES = 24 * KIB
"""For each placement group. The trainer has one for each pod, with a bundle of 0.35 KiB for each of up to 64 GPUs."""
MAX_LISTED_GROUPS = 64
LISTING_BYTES = 64 * KIB
"""A listing has this budget in addition to that for each entry."""
MAX_NODE_LISTING_BYTES = 12 * 1024 * KIB
MORE_NODES = 16
"""A listing may have twice as many nodes as the cluster has pods, and this number more: for a while, Ray lists nodes
whose pods were already deleted and replaced."""
BYTES_IN_FLIGHT = 16 * 1024 * KIB
"""Limit for all responses together that are being read, without the first `STEP_BYTES` of each."""
STEP_BYTES = 64 * KIB
SLICE_BYTES = 16 * KIB
"""How much of what a connection received is parsed at once."""


class ResponseTooLargeError(Exception):
    """A response has more bytes than its budget."""


def max_nodes(num_pods: int) -> int:
    """How many Ray nodes are requested from a cluster with this number of pods."""
    return 2 * num_pods + MORE_NODES


def node_listing_bytes(num_pods: int) -> int:
    """The budget for a listing of the Ray nodes of a cluster with this number of pods."""
    return min(MAX_NODE_LISTING_BYTES, LISTING_BYTES + num_pods * NODE_BYTES)


def group_listing_bytes(num_pods: int) -> int:
    """The budget for a listing of the placement groups in a cluster with this number of pods."""
    return LISTING_BYTES + min(MAX_LISTED_GROUPS, num_pods) * GROUP_BYTES


class BodyReader:
    """Reads the bodies of responses. `bytes_in_flight`: how many bytes all bodies together may have while they are
    read; the first `STEP_BYTES` of each do not count, so that many long responses delay no short one."""

    def __init__(self, bytes_in_flight: int = BYTES_IN_FLIGHT) -> None:
        self._steps = asyncio.Semaphore(bytes_in_flight // STEP_BYTES)
        self._turn = asyncio.Lock()
        """Held while a response waits for its steps. Without it, several responses could wait for each other's."""

    async def read(self, response: aiohttp.ClientResponse, max_bytes: int) -> bytearray:
        """Reads a body; waits while all bodies together have too many bytes. Raises ResponseTooLargeError."""
        data, num_steps = bytearray(), 0
        _reject_long(response, max_bytes)
        num_bytes = max_bytes if response.content_length is None else response.content_length
        num_needed = -(-num_bytes // STEP_BYTES) - 1
        try:
            async for chunk in response.content.iter_any():
                data += chunk
                if len(data) > max_bytes:
                    raise ResponseTooLargeError(_too_large(f"at least {len(data)}", max_bytes))
                if len(data) > STEP_BYTES and num_steps < num_needed:
                    async with self._turn:
                        while num_steps < num_needed:
                            await self._steps.acquire()
                            num_steps += 1
            # The caller has parsed and dropped the body before another task runs, so it no longer counts.
            return data
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
