"""Rollouts by agents: a function of the user runs in a process of its own and asks the policy for turns, until it
returns or a limit is reached.

    run(session, row)  -- requests -->  SessionServer  -->  LiveSession  -->  engine
                       <-- answers ---
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping

from rljob_trainer.engines.rollout.base import Outcome
from rljob_trainer.environments.chat_requests import MODEL_NAME
from rljob_trainer.environments.engine_client import EngineClient
from rljob_trainer.environments.environment_pool import EnvironmentProcesses, RolloutPlace
from rljob_trainer.environments.episode import EnvironmentReward, EpisodeRequest, FinishedEpisode, with_retries
from rljob_trainer.environments.failures import (
    EnvironmentCodeError,
    EnvironmentLostError,
    EnvironmentTimeoutError,
    ServiceUnreachableError,
)
from rljob_trainer.environments.session import Engine, LiveSession, SessionTemplates
from rljob_trainer.environments.session_server import SessionServer
from rljob_trainer.environments.settings import EnvironmentSettings, EpisodeLimits
from rljob_trainer.errors import TrainerError
from rljob_trainer.models.tokenizer import Tokenizer
from rljob_trainer.rewards.base import RewardStatus

NOTICE_SECONDS = 0.05
"""How long the server may take to notice that a client has closed its connection."""


class AgentRollouts:
    """Makes the rollouts of the agents of one worker process. They share the endpoint and the chat templates."""

    def __init__(self, tokenizer: Tokenizer, settings: EnvironmentSettings) -> None:
        self._templates = SessionTemplates(tokenizer, settings.tool_parser)
        self.server = SessionServer(self._templates.max_body_bytes(settings.limits.max_context_tokens))
        self._settings = settings
        self._description = settings.descriptions[0]

    def episode(self, request: EpisodeRequest, processes: EnvironmentProcesses, engine: EngineClient) -> AgentEpisode:
        """Returns a rollout that has not begun. The server must have started."""
        return AgentEpisode(
            request,
            self._settings.limits,
            self._templates,
            processes,
            engine,
            self.server,
            name=self._description.name,
            needs_reward=self._description.has_reward,
            starts_new_rows=self._settings.starts_new_rows,
        )


class AgentEpisode:
    """Runs one rollout. All methods are for the thread of the asyncio loop."""

    def __init__(
        self,
        request: EpisodeRequest,
        limits: EpisodeLimits,
        templates: SessionTemplates,
        processes: EnvironmentProcesses,
        engine: Engine,
        server: SessionServer,
        *,
        name: str,
        needs_reward: bool,
        starts_new_rows: bool,
    ) -> None:
        """`name`: of the agent's function in the job. `needs_reward`: whether its result counts as a reward. For
        `starts_new_rows` see EnvironmentSettings."""
        self.request = request
        self.limits = limits
        self.templates = templates
        self.processes = processes
        self.engine = engine
        self.server = server
        self.name = name
        self.needs_reward = needs_reward
        self.starts_new_rows = starts_new_rows

    async def run(self) -> FinishedEpisode:
        """Returns the rollout. It has the outcome INFRASTRUCTURE if all attempts failed, or if the agent has got no
        turn. Raises ConfigurationError if the job cannot work, and the errors of EngineLoop."""
        return await with_retries(self.request.number, self.limits.retries, self._attempt)

    async def _attempt(self) -> FinishedEpisode:
        """Raises EnvironmentLostError."""
        async with self.processes.place() as place:
            session = LiveSession(
                self.request, self.limits, self.templates, self.engine, starts_new_rows=self.starts_new_rows
            )
            loop = asyncio.get_running_loop()
            begun = loop.time()
            self.server.open(session)
            try:
                outcome, reward = await self._ended(place, session)
                if not session.record.has_delivered:
                    reward = await self._reward_without_turns(session, reward)
            finally:
                self.server.close(session)
                await session.end()
            seconds = loop.time() - begun - session.counts.generation_seconds
            # Turns that were sampled at the same time count several times.
            session.counts.environment_seconds = max(0.0, seconds)
        return self._finished(session, outcome, reward)

    async def _ended(self, place: RolloutPlace, session: LiveSession) -> tuple[Outcome, EnvironmentReward]:
        """Waits for the end of the agent's function. Raises EnvironmentLostError."""
        outcome: Outcome | None = None
        try:
            value = await self._result(place, session)
        except EnvironmentTimeoutError as error:
            if not session.record.has_delivered:
                raise EnvironmentLostError(f"{error}; it has got no turn of the policy") from error
            outcome, detail = Outcome.TIME_LIMIT, str(error)
        except EnvironmentCodeError as error:
            outcome, detail = session.limit, str(error)
        except ServiceUnreachableError as error:
            is_late = await self._is_too_late(session)
            outcome, detail = session.limit or (Outcome.TIME_LIMIT if is_late else None), str(error)
            if outcome is None:
                raise
        else:
            outcome = session.limit
            if value is not None or not self.needs_reward:
                return outcome or Outcome.COMPLETED, EnvironmentReward(value=value)
            detail = "returned None, but its result is a reward; return a number, or names with numbers"
        # A limit ended the agent before it could give a reward, so the policy for time limits applies.
        status = RewardStatus.ERROR if outcome is None else RewardStatus.TIMEOUT
        return outcome or Outcome.ERROR, EnvironmentReward(status, None, detail)

    async def _result(self, place: RolloutPlace, session: LiveSession) -> float | Mapping[str, float] | None:
        """What the agent's function returns. Raises what `RolloutPlace.run` raises, and `session.failure`."""
        shown: dict[str, object] = {
            "base_url": self.server.base_url,
            "api_key": session.key,
            "model": MODEL_NAME,
            "deadline": session.deadline,
        }
        run = asyncio.ensure_future(place.run(self.name, shown, self.request.row, self.request.environment_seed))
        try:
            either: set[asyncio.Future[float | dict[str, float] | None] | asyncio.Future[None]] = {run, session.failure}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if session.failure.done():
                session.failure.result()
            return await run
        finally:
            if not run.done():
                run.cancel()
                with contextlib.suppress(asyncio.CancelledError, TrainerError):
                    await run

    async def _is_too_late(self, session: LiveSession) -> bool:
        """Whether the policy has not answered in time: the session has reached its limit, or the agent has stopped
        waiting for an answer."""
        # Let the server notice which connections the agent has closed.
        await asyncio.sleep(NOTICE_SECONDS)
        return session.limit is Outcome.TIME_LIMIT or session.is_given_up

    async def _reward_without_turns(self, session: LiveSession, reward: EnvironmentReward) -> EnvironmentReward:
        """Returns the reward of an agent that has got no turn of the policy: an error, because nothing can be trained.
        Raises EnvironmentLostError if it has asked, and the policy has not answered in time."""
        if reward.status is not RewardStatus.ERROR and await self._is_too_late(session):
            raise EnvironmentLostError("the agent has got no turn of the policy in time")
        if reward.status is not RewardStatus.OK:
            return reward
        detail = (
            "ended without a turn of the policy; send requests to session.base_url with session.api_key, and wait for "
            "the answers"
        )
        return EnvironmentReward(RewardStatus.ERROR, None, detail)

    def _finished(self, session: LiveSession, outcome: Outcome, reward: EnvironmentReward) -> FinishedEpisode:
        transcript = session.record.transcript()
        outcome = Outcome.INFRASTRUCTURE if transcript is None else outcome
        return FinishedEpisode(self.request.number, outcome, transcript, reward, session.counts)
