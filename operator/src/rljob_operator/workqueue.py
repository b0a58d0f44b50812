"""A queue of keys that are worked on one at a time each.

A key that is added many times is worked on once; a key that is added while it is worked on is worked on again
afterwards. A key that fails waits longer each time and delays no other. Keys belong to parties, which take turns: one
with a thousand keys delays another's only key by one. `Slots` bounds how many keys are worked on at once, and lets go
of its place whoever waits for something slow.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

FIRST_DELAY_SECONDS = 0.5
LONGEST_DELAY_SECONDS = 300.0
JITTER = 0.2
"""A delay is this much shorter or longer, so that keys that failed together do not come back together."""

KeyT = TypeVar("KeyT", bound=Hashable)


class QueueClosed(Exception):
    """No key will come any more."""


class WorkQueue(Generic[KeyT]):
    """For one event loop. `random` gives numbers from 0 to below 1; `party_of` says whose turn a key takes."""

    def __init__(self, random: Callable[[], float], party_of: Callable[[KeyT], Hashable]) -> None:
        self._random = random
        self._party_of = party_of
        self._waiting: OrderedDict[Hashable, deque[KeyT]] = OrderedDict()
        """By party, the one whose turn it is first. None is empty."""
        self._dirty: set[KeyT] = set()
        self._processing: set[KeyT] = set()
        self._timers: dict[KeyT, asyncio.TimerHandle] = {}
        self._num_failures: dict[KeyT, int] = {}
        self._changed = asyncio.Event()
        self._closed = False

    @property
    def num_waiting(self) -> int:
        """Keys that wait for a place."""
        return sum(map(len, self._waiting.values()))

    @property
    def num_delayed(self) -> int:
        """Keys that will be added later."""
        return len(self._timers)

    @property
    def num_working(self) -> int:
        """Keys that are worked on."""
        return len(self._processing)

    def add(self, key: KeyT) -> None:
        """The key is worked on as soon as there is a place."""
        if self._closed or key in self._dirty:
            return
        self._dirty.add(key)
        if key not in self._processing:
            self._wait_for_turn(key)

    def add_after(self, key: KeyT, seconds: float) -> None:
        """The key is added later. Of several times for one key the earliest counts; they end when its work begins."""
        loop = asyncio.get_running_loop()
        planned = self._timers.get(key)
        if self._closed or (planned is not None and planned.when() <= loop.time() + seconds):
            return
        if planned is not None:
            planned.cancel()
        self._timers[key] = loop.call_later(max(0.0, seconds), self._due, key)

    def retry(self, key: KeyT, at_least_seconds: float = 0.0) -> float:
        """Adds a key that failed, the later the more often it failed in a row. Returns in how many seconds."""
        num_failures = self._num_failures.get(key, 0)
        self._num_failures[key] = num_failures + 1
        # 2**10 half seconds are beyond the longest delay already.
        delay = min(LONGEST_DELAY_SECONDS, FIRST_DELAY_SECONDS * 2.0 ** min(num_failures, 10))
        delay *= 1 - JITTER + 2 * JITTER * self._random()
        delay = max(delay, at_least_seconds)
        self.add_after(key, delay)
        return delay

    def forget_failures(self, key: KeyT) -> None:
        """The key's next failure is its first one again."""
        self._num_failures.pop(key, None)

    async def get(self) -> KeyT:
        """The next key, which `done` must be told about. Raises QueueClosed."""
        while not self._waiting:
            if self._closed:
                raise QueueClosed
            self._changed.clear()
            await self._changed.wait()
        if self._closed:
            raise QueueClosed
        key = self._next()
        self._dirty.discard(key)
        self._processing.add(key)
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()
        return key

    def done(self, key: KeyT) -> None:
        """The work on a key has ended."""
        self._processing.discard(key)
        if key in self._dirty:
            self._wait_for_turn(key)

    def close(self) -> None:
        """Nothing is added or given out any more."""
        self._closed = True
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        self._changed.set()

    def _wait_for_turn(self, key: KeyT) -> None:
        self._waiting.setdefault(self._party_of(key), deque()).append(key)
        self._changed.set()

    def _next(self) -> KeyT:
        """The first key of the party whose turn it is; that party is the last then."""
        party, keys = self._waiting.popitem(last=False)
        key = keys.popleft()
        if keys:
            self._waiting[party] = keys
        return key

    def _due(self, key: KeyT) -> None:
        self._timers.pop(key, None)
        self.add(key)


class Slots:
    """Places for work that needs the API server and the processor."""

    def __init__(self, num_slots: int) -> None:
        self._free = asyncio.Semaphore(num_slots)

    async def take(self) -> None:
        """Waits for a place."""
        await self._free.acquire()

    def leave(self) -> None:
        """Gives the place back."""
        self._free.release()

    @asynccontextmanager
    async def aside(self) -> AsyncIterator[None]:
        """Gives the place to others meanwhile, and takes one again at the end."""
        self._free.release()
        try:
            yield
        finally:
            await self._free.acquire()


async def work_through(queue: WorkQueue[KeyT], slots: Slots, work: Callable[[KeyT], Awaitable[None]]) -> None:
    """Works on the keys of a queue until it is closed, then ends when the work under way has ended.

    `work` is expected to deal with its failures; what it raises nevertheless ends all work and is raised here."""
    async with asyncio.TaskGroup() as group:
        while True:
            try:
                key = await queue.get()
            except QueueClosed:
                return
            # The key first: whoever comes back from waiting needs a place even if there is no key.
            await slots.take()
            group.create_task(_work_on(key, queue, slots, work))


async def _work_on(key: KeyT, queue: WorkQueue[KeyT], slots: Slots, work: Callable[[KeyT], Awaitable[None]]) -> None:
    try:
        await work(key)
    finally:
        slots.leave()
        queue.done(key)
