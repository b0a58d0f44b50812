"""One rollout by an agent: a function of the user runs in a process of its own and asks the policy for turns, until it
returns or a limit is reached.

    run(session, row)  -- requests -->  SessionServer  -->  LiveSession  -->  engine
                       <-- answers ---
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from typing import Protocol

from rljob_trainer.engines.rollout.base import FinishedSequence, FinishReason, GenerationRequest, Outcome
from rljob_trainer.environments.chat_requests import MODEL_NAME, ChatAnswer, ChatRequest, ChatRequestError
from rljob_trainer.environments.environment_pool import EnvironmentProcesses, RolloutPlace
from rljob_trainer.environments.episode import (
    Counts,
    EnvironmentReward,
    EpisodeRequest,
    FinishedEpisode,
    turn_seed,
    with_retries,
)
from rljob_trainer.environments.failures import (
    EnvironmentCodeError,
    EnvironmentLostError,
    EnvironmentTimeoutError,
    ServiceUnreachableError,
)
from rljob_trainer.environments.session_record import SessionRecord, SessionTurn
from rljob_trainer.environments.settings import EpisodeLimits
from rljob_trainer.environments.tool_calls import TurnParser, turn_parser
from rljob_trainer.environments.turn_template import TurnTemplate
from rljob_trainer.errors import ConfigurationError, TrainerError
from rljob_trainer.models.tokenizer import Tokenizer
from rljob_trainer.rewards.base import RewardStatus

SESSION_LIMIT = "session_limit"
"""The code of errors after a limit of the session."""
NOTICE_SECONDS = 0.05
"""How long the server may take to notice that a client has closed its connection."""
MAX_TEMPLATES = 64
"""The number of different lists of tools whose templates are kept."""
LIMIT_FIELDS = {
    Outcome.MAX_TURNS: "environment.maxTurns",
    Outcome.MAX_TOKENS: "rollout.maxNewTokens",
    Outcome.TIME_LIMIT: "environment.maxSeconds",
}


class Engine(Protocol):
    """Samples turns; see EngineClient."""

    async def generate(self, request: GenerationRequest) -> FinishedSequence:
        """Returns the turn. If the coroutine is cancelled, the request is aborted."""
        ...


class Server(Protocol):
    """Answers the requests of agents."""

    base_url: str

    def open(self, session: LiveSession) -> None:
        """Begins to answer requests with the key of the session."""
        ...

    def close(self, session: LiveSession) -> None:
        """Rejects requests with the key of the session."""
        ...


class SessionTemplates:
    """The chat template for each list of tools that agents have sent."""

    def __init__(self, tokenizer: Tokenizer, tool_parser: str | None) -> None:
        self._tokenizer = tokenizer
        self._tool_parser = tool_parser
        self._found: dict[str, tuple[TurnTemplate, TurnParser]] = {}

    def of(self, request: ChatRequest) -> tuple[TurnTemplate, TurnParser]:
        """Returns template and parser for the tools of a request. Raises ChatRequestError if the model has no parser
        for tool calls."""
        key = json.dumps(request.tools)
        if key not in self._found:
            template = TurnTemplate(self._tokenizer, request.tools)
            try:
                parser = turn_parser(template, self._tool_parser)
            except ConfigurationError as error:
                raise ChatRequestError(f"tools: {error}", param="tools") from error
            while len(self._found) >= MAX_TEMPLATES:
                del self._found[next(iter(self._found))]
            self._found[key] = template, parser
        return self._found[key]


class LiveSession:
    """The session of one rollout while its agent runs: keeps the limits, and samples turns."""

    def __init__(
        self,
        request: EpisodeRequest,
        limits: EpisodeLimits,
        templates: SessionTemplates,
        engine: Engine,
        *,
        starts_new_rows: bool = False,
    ) -> None:
        """For `starts_new_rows` see SessionRecord."""
        loop = asyncio.get_running_loop()
        self.key = secrets.token_urlsafe(24)
        self.deadline = time.time() + limits.max_seconds
        self.record = SessionRecord(starts_new_rows=starts_new_rows)
        self.counts = Counts()
        self.limit: Outcome | None = None
        """The limit that a request or a turn has reached, unless a later turn was completed."""
        self.failure: asyncio.Future[None] = loop.create_future()
        """Gets the error that ends the session; EnvironmentLostError if another attempt may work."""
        self._request = request
        self._limits = limits
        self._templates = templates
        self._engine = engine
        self._ends_at = loop.time() + limits.max_seconds
        self._num_sampled = 0
        self._num_reserved = 0
        """The largest number of tokens that running requests may still sample."""
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()

    async def turn(self, request: ChatRequest, *, is_retry: bool, listens: Callable[[], bool]) -> SessionTurn:
        """Returns the turn that answers a request, when it is finished. A repeated request gets the turn of the first
        one. The turn is sampled to its end even if this coroutine is cancelled.

        Args:
            is_retry: whether the client says that it repeats a request.
            listens: whether the client still waits for the answer.

        Raises ChatRequestError if the request cannot be answered, or after a limit."""
        turn = self.record.repeated(request, is_retry=is_retry)
        if turn is None:
            turn = self._begin(request)
            task = asyncio.get_running_loop().create_task(self._sample(turn))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        turn.is_listening.append(listens)
        await asyncio.shield(turn.answer)
        return turn

    @property
    def is_given_up(self) -> bool:
        """Whether the agent has stopped waiting for an answer."""
        return any(turn.is_abandoned for turn in self.record.turns)

    async def end(self) -> None:
        """Aborts the turns that are being sampled."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # If it has an error, the result of the agent's function came first.
        if not self.failure.cancel() and not self.failure.cancelled():
            self.failure.exception()

    def _begin(self, request: ChatRequest) -> SessionTurn:
        if asyncio.get_running_loop().time() >= self._ends_at:
            raise self._limit_reached(Outcome.TIME_LIMIT)
        if len(self.record.turns) >= self._limits.max_turns:
            raise self._limit_reached(Outcome.MAX_TURNS)
        if self._num_sampled >= self._request.sampling.max_new_tokens:
            raise self._limit_reached(Outcome.MAX_TOKENS)
        try:
            template, parser = self._templates.of(request)
            return self.record.begin(request, template, parser, self._limits.max_context_tokens)
        except ChatRequestError as error:
            if error.code is not None:
                self.limit = Outcome.CONTEXT_FULL
            raise

    def _limit_reached(self, outcome: Outcome) -> ChatRequestError:
        self.limit = outcome
        return ChatRequestError(
            f"the session has reached the limit spec.training.{LIMIT_FIELDS[outcome]}; return from your function, or "
            "increase the limit",
            code=SESSION_LIMIT,
        )

    async def _sample(self, turn: SessionTurn) -> None:
        """Sets the answer of the turn, or its error."""
        try:
            turn.answer.set_result(await self._sampled(turn))
        except ChatRequestError as error:
            turn.answer.set_exception(error)
        except asyncio.CancelledError:
            turn.answer.set_exception(ChatRequestError("the session has ended", code="invalid_api_key", status=401))
            raise
        except Exception as error:
            if not self.failure.done():
                self.failure.set_exception(error)
            turn.answer.set_exception(ChatRequestError("the engine could not complete a turn", status=500))
        finally:
            # It may be that no client waits for it.
            turn.answer.exception()

    async def _sampled(self, turn: SessionTurn) -> ChatAnswer:
        num_prompt_tokens = len(turn.conversation.token_ids)
        longest, cut_by = self._longest(turn)
        async with self._reserved(longest) as num_tokens:
            if num_tokens < longest:
                cut_by = Outcome.MAX_TOKENS
            sequence = await self._generated(turn, num_tokens)
            self._num_sampled += len(sequence.token_ids)
        parsed = turn.conversation.add_turn(sequence)
        turn.num_turns = turn.conversation.num_turns
        for index, call in enumerate(parsed.tool_calls):
            # Different in the whole session. Mistral's templates accept only ids of nine letters and digits.
            call["id"] = f"c{turn.number:05d}{index:03d}"
        self.counts.num_tool_calls += len(parsed.tool_calls) + (parsed.parse_error is not None)
        self.counts.num_tool_errors += parsed.parse_error is not None
        is_cut = sequence.finish_reason is FinishReason.LENGTH
        self.limit = cut_by if is_cut else None
        reason = "length" if is_cut else "tool_calls" if parsed.tool_calls else "stop"
        num_new = len(sequence.token_ids)
        return ChatAnswer(turn.number, parsed.message, reason, num_prompt_tokens, num_new, int(time.time()))

    def _longest(self, turn: SessionTurn) -> tuple[int, Outcome | None]:
        """Returns the largest number of tokens of a turn, and the session's limit that it reaches then; None if the
        agent can go on."""
        room = self._limits.max_context_tokens - len(turn.conversation.token_ids)
        of_session = self._request.sampling.max_new_tokens
        options: list[tuple[int, Outcome | None]] = [(room, Outcome.CONTEXT_FULL), (of_session, Outcome.MAX_TOKENS)]
        options += [
            (each, None) for each in (self._limits.max_turn_tokens, turn.request.max_tokens) if each is not None
        ]
        return min(options, key=lambda option: option[0])

    @contextlib.asynccontextmanager
    async def _reserved(self, longest: int) -> AsyncIterator[int]:
        """Reserves tokens for a turn of at most `longest` tokens, and gives their number. It is smaller if the session
        has no more tokens left. If running requests may need the tokens, it waits for them. Raises ChatRequestError if
        no token is left."""

        def num_left() -> int:
            return self._request.sampling.max_new_tokens - self._num_sampled - self._num_reserved

        async with self._changed:
            await self._changed.wait_for(lambda: longest <= num_left() or self._num_reserved == 0)
            num_tokens = min(longest, num_left())
            if num_tokens <= 0:
                raise self._limit_reached(Outcome.MAX_TOKENS)
            self._num_reserved += num_tokens
        try:
            yield num_tokens
        finally:
            self._num_reserved -= num_tokens
            async with self._changed:
                self._changed.notify_all()

    async def _generated(self, turn: SessionTurn, num_tokens: int) -> FinishedSequence:
        """Samples a turn. Raises ChatRequestError at the deadline, EnvironmentLostError if the engine could not
        complete the turn, and the errors of EngineLoop."""
        stop = tuple(dict.fromkeys((*self._request.sampling.stop, *turn.request.stop)))
        request = GenerationRequest(
            f"{self._request.number}/{turn.number}",
            tuple(turn.conversation.token_ids),
            replace(self._request.sampling, max_new_tokens=num_tokens, stop=stop),
            turn_seed(self._request.seed, turn.number),
        )
        loop = asyncio.get_running_loop()
        begun = loop.time()
        try:
            async with asyncio.timeout_at(self._ends_at):
                sequence = await self._engine.generate(request)
        except TimeoutError:
            raise self._limit_reached(Outcome.TIME_LIMIT) from None
        finally:
            self.counts.generation_seconds += loop.time() - begun
        if not sequence.finish_reason.is_complete:
            raise EnvironmentLostError("the rollout engine could not complete a turn")
        return sequence


class AgentEpisode:
    """Runs one rollout. All methods are for the thread of the asyncio loop."""

    def __init__(
        self,
        request: EpisodeRequest,
        limits: EpisodeLimits,
        templates: SessionTemplates,
        processes: EnvironmentProcesses,
        engine: Engine,
        server: Server,
        *,
        name: str,
        needs_reward: bool,
        may_rewrite: bool,
        starts_new_rows: bool,
    ) -> None:
        """`name`: of the agent's function in the job. `needs_reward`: whether its result counts as a reward. For
        `may_rewrite` and `starts_new_rows` see EnvironmentSettings."""
        self.request = request
        self.limits = limits
        self.templates = templates
        self.processes = processes
        self.engine = engine
        self.server = server
        self.name = name
        self.needs_reward = needs_reward
        self.may_rewrite = may_rewrite
        self.starts_new_rows = starts_new_rows

    async def run(self) -> FinishedEpisode:
        """Returns the rollout. It has the outcome INFRASTRUCTURE if all attempts failed, or if the agent asked for no
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
            if not session.record.turns:
                raise EnvironmentLostError(f"{error}; it has not asked for a turn") from error
            outcome, detail = Outcome.TIME_LIMIT, str(error)
        except EnvironmentCodeError as error:
            outcome, detail = session.limit, str(error)
        except ServiceUnreachableError as error:
            # Let the server notice which connections the agent has closed.
            await asyncio.sleep(NOTICE_SECONDS)
            outcome, detail = session.limit or (Outcome.TIME_LIMIT if session.is_given_up else None), str(error)
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

    def _finished(self, session: LiveSession, outcome: Outcome, reward: EnvironmentReward) -> FinishedEpisode:
        number = self.request.number
        transcript = session.record.transcript(may_be_rewritten=self.may_rewrite)
        if transcript is not None:
            return FinishedEpisode(number, outcome, transcript, reward, session.counts)
        if reward.status is RewardStatus.OK:
            detail = "ended without a turn of the policy; send requests to session.base_url with session.api_key"
            reward = EnvironmentReward(RewardStatus.ERROR, None, detail)
        return FinishedEpisode(number, Outcome.INFRASTRUCTURE, None, reward, session.counts)
