"""Environment processes on demand, with a place for each open rollout."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from rljob_trainer.environments.description import ClassSpec
from rljob_trainer.environments.environment_process import START_TIMEOUT_SECONDS, EnvironmentProcess
from rljob_trainer.environments.failures import EnvironmentLostError, EnvironmentTimeoutError
from rljob_trainer.errors import TrainerError, described

if TYPE_CHECKING:
    from rljob_trainer.models.tokenizer import ChatMessage, ToolCall


@dataclass(frozen=True)
class ToolResult:
    """The text of a tool's result for the model, or of its error."""

    text: str
    is_error: bool


@dataclass(frozen=True)
class RolloutPlace:
    """A place for one rollout in a process. The methods raise the errors of EnvironmentProcess, and ConfigurationError
    if an argument cannot be sent to the process."""

    process: EnvironmentProcess
    number: int
    """Different from that of all other rollouts of the process."""

    async def open(self, name: str, row: Mapping[str, object], seed: int) -> str | list[ChatMessage] | None:
        """Begins the rollout with an object of the class `name`, and returns what its `reset` returns."""
        return cast("str | list[ChatMessage] | None", await self._call("open", name, dict(row), seed))

    async def call_tools(self, tool_calls: Sequence[ToolCall]) -> list[ToolResult]:
        """Makes the calls of one turn. A failure of a tool is a result, too."""
        calls = [[call["function"]["name"], call["function"]["arguments"]] for call in tool_calls]
        results = cast("list[list[object]]", await self._call("call_tools", calls))
        return [ToolResult(str(text), bool(is_error)) for text, is_error in results]

    async def respond(self, message: Mapping[str, object]) -> list[ChatMessage] | None:
        """Gives `respond` the model's message, and returns the next ones; None if the rollout has ended."""
        return cast("list[ChatMessage] | None", await self._call("respond", dict(message)))

    async def reward(self) -> float | dict[str, float]:
        """What `get_reward` returns."""
        return cast("float | dict[str, float]", await self._call("reward"))

    async def run(
        self, name: str, session: Mapping[str, object], row: Mapping[str, object], seed: int
    ) -> float | dict[str, float] | None:
        """Runs the agent's function `name` for the whole rollout, and returns its result. `session`: the fields of
        AgentSession."""
        result = await self._call("run", name, dict(session), dict(row), seed)
        return cast("float | dict[str, float] | None", result)

    async def close(self) -> None:
        """Ends the rollout, also one that was never opened; `EnvironmentProcesses.place` does this by itself."""
        await self._call("close")

    async def _call(self, kind: str, *arguments: object) -> object:
        return await self.process.call(kind, self.number, *arguments)


class _Numbered:
    """A process, the number in the name of its log file, and the rollouts that have a place in it."""

    def __init__(self, process: EnvironmentProcess, number: int) -> None:
        self.process = process
        self.number = number
        self.num_rollouts = 0


class EnvironmentProcesses:
    """The processes of one event loop. A process starts when a rollout needs it, and stays for later rollouts; one that
    has died is replaced when the next rollout comes."""

    def __init__(
        self,
        classes: Sequence[ClassSpec],
        *,
        log_folder: Path,
        variables: Mapping[str, str],
        timeout_seconds: float,
        rollouts_per_process: int,
        max_rollouts: int,
        first_number: int = 0,
        start_timeout_seconds: float = START_TIMEOUT_SECONDS,
        run_seconds: float = 0.0,
    ) -> None:
        """Starts nothing yet.

        Args:
            log_folder: the processes log to `environment-<n>.log` in it, where n counts from `first_number`.
            variables: all environment variables of the processes.
            timeout_seconds: the time limit of a call; time without a core does not count.
            max_rollouts: the number of rollouts that are open at the same time at most.
            run_seconds: the time limit of an agent's function.
        """
        self._classes = tuple(classes)
        self._log_folder = log_folder
        self._variables = dict(variables)
        self._timeout_seconds = timeout_seconds
        self._start_timeout_seconds = start_timeout_seconds
        self._run_seconds = run_seconds
        self._rollouts_per_process = rollouts_per_process
        # Enough, because a process starts only when all others are full.
        num_processes = -(-max_rollouts // rollouts_per_process)
        self._numbers = range(first_number, first_number + num_processes)
        self._free = asyncio.Semaphore(max_rollouts)
        self._processes: list[_Numbered] = []
        self._is_closed = False
        self._rollout_numbers = itertools.count()
        self._closing: set[asyncio.Task[None]] = set()
        """Rollouts that are ending; each still has its place."""
        log_folder.mkdir(parents=True, exist_ok=True)

    @contextlib.asynccontextmanager
    async def place(self) -> AsyncIterator[RolloutPlace]:
        """Waits for a free place in a process that has loaded the classes. When the block ends, the rollout is closed
        in the background, and then the place is free again.

        Raises ConfigurationError if the classes cannot be loaded, and EnvironmentLostError if the process ends or hangs
        while it loads them.
        """
        await self._free.acquire()
        try:
            of = self._take()
        except BaseException:
            self._free.release()
            raise
        place = RolloutPlace(of.process, next(self._rollout_numbers))
        try:
            try:
                await of.process.wait_until_loaded()
            except EnvironmentTimeoutError as error:
                raise EnvironmentLostError(str(error)) from error
            yield place
        finally:
            task = asyncio.get_running_loop().create_task(self._close(place, of))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Kills all processes, and waits for their ends. Calls that wait raise EnvironmentLostError."""
        self._is_closed = True
        for each in self._processes:
            each.process.kill()
        await asyncio.gather(*self._closing, *(each.process.wait_until_ended() for each in self._processes))

    def _take(self) -> _Numbered:
        """The fullest process with a free place, so that few processes are needed; otherwise a new one."""
        if self._is_closed:
            raise EnvironmentLostError("the environment processes were stopped")
        # One that is being killed stays until it has ended, so that `close` waits for it.
        self._processes = [each for each in self._processes if each.process.is_usable or each.process.is_ending]
        usable = [each for each in self._processes if each.process.is_usable]
        free = [each for each in usable if each.num_rollouts < self._rollouts_per_process]
        of = max(free, key=lambda each: each.num_rollouts) if free else self._start({each.number for each in usable})
        of.num_rollouts += 1
        return of

    def _start(self, used: Container[int]) -> _Numbered:
        number = next(number for number in self._numbers if number not in used)
        try:
            process = EnvironmentProcess(
                self._classes,
                log_file=self._log_folder / f"environment-{number}.log",
                variables=self._variables,
                timeout_seconds=self._timeout_seconds,
                start_timeout_seconds=self._start_timeout_seconds,
                run_seconds=self._run_seconds,
            )
        except OSError as error:
            raise EnvironmentLostError(f"an environment process cannot be started: {described(error)}") from error
        started = _Numbered(process, number)
        self._processes.append(started)
        return started

    async def _close(self, place: RolloutPlace, of: _Numbered) -> None:
        try:
            # The rollout has its result already, so a failure of its end does not matter.
            with contextlib.suppress(TrainerError):
                await place.close()
        finally:
            of.num_rollouts -= 1
            self._free.release()
