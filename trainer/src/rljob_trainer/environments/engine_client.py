"""Lets coroutines of one asyncio loop generate with the engine of an EngineLoop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable

from rljob_trainer.engines.rollout.base import FinishedSequence, GenerationRequest
from rljob_trainer.engines.rollout.loop import EngineLoop
from rljob_trainer.errors import TrainerError

PAUSE_SECONDS = 0.01
"""If the engine is idle, requests are sent when no other has come for so long."""
LONGEST_WAIT_SECONDS = 0.05
"""The longest time that a request waits for others while the engine is idle."""


class EngineClient:
    """All methods are for the thread of `asyncio_loop`.

    Requests that come while the engine is busy are sent at once. If it is idle, the first requests wait some
    milliseconds for those of other rollouts: an engine that decodes batches would begin with only a few, and the others
    would wait until these have ended. In a measurement with 32 rollouts, such an engine needed twice as many steps."""

    def __init__(
        self, engine_loop: EngineLoop, asyncio_loop: asyncio.AbstractEventLoop, count_open: Callable[[], int]
    ) -> None:
        """`count_open`: returns the number of rollouts that have a place or soon get one. Once all of them wait for
        the engine, nothing waits for others."""
        self._engine_loop = engine_loop
        self._asyncio_loop = asyncio_loop
        self._count_open = count_open
        self._futures: dict[str, asyncio.Future[FinishedSequence]] = {}
        """The unfinished requests, by request id."""
        self._unsent: list[GenerationRequest] = []
        self._sending: asyncio.TimerHandle | None = None
        """Sends the unsent requests."""
        self._send_by = 0.0
        """When the unsent requests are sent at the latest, in the loop's time."""
        self._unwanted: list[str] = []
        """Requests that are aborted next."""
        self._next_abort: asyncio.Task[None] | None = None
        """The task that will abort them, until it begins."""
        self._aborts: set[asyncio.Task[None]] = set()
        """All such tasks that have not ended."""
        engine_loop.on_finished = self._on_finished

    async def generate(self, request: GenerationRequest) -> FinishedSequence:
        """Returns the response; its finish reason may be ERROR. If the coroutine is cancelled, the request is aborted.
        Requests that are made in the same iteration of the asyncio loop are added to the engine together.

        Raises the errors of EngineLoop."""
        future: asyncio.Future[FinishedSequence] = self._asyncio_loop.create_future()
        self._futures[request.request_id] = future
        self._unsent.append(request)
        self._send_soon()
        try:
            return await future
        except asyncio.CancelledError:
            is_sent = all(each is not request for each in self._unsent)
            self._unsent = [each for each in self._unsent if each is not request]
            # The engine does not know a request that was not sent.
            if self._futures.pop(request.request_id, None) is not None and is_sent:
                self._unwanted.append(request.request_id)
                if self._next_abort is None:
                    self._next_abort = self._asyncio_loop.create_task(self._abort_unwanted())
                    self._aborts.add(self._next_abort)
                    self._next_abort.add_done_callback(self._aborts.discard)
                await asyncio.shield(self._next_abort)
            raise

    async def settle(self) -> None:
        """Waits for the requests that are being aborted."""
        while self._aborts:
            await asyncio.gather(*self._aborts, return_exceptions=True)

    def _send_soon(self) -> None:
        now = self._asyncio_loop.time()
        if self._sending is None:
            self._send_by = now + LONGEST_WAIT_SECONDS
        elif self._sending.when() <= now:
            return
        else:
            self._sending.cancel()
        is_busy = len(self._futures) > len(self._unsent)
        waits = not is_busy and len(self._futures) < self._count_open()
        self._sending = self._asyncio_loop.call_at(
            min(now + PAUSE_SECONDS, self._send_by) if waits else now, self._send
        )

    def _send(self) -> None:
        self._sending = None
        requests, self._unsent = self._unsent, []
        if not requests:
            return
        try:
            # A later turn continues an earlier one, whose keys and values the engine may still have.
            self._engine_loop.submit(requests, keeps_cache=True)
        except Exception as error:
            # Any error, because coroutines would wait for ever.
            for request in requests:
                future = self._futures.pop(request.request_id, None)
                if future is not None and not future.done():
                    future.set_exception(error)

    async def _abort_unwanted(self) -> None:
        """Aborts all requests whose coroutines are cancelled at the same time, and drops what was sampled for them.

        At the end of a run, and when the controller drops the rest of a step, nothing could use a part of a turn: its
        environment ends, too, and the rollout begins again from its ticket. Weights are replaced only while no rollout
        is open, so no turn is continued with other weights. At a rollout's time limit the length of the part depends on
        the load of the engine and not on the policy, and the environment cannot answer it."""
        await asyncio.sleep(0)
        ids, self._unwanted, self._next_abort = self._unwanted, [], None
        # The call waits for the current step of the engine. A failed engine has no requests any more.
        with contextlib.suppress(TrainerError):
            await asyncio.to_thread(self._engine_loop.abort, ids)

    def _on_finished(self, sequences: list[FinishedSequence]) -> None:
        """In the thread of the engine."""
        self._asyncio_loop.call_soon_threadsafe(self._deliver, sequences)

    def _deliver(self, sequences: Iterable[FinishedSequence]) -> None:
        for sequence in sequences:
            future = self._futures.pop(sequence.request_id, None)
            if future is not None and not future.done():
                future.set_result(sequence)
