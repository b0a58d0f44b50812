"""Calls the methods of the user's objects in an environment process.

Code that is not async runs while no event loop runs, so that it may start one of its own (`asyncio.run`), as in TRL. It
blocks the whole process. Async methods of several rollouts run at the same time. The process reports each call before
it begins, so that the parent knows which call makes the process hang.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping
from dataclasses import dataclass, field

from rljob_trainer.environments.random_states import RandomStates


@dataclass(frozen=True)
class CallResult:
    """What a call returned, or the error that it raised (also SystemExit, so that user code cannot end the process by
    accident)."""

    value: object = None
    error: BaseException | None = None


@dataclass(frozen=True)
class UserCall:
    """A call of a method for a rollout."""

    rollout: int
    report: Callable[[bool], None]
    """Is called before the method begins; with True if the call blocks the process."""
    function: Callable[..., object]
    arguments: tuple[object, ...] = ()
    named: Mapping[str, object] = field(default_factory=dict)


class UserCalls:
    """Runs calls one at a time, or async ones together, each with the random state of its rollout."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.random_states = RandomStates()
        self._loop = loop
        self._blocking: deque[tuple[UserCall, asyncio.Future[CallResult]]] = deque()
        """Calls that wait until no event loop runs."""
        self._is_ending = False

    def run_forever(self) -> None:
        """Runs the event loop, and between two runs of it one call that blocks, until `end` is called."""
        while not self._is_ending:
            if self._blocking:
                # One turn of the loop, so that what has arrived in the meantime can cancel the next call.
                self._loop.call_soon(self._loop.stop)
            self._loop.run_forever()
            if self._blocking:
                call, future = self._blocking.popleft()
                if not future.cancelled():
                    future.set_result(self._call(call))

    def end(self) -> None:
        """Ends `run_forever`; calls that have not begun are dropped."""
        self._is_ending = True
        self._loop.stop()

    async def run(self, call: UserCall) -> CallResult:
        """Makes the call and waits for its outcome."""
        if inspect.iscoroutinefunction(call.function):
            call.report(False)
            outcome = self._call(call)
        else:
            future: asyncio.Future[CallResult] = self._loop.create_future()
            self._blocking.append((call, future))
            self._loop.stop()
            outcome = await future
            if inspect.isawaitable(outcome.value):
                call.report(False)
        if outcome.error is not None or not inspect.isawaitable(outcome.value):
            return outcome
        try:
            return CallResult(await _WithRandomState(_awaited(outcome.value), call.rollout, self.random_states))
        except BaseException as error:
            return CallResult(error=error)

    def _call(self, call: UserCall) -> CallResult:
        if not inspect.iscoroutinefunction(call.function):
            call.report(True)
        self.random_states.switch_to(call.rollout)
        try:
            return CallResult(call.function(*call.arguments, **call.named))
        except BaseException as error:
            return CallResult(error=error)


class _WithRandomState:
    """Awaits a coroutine, and gives each piece of it between two waits the random state of its rollout."""

    def __init__(self, coroutine: Coroutine[object, object, object], rollout: int, states: RandomStates) -> None:
        self._coroutine = coroutine
        self._rollout = rollout
        self._states = states

    def __await__(self) -> Generator[object, None, object]:
        error: BaseException | None = None
        while True:
            self._states.switch_to(self._rollout)
            try:
                waits_for = self._coroutine.send(None) if error is None else self._coroutine.throw(error)
            except StopIteration as end:
                return end.value
            try:
                yield waits_for
                error = None
            except BaseException as raised:
                error = raised


async def _awaited(value: Awaitable[object]) -> object:
    return await value
