"""A thread with an asyncio loop that runs the rollouts of one worker process: it generates with the process's engine,
and calls environments in processes of their own.

    calling thread                    this thread                     thread of the engine, environment processes
    submit    -- requests -->         one coroutine per rollout  <->  turns, and answers to them
    take      <-- rollouts --
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine, Iterable
from copy import copy
from typing import TYPE_CHECKING, TypeVar

from rljob_trainer.engines.rollout.loop import CHECK_SECONDS, EngineLoop, as_trainer_error
from rljob_trainer.environments.engine_client import EngineClient
from rljob_trainer.environments.environment_pool import EnvironmentProcesses
from rljob_trainer.environments.episode import Episode, EpisodeRequest, FinishedEpisode
from rljob_trainer.environments.kinds import EnvironmentKinds
from rljob_trainer.environments.settings import EnvironmentSettings
from rljob_trainer.errors import TrainerError
from rljob_trainer.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    from rljob_trainer.environments.agent_rollouts import AgentEpisode, AgentRollouts

THREAD_NAME = "environments"
Result = TypeVar("Result")


class EnvironmentHost:
    """Runs rollouts with environments. All methods are for one calling thread. After an error, `take` raises it."""

    def __init__(self, engine_loop: EngineLoop, settings: EnvironmentSettings, rank: int) -> None:
        """Starts the thread. `rank`: that of the worker process, for the names of log files. Raises
        ConfigurationError if the model's tokenizer does not fit the environments."""
        self._engine_loop = engine_loop
        self._limits = settings.limits
        tokenizer = Tokenizer(settings.model_folder)
        self._kinds = EnvironmentKinds(tokenizer, settings)
        # Not `new_event_loop`, which gives another kind of loop in the processes of Ray (uvloop).
        self._asyncio_loop: asyncio.AbstractEventLoop = asyncio.SelectorEventLoop()
        self._engine = EngineClient(engine_loop, self._asyncio_loop, lambda: min(len(self._tasks), settings.max_open))
        self._processes = EnvironmentProcesses(
            settings.classes,
            log_folder=settings.log_folder,
            variables=settings.variables,
            timeout_seconds=settings.timeout_seconds,
            rollouts_per_process=settings.rollouts_per_process,
            max_rollouts=settings.max_open,
            first_number=rank * settings.max_open,
            run_seconds=settings.run_seconds,
        )
        self._agents: AgentRollouts | None = None
        if settings.is_agent:
            # Imported here, because its HTTP server takes time to load and other jobs do not need it.
            from rljob_trainer.environments.agent_rollouts import AgentRollouts

            self._agents = AgentRollouts(tokenizer, settings)
        self._tasks: set[asyncio.Task[None]] = set()
        """The rollouts that have not ended; only used in the thread."""
        # The condition protects everything below.
        self._changed = threading.Condition()
        self._num_open = 0
        """The number of rollouts that have not ended."""
        self._finished: list[FinishedEpisode] = []
        self._failure: TrainerError | None = None
        self._thread = threading.Thread(target=self._asyncio_loop.run_forever, name=THREAD_NAME, daemon=True)
        self._thread.start()
        if self._agents is not None:
            self._in_thread(self._agents.server.start())

    def submit(self, requests: Iterable[EpisodeRequest]) -> None:
        """Begins rollouts."""
        added = tuple(requests)
        with self._changed:
            self._num_open += len(added)
        self._asyncio_loop.call_soon_threadsafe(self._begin, added)

    def take(self, max_seconds: float) -> list[FinishedEpisode]:
        """Returns the rollouts that have ended since the last call. Waits at most `max_seconds`, and not longer than
        until none is open.

        Raises the error of a rollout, and the errors of EngineLoop."""
        end = time.monotonic() + max_seconds
        with self._changed:
            while self._num_open and self._failure is None and (remaining := end - time.monotonic()) > 0:
                self._changed.wait(min(remaining, CHECK_SECONDS))
                # Raises if the engine has failed or hangs.
                self._engine_loop.check()
            if self._failure is not None:
                raise copy(self._failure) from self._failure
            taken, self._finished = self._finished, []
            return taken

    def abort(self) -> None:
        """Ends all rollouts that were not taken."""
        self._in_thread(self._cancel_all())
        with self._changed:
            self._finished.clear()
            self._num_open = 0

    def close(self) -> None:
        """Ends all rollouts, the processes and the thread."""
        self.abort()
        self._in_thread(self._close_processes())
        self._asyncio_loop.call_soon_threadsafe(self._asyncio_loop.stop)
        self._thread.join()

    def _in_thread(self, coroutine: Coroutine[object, object, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(coroutine, self._asyncio_loop).result()

    # From here on: methods of the thread.

    def _begin(self, requests: Iterable[EpisodeRequest]) -> None:
        for request in requests:
            task = self._asyncio_loop.create_task(self._run(request))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _run(self, request: EpisodeRequest) -> None:
        try:
            finished = await self._episode(request).run()
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self._fail(error)
            return
        with self._changed:
            self._finished.append(finished)
            self._num_open -= 1
            if not self._num_open:
                self._changed.notify_all()

    def _episode(self, request: EpisodeRequest) -> Episode | AgentEpisode:
        if self._agents is not None:
            return self._agents.episode(request, self._processes, self._engine)
        return Episode(request, self._limits, self._kinds, self._processes, self._engine)

    def _fail(self, error: Exception) -> None:
        with self._changed:
            if self._failure is None:
                self._failure = as_trainer_error(error)
            self._changed.notify_all()

    async def _close_processes(self) -> None:
        await self._processes.close()
        if self._agents is not None:
            await self._agents.server.stop()

    async def _cancel_all(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # A rollout may have reached its time limit shortly before.
        await self._engine.settle()
