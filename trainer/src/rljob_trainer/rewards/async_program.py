"""The event loop of a scoring process with an asynchronous scorer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from rljob_trainer.processes.child_program import FrameReader, send
from rljob_trainer.rewards.base import AsyncCalls, RewardRequest, RewardStatus
from rljob_trainer.rewards.scoring_results import Result, failure_of, requests_of, result_of

ALIVE_SECONDS = 1.0
"""The longest time between two messages to the parent that show that the event loop runs; at most a quarter of the time
limit of a call."""
CANCEL_SECONDS = 1.0
"""How long a call may continue after it was cancelled."""


class AsyncProgram:
    """Makes calls at the same time, and regularly tells the parent that the event loop runs. The parent limits the
    number of calls."""

    def __init__(self, descriptor: int, token: str, scorer: AsyncCalls, timeout_seconds: float) -> None:
        """`token`: that of the first frame."""
        self._descriptor = descriptor
        self._token = token
        self._scorer = scorer
        self._timeout_seconds = timeout_seconds
        self._tasks = set[asyncio.Task[None]]()
        self._is_closed = asyncio.Event()

    async def run(self, reader: FrameReader) -> None:
        """Runs until the parent closes the connection."""
        asyncio.get_running_loop().add_reader(self._descriptor, self._read, reader)
        # Frames that arrived together with the first one are in the reader already.
        self._read(reader)
        interval = min(ALIVE_SECONDS, self._timeout_seconds / 4)
        while not self._is_closed.is_set():
            send(self._descriptor, self._token, {"alive": True})
            try:
                await asyncio.wait_for(self._is_closed.wait(), interval)
            except TimeoutError:
                continue

    def _read(self, reader: FrameReader) -> None:
        frames = reader.read_available()
        if frames is None:
            asyncio.get_running_loop().remove_reader(self._descriptor)
            self._is_closed.set()
            return
        for token, frame in frames:
            task = asyncio.get_running_loop().create_task(self._answer(token, frame))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _answer(self, token: str, frame: bytes) -> None:
        requests, started = requests_of(frame), time.monotonic()
        task = asyncio.get_running_loop().create_task(_caught(self._scorer, requests))
        limit = None if self._scorer.has_own_limits else self._timeout_seconds
        await asyncio.wait({task}, timeout=limit)
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=CANCEL_SECONDS)
            detail = f"ran longer than {self._timeout_seconds:g} s and was cancelled"
            timeout: Result = [RewardStatus.TIMEOUT, None, detail, self._timeout_seconds, None, {}]
            send(self._descriptor, token, [timeout] * len(requests))
            return
        seconds, found = time.monotonic() - started, task.result()
        if isinstance(found, BaseException):
            send(self._descriptor, token, [failure_of(found, seconds)] * len(requests))
        else:
            send(self._descriptor, token, [result_of(value, seconds) for value in found])


async def _caught(scorer: AsyncCalls, requests: Sequence[RewardRequest]) -> Sequence[object] | BaseException:
    """The scores, or the exception: SystemExit in a task would end the event loop."""
    try:
        return await scorer.score(requests)
    except BaseException as error:
        return error
