"""Calls the methods of the user's objects in an environment process.

Code that is not async runs while no event loop runs, so that it may start one of its own (`asyncio.run`), as in TRL. It
blocks the whole process. Async methods of several rollouts run at the same time. The process reports each call before
it begins, so that the parent knows which call makes the process hang.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import Callable, Mapping
from contextvars import Context, ContextVar
from dataclasses import dataclass, field
from typing import TypeVarTuple, Unpack

from rljob_trainer.environments.random_states import RandomStates

Arguments = TypeVarTuple("Arguments")
_rollout: ContextVar[int | None] = ContextVar("rollout", default=None)
"""The rollout whose code runs in this context."""


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


class RolloutLoop(asyncio.SelectorEventLoop):
    """Gives the code of a rollout the random state of the rollout each time it goes on after a wait. This includes the
    tasks, callbacks and timers that it creates, because these inherit its context."""

    def __init__(self, states: RandomStates) -> None:
        super().__init__()
        self._states = states

    def call_soon(
        self, callback: Callable[[Unpack[Arguments]], object], *args: *Arguments, context: Context | None = None
    ) -> asyncio.Handle:
        """See `asyncio`, which also begins and continues all tasks with this method."""
        return super().call_soon(self._with_state, callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[[Unpack[Arguments]], object],
        *args: *Arguments,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """See `asyncio`."""
        return super().call_at(when, self._with_state, callback, *args, context=context)

    def _with_state(self, callback: Callable[[Unpack[Arguments]], object], *args: *Arguments) -> None:
        if (rollout := _rollout.get()) is not None:
            self._states.switch_to(rollout)
        callback(*args)


class UserCalls:
    """Runs calls one at a time, or async ones together, each with the random state of its rollout."""

    def __init__(self) -> None:
        self.random_states = RandomStates()
        # Not the thread's current loop, so that user code does not stop it by accident.
        self.loop = RolloutLoop(self.random_states)
        self._blocking: deque[tuple[UserCall, asyncio.Future[CallResult]]] = deque()
        """Calls that wait until no event loop runs."""
        self._is_ending = False

    def run_forever(self) -> None:
        """Runs the event loop, and between two runs of it one call that blocks, until `end` is called."""
        while not self._is_ending:
            if self._blocking:
                # One turn of the loop, so that what has arrived in the meantime can cancel the next call.
                self.loop.call_soon(self.loop.stop)
            self.loop.run_forever()
            if self._blocking:
                call, future = self._blocking.popleft()
                if not future.cancelled():
                    future.set_result(self._call(call))

    def end(self) -> None:
        """Ends `run_forever`; calls that have not begun are dropped."""
        self._is_ending = True
        self.loop.stop()

    async def run(self, call: UserCall) -> CallResult:
        """Makes the call and waits for its outcome."""
        if inspect.iscoroutinefunction(call.function):
            call.report(False)
            outcome = self._call(call)
        else:
            future: asyncio.Future[CallResult] = self.loop.create_future()
            self._blocking.append((call, future))
            self.loop.stop()
            outcome = await future
            if inspect.isawaitable(outcome.value):
                call.report(False)
        if outcome.error is not None or not inspect.isawaitable(outcome.value):
            return outcome
        # Also for the tasks that the call creates.
        _rollout.set(call.rollout)
        self.random_states.switch_to(call.rollout)
        try:
            return CallResult(await outcome.value)
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
