"""The parent's side of one environment process, for one asyncio event loop.

A call that exceeds the time limit can only be ended with its process. So the other rollouts of the process are lost,
and begin again elsewhere. The time limit of a call starts at its beginning, which the process reports, and does not
count the time in which a call of another rollout blocks the process. While nothing has begun, the limit applies to the
call that waits longest, because code that an earlier call has left behind may occupy the process; then no call is to
blame.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from rljob_trainer.environments.description import ClassSpec, EnvironmentDescription
from rljob_trainer.environments.failures import (
    EnvironmentCodeError,
    EnvironmentLostError,
    EnvironmentTimeoutError,
    ServiceUnreachableError,
)
from rljob_trainer.errors import ConfigurationError, TrainerError
from rljob_trainer.processes.child_process import ChildProcess, InvalidReply, Reply
from rljob_trainer.processes.time_limit import CHECK_SECONDS, UNCOUNTED_SECONDS, TimeLimit
from rljob_trainer.processes.wire import encode

PROGRAM = "rljob_trainer.environments.environment_program"
START_TIMEOUT_SECONDS = 300.0
_CANCELLED = "a call of another rollout was cancelled, so its process was killed"
_TIMED_OUT = "a call of another rollout exceeded the time limit"
_SHOWN = {
    "load": "importing the environment's classes",
    "describe": "the environment's constructor or close",
    "open": "the environment's constructor or reset",
    "call_tools": "a tool of the environment",
    "respond": "the environment's respond",
    "reward": "the environment's get_reward",
    "close": "the environment's close",
    "run": "the agent's function",
}
"""The kinds of requests in messages."""


@dataclass(eq=False)
class _Call:
    """A request that has no result yet."""

    kind: str
    rollout: int | None
    future: asyncio.Future[object]
    limit: TimeLimit | None = None
    """None until the process has begun with it."""


class EnvironmentProcess:
    """One process with the rollouts that share it. All methods must be called in the event loop that was running when
    the object was made.

    The calls of rollouts raise EnvironmentCodeError if the user's code fails, EnvironmentTimeoutError if this call
    exceeds the time limit, EnvironmentLostError if the process ends or is killed for another reason, and
    ConfigurationError if the classes cannot be loaded. The caller numbers the rollouts.
    """

    def __init__(
        self,
        classes: Sequence[ClassSpec],
        *,
        log_file: Path,
        variables: Mapping[str, str],
        timeout_seconds: float,
        start_timeout_seconds: float = START_TIMEOUT_SECONDS,
        run_seconds: float = 0.0,
    ) -> None:
        """Starts the process without waiting for it.

        Args:
            variables: all environment variables of the process.
            timeout_seconds: the time limit of a call; time without a core does not count.
            run_seconds: the time limit of `run`.
            start_timeout_seconds: the time limit of importing the classes.
        """
        self._loop = asyncio.get_running_loop()
        self._timeout_seconds = timeout_seconds
        self._start_timeout_seconds = start_timeout_seconds
        self._run_seconds = run_seconds
        self._calls: dict[str, _Call] = {}
        """By token, in the order in which they were sent."""
        self._idle_limit: TimeLimit | None = None
        """Time limit of the first of `_calls` while none has begun."""
        self._blocking: _Call | None = None
        """The call while which the process can run nothing else."""
        self._blocking_since = 0.0
        self._failure: TrainerError | None = None
        """Why the process accepts no calls."""
        self._timer: asyncio.TimerHandle | None = None
        self._timer_set_at = 0.0
        self._ending: asyncio.Task[None] | None = None
        self._has_ended_itself = False
        """Whether the process has ended without being killed here."""
        self._child = ChildProcess(PROGRAM, log_file, variables, "results")
        self._loop.add_reader(self._child.connection, self._read)
        frame = encode(["load", [each.to_list() for each in classes]])
        self._loaded = self._send(_Call("load", None, self._loop.create_future()), frame)
        self._loaded.limit = TimeLimit(start_timeout_seconds, time.monotonic(), None)

    @property
    def pid(self) -> int:
        """The id of the process, and of its process group."""
        return self._child.pid

    @property
    def is_usable(self) -> bool:
        """Whether the process accepts calls."""
        return self._failure is None

    @property
    def is_ending(self) -> bool:
        """Whether the process is being killed, or has just ended."""
        return self._ending is not None and not self._ending.done()

    async def wait_until_ended(self) -> None:
        """Returns when a process that has failed no longer exists, and its calls have failed."""
        if self._ending is not None:
            # A shield, because many may wait, and one of them may be cancelled.
            await asyncio.shield(self._ending)

    async def wait_until_loaded(self) -> None:
        """Waits until the process has imported the classes."""
        # A shield, because many may wait, and one of them may be cancelled.
        await asyncio.shield(self._loaded.future)

    async def describe(self, name: str) -> EnvironmentDescription:
        """Describes the class `name`. Raises ConfigurationError if it cannot be used."""
        return EnvironmentDescription.from_json(cast("dict[str, object]", await self.call("describe", None, name)))

    def kill(self) -> None:
        """Kills all processes of the group at once. Calls that wait raise EnvironmentLostError."""
        if self._failure is None:
            self._stop_watching(EnvironmentLostError("the environment process was stopped"))
            self._child.kill()
            self._fail_calls()

    async def call(self, kind: str, rollout: int | None, *arguments: object) -> object:
        """Returns the result of a request, with the kinds and arguments of `environment_program`; those for a rollout
        are methods of RolloutPlace. Raises ConfigurationError if an argument cannot be sent."""
        if self._has_ended_itself:
            # Its end is being looked into, and then `_failure` says whether another rollout is the cause.
            await self.wait_until_ended()
        if self._failure is not None:
            raise _copied(self._failure)
        try:
            frame = encode([kind, *([] if rollout is None else [rollout]), *arguments])
        except (TypeError, RecursionError, ValueError) as error:
            raise ConfigurationError(
                f"{kind}: this cannot be sent to the environment: {error}; use dataset rows with only strings, "
                "numbers, and lists and mappings that are not deeply nested"
            ) from error
        call = self._send(_Call(kind, rollout, self._loop.create_future()), frame)
        try:
            return await call.future
        except asyncio.CancelledError:
            self._cancel(call)
            raise

    def _send(self, call: _Call, frame: bytes) -> _Call:
        [token] = self._child.send(frame)
        self._calls[token] = call
        self._watch()
        return call

    def _cancel(self, call: _Call) -> None:
        """Cancels the call in the process. If it blocks the process, only a kill can end it. Otherwise its time limit
        still applies."""
        token = next((token for token, each in self._calls.items() if each is call), None)
        if token is None or self._failure is not None:
            return
        if call is self._blocking:
            self._fail(_lost_by_other(_CANCELLED))
            return
        self._child.send(encode(["cancel", token]))
        self._watch()

    def _read(self) -> None:
        for reply in self._child.receive():
            if isinstance(reply, InvalidReply) or not self._accept(reply):
                self._fail(
                    EnvironmentLostError(
                        "the environment wrote into the connection that carries its results, so its process was killed"
                    )
                )
                return
        if self._child.has_ended():
            self._fail(None)
        elif self._blocking is not None and self._blocking.future.cancelled():
            # It was cancelled before its beginning was known.
            self._fail(_lost_by_other(_CANCELLED))
        else:
            self._watch()

    def _accept(self, reply: Reply) -> bool:
        """Handles one line of the process; False if it is no valid one."""
        call = self._calls.get(reply.token)
        if call is None:
            return False
        match reply.value:
            case ["begun", bool() as blocks]:
                self._set_blocking(call if blocks else None)
                call.limit = self._new_limit(call.kind)
                return True
            case ["OK", value]:
                result: object = value
            case ["ERROR", str() as detail]:
                result = EnvironmentCodeError(detail)
            case ["UNREACHABLE", str() as detail]:
                result = ServiceUnreachableError(detail)
            case ["REFUSED", str() as text]:
                result = ConfigurationError(text)
            case _:
                return False
        del self._calls[reply.token]
        self._idle_limit = None
        if call is self._blocking:
            self._set_blocking(None)
        if isinstance(result, ConfigurationError) and call.kind == "load":
            self._calls[reply.token] = call
            self._fail(result)
        elif not call.future.done() and isinstance(result, TrainerError):
            call.future.set_exception(result)
        elif not call.future.done():
            call.future.set_result(result)
        return True

    def _set_blocking(self, call: _Call | None) -> None:
        """Changes the call that blocks the process. The limits of the others do not count the time of the last one."""
        now = time.monotonic()
        if self._blocking is not None:
            for other in self._calls.values():
                if other is not self._blocking and other.limit is not None:
                    other.limit.postpone(now - self._blocking_since)
        self._blocking, self._blocking_since = call, now

    def _new_limit(self, kind: str) -> TimeLimit:
        return TimeLimit(self._limit_seconds(kind), time.monotonic(), self._child.core_use(UNCOUNTED_SECONDS))

    def _limit_seconds(self, kind: str) -> float:
        if kind == "run":
            return self._run_seconds
        # To describe classes, the process imports transformers.
        return self._start_timeout_seconds if kind in ("load", "describe") else self._timeout_seconds

    def _limits(self) -> list[tuple[_Call, TimeLimit]]:
        """The limits that apply: of the call that blocks the process, or else of those that have begun, or else of the
        first one."""
        if self._blocking is not None and self._blocking.limit is not None:
            return [(self._blocking, self._blocking.limit)]
        begun = [(call, call.limit) for call in self._calls.values() if call.limit is not None]
        if begun or not self._calls:
            self._idle_limit = None
            return begun
        if self._idle_limit is None:
            self._idle_limit = self._new_limit("")
        return [(next(iter(self._calls.values())), self._idle_limit)]

    def _watch(self) -> None:
        """Sends what is left, and checks again soon while there are calls."""
        if self._failure is not None:
            return
        if self._child.has_unsent:
            self._child.flush()
        if self._child.has_unsent:
            self._loop.add_writer(self._child.connection, self._watch)
        else:
            self._loop.remove_writer(self._child.connection)
        if self._calls and self._timer is None:
            self._timer_set_at = time.monotonic()
            self._timer = self._loop.call_later(CHECK_SECONDS, self._check)

    def _check(self) -> None:
        """Looks for the end of the process and for calls that have exceeded their limits."""
        self._timer = None
        now = time.monotonic()
        seconds_late = now - self._timer_set_at - CHECK_SECONDS
        # First what has arrived: while this thread had no core, calls may have ended in time.
        self._read()
        if self._failure is not None:
            return
        late: list[_Call] = []
        for call, limit in self._limits():
            limit.extend_after_standstill(seconds_late)
            if now > limit.next_check and not limit.gets_more_time(self._child.core_use(), now):
                late.append(call)
        if not late:
            self._watch()
        elif late[0].limit is None:
            # Something that an earlier call has left behind occupies the process; it may be another rollout's.
            seconds = self._timeout_seconds
            self._fail(EnvironmentLostError(f"the environment process did not begin a call for {seconds:g} s"))
        else:
            self._fail(_lost_by_other(_TIMED_OUT), late)

    def _fail(self, failure: TrainerError | None, late: Sequence[_Call] = ()) -> None:
        """Kills the process in a thread, because its end may take a moment, and then fails all calls.

        Args:
            failure: of all calls; None if the process has ended by itself.
            late: the calls that exceeded the time limit.
        """
        if self._failure is not None:
            return
        self._stop_watching(failure or EnvironmentLostError("the environment process has ended"))
        killing = self._loop.run_in_executor(None, self._child.kill)
        self._has_ended_itself = failure is None
        self._ending = self._loop.create_task(self._end(killing, late))

    def _stop_watching(self, failure: TrainerError) -> None:
        self._failure = failure
        if self._timer is not None:
            self._timer.cancel()
        self._loop.remove_reader(self._child.connection)
        self._loop.remove_writer(self._child.connection)

    async def _end(self, killing: asyncio.Future[None], late: Sequence[_Call]) -> None:
        if not self._has_ended_itself:
            # The end of the process may take long, for example if it waits for a disk.
            self._fail_calls(late)
        await killing
        if self._has_ended_itself:
            self._fail_after_end()

    def _fail_after_end(self) -> None:
        """Fails all calls after the process has ended by itself. What ran in it may have caused that: the call that
        blocked it, or else all that had begun. If nothing ran, or if the system killed it, no rollout is known to be
        the cause."""
        end, was_killed = self._child.describe_end(), self._child.was_killed()
        begun = [call for call in self._calls.values() if call.limit is not None]
        running = begun if self._blocking is None else [self._blocking]
        lost = EnvironmentLostError(f"the environment {end}")
        lost.was_killed = was_killed
        lost.caused_by_other = not was_killed and any(call.rollout is not None for call in running)
        self._failure = lost
        for call in running:
            own = EnvironmentLostError(f"{_SHOWN[call.kind]} {end}")
            own.was_killed, own.is_own_call = was_killed, call.rollout is not None
            _set_error(call.future, own)
        self._fail_calls()

    def _fail_calls(self, late: Sequence[_Call] = ()) -> None:
        assert self._failure is not None
        for call in self._calls.values():
            _set_error(call.future, self._timeout(call) if call in late else _copied(self._failure))
        self._calls.clear()

    def _timeout(self, call: _Call) -> EnvironmentTimeoutError:
        seconds = self._limit_seconds(call.kind)
        return EnvironmentTimeoutError(f"{_SHOWN[call.kind]} took longer than {seconds:g} s, so its process was killed")


def _lost_by_other(detail: str) -> EnvironmentLostError:
    lost = EnvironmentLostError(detail)
    lost.caused_by_other = True
    return lost


def _set_error(future: asyncio.Future[object], error: TrainerError) -> None:
    if not future.done():
        future.set_exception(error)
        # The future of `load` may have nobody who waits for it.
        future.exception()


def _copied(failure: TrainerError) -> TrainerError:
    """A new error with the same message, because each one that is raised gets a traceback of its own."""
    copied = type(failure)(*failure.args)
    if isinstance(failure, EnvironmentLostError) and isinstance(copied, EnvironmentLostError):
        copied.was_killed, copied.caused_by_other = failure.was_killed, failure.caused_by_other
    return copied
