"""A work queue like the queues of Kubernetes controllers: a key is never processed twice at the same time.

A waiting key that is added again is processed once. A key that is added while it is processed is processed again
afterwards. A failed key is retried with exponential backoff and delays no other key. Namespaces take turns: a namespace
with a thousand waiting keys delays the only key of another namespace by one key. `Slots` limits how many keys are
processed at the same time; the work on a key can free its slot while it waits for a slow response.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

FIRST_DELAY_SECONDS = 0.5
"""Delay before the first retry of a key; it doubles with each further failure."""
LONGEST_DELAY_SECONDS = 300.0
JITTER = 0.2
"""The delay of a retry is up to this fraction shorter or longer, so that keys that failed together are not retried
together."""

KeyT = TypeVar("KeyT", bound=Hashable)


class QueueClosed(Exception):
    """The queue is closed: it returns no more keys."""


class WorkQueue(Generic[KeyT]):
    """The queue, for one event loop. `random` returns numbers in [0, 1); `namespace_of` returns the namespace of
    a key."""

    def __init__(self, random: Callable[[], float], namespace_of: Callable[[KeyT], Hashable]) -> None:
        self._random = random
        self._namespace_of = namespace_of
        self._waiting: OrderedDict[Hashable, deque[KeyT]] = OrderedDict()
        """Waiting keys by namespace. The namespace whose turn it is comes first; one without keys is removed."""
        self._added: set[KeyT] = set()
        """Keys that were added and not returned by `get` since: the waiting keys, and keys that were added while they
        were processed and still are."""
        self._processing: set[KeyT] = set()
        self._pauses: dict[KeyT, asyncio.TimerHandle] = {}
        """The timers that end the pauses of keys."""
        self._timers: dict[KeyT, asyncio.TimerHandle] = {}
        """The timers of keys that will be added later."""
        self._num_failures: dict[KeyT, int] = {}
        self._changed = asyncio.Event()
        self._closed = False

    @property
    def num_waiting(self) -> int:
        """Number of keys that `get` can return now."""
        return sum(map(len, self._waiting.values()))

    @property
    def num_delayed(self) -> int:
        """Number of keys that will be added later."""
        return len(self._timers)

    @property
    def num_working(self) -> int:
        """Number of keys that `get` has returned and for which `done` was not called yet."""
        return len(self._processing)

    def add(self, key: KeyT) -> None:
        """Adds a key, to be processed when its turn comes. If it is being processed now, it is processed again."""
        if self._closed or key in self._added:
            return
        self._added.add(key)
        self._enqueue_if_free(key)

    def pause(self, key: KeyT, seconds: float) -> None:
        """Does not return a key from `get` before the pause is over, however often it is added. Call it while the key
        is processed."""
        if not self._closed and key not in self._pauses:
            self._pauses[key] = asyncio.get_running_loop().call_later(seconds, self._end_pause, key)

    def add_after(self, key: KeyT, seconds: float) -> None:
        """Adds a key after a delay. If a key has several delays, only the one that ends first counts. When `get`
        returns a key, the key's delay is cancelled."""
        loop = asyncio.get_running_loop()
        planned = self._timers.get(key)
        if self._closed or (planned is not None and planned.when() <= loop.time() + seconds):
            return
        if planned is not None:
            planned.cancel()
        self._timers[key] = loop.call_later(max(0.0, seconds), self._due, key)

    def retry(self, key: KeyT, at_least_seconds: float = 0.0) -> float:
        """Adds a failed key after a delay that grows exponentially with the key's failures in a row, up to
        `LONGEST_DELAY_SECONDS` before jitter. The delay is not shorter than `at_least_seconds`. Returns the delay in
        seconds."""
        num_failures = self._num_failures.get(key, 0)
        self._num_failures[key] = num_failures + 1
        # The exponent is bounded to avoid an overflow; 2**10 times 0.5 s exceeds the longest delay anyway.
        delay = min(LONGEST_DELAY_SECONDS, FIRST_DELAY_SECONDS * 2.0 ** min(num_failures, 10))
        delay *= 1 - JITTER + 2 * JITTER * self._random()
        delay = max(delay, at_least_seconds)
        self.add_after(key, delay)
        return delay

    def forget_failures(self, key: KeyT) -> None:
        """Resets the key's backoff."""
        self._num_failures.pop(key, None)

    async def get(self) -> KeyT:
        """Waits for the next key. The caller must call `done` for it. Raises QueueClosed when the queue is closed."""
        while not self._waiting:
            if self._closed:
                raise QueueClosed
            self._changed.clear()
            await self._changed.wait()
        if self._closed:
            raise QueueClosed
        key = self._next()
        self._added.discard(key)
        self._processing.add(key)
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()
        return key

    def done(self, key: KeyT) -> None:
        """Marks a key as processed. If it was added meanwhile, it waits for its next turn."""
        self._processing.discard(key)
        self._enqueue_if_free(key)

    def close(self) -> None:
        """Closes the queue: nothing is added or returned any more."""
        self._closed = True
        for timer in (*self._timers.values(), *self._pauses.values()):
            timer.cancel()
        self._timers.clear()
        self._pauses.clear()
        self._changed.set()

    def _end_pause(self, key: KeyT) -> None:
        del self._pauses[key]
        self._enqueue_if_free(key)

    def _enqueue_if_free(self, key: KeyT) -> None:
        """Lets `get` return an added key, unless it is being processed or paused."""
        if key in self._added and key not in self._processing and key not in self._pauses:
            self._enqueue(key)

    def _enqueue(self, key: KeyT) -> None:
        self._waiting.setdefault(self._namespace_of(key), deque()).append(key)
        self._changed.set()

    def _next(self) -> KeyT:
        """Takes the first key of the namespace whose turn it is. The namespace moves to the end if it has more keys."""
        namespace, keys = self._waiting.popitem(last=False)
        key = keys.popleft()
        if keys:
            self._waiting[namespace] = keys
        return key

    def _due(self, key: KeyT) -> None:
        self._timers.pop(key, None)
        self.add(key)


class Slots:
    """Limits how many keys are processed at the same time."""

    def __init__(self, num_slots: int) -> None:
        self._free = asyncio.Semaphore(num_slots)

    async def take(self) -> None:
        """Waits for a free slot and takes it."""
        await self._free.acquire()

    def free(self) -> None:
        """Frees the slot."""
        self._free.release()

    @asynccontextmanager
    async def released(self) -> AsyncIterator[None]:
        """Frees the slot within the context, and waits for a slot again when the context ends. For slow requests."""
        self._free.release()
        try:
            yield
        finally:
            await self._free.acquire()


async def work_through(queue: WorkQueue[KeyT], slots: Slots, work: Callable[[KeyT], Awaitable[None]]) -> None:
    """Processes the keys of a queue until it is closed, then waits for the running work.

    `work` should handle its own failures: an exception that it raises stops all work and is raised here."""
    async with asyncio.TaskGroup() as group:
        while True:
            try:
                key = await queue.get()
            except QueueClosed:
                return
            # Wait for a key first, then for a slot. If this loop took the slot first, it would hold the slot while the
            # queue is empty, and work that needs a slot at the end of `released` could not get it.
            await slots.take()
            group.create_task(_work_on(key, queue, slots, work))


async def _work_on(key: KeyT, queue: WorkQueue[KeyT], slots: Slots, work: Callable[[KeyT], Awaitable[None]]) -> None:
    try:
        await work(key)
    finally:
        slots.free()
        queue.done(key)
