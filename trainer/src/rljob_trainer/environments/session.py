"""The session of one rollout by an agent: answers requests with turns of the policy, and keeps the limits."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Protocol

from rljob_trainer.engines.rollout.base import FinishedSequence, FinishReason, GenerationRequest, Outcome
from rljob_trainer.environments.chat_requests import ChatAnswer, ChatRequest, ChatRequestError, chat_request
from rljob_trainer.environments.episode import Counts, EpisodeRequest, turn_seed
from rljob_trainer.environments.failures import EnvironmentLostError
from rljob_trainer.environments.session_record import (
    SessionRecord,
    SessionTurn,
    TextThread,
    TurnPrompt,
    context_full,
)
from rljob_trainer.environments.settings import EpisodeLimits
from rljob_trainer.environments.tool_calls import TurnParser, turn_parser
from rljob_trainer.environments.turn_template import TOOL_PROBE, TurnTemplate
from rljob_trainer.errors import ConfigurationError, TrainerError
from rljob_trainer.models.tokenizer import Tokenizer, ToolSchema

SESSION_LIMIT = "session_limit"
"""The code of errors after a limit of the session."""
MAX_ESCAPE_BYTES = 6
"""JSON may write a character as `\\u0000`."""
MIN_CHARACTERS = 1 << 16
"""Requests with at most this number of characters are never rejected before they are tokenized."""
JSON_ROOM = 1 << 20
"""Bytes of a request beside its text."""
MAX_BODY_BYTES = 64 << 20
MAX_TEMPLATES = 64
"""The number of different lists of tools whose templates are kept."""
PROBE_TOOL: ToolSchema = {"type": "function", "function": {"name": TOOL_PROBE}}
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


class SessionTemplates:
    """The chat template for each list of tools that agents have sent, and the longest requests that it may get."""

    def __init__(self, tokenizer: Tokenizer, tool_parser: str | None) -> None:
        """Raises ConfigurationError if the tool parser cannot be used with the tokenizer."""
        if tool_parser is not None:
            # Loads vLLM and its tokenizer now, which takes seconds. Requests must not wait for it.
            turn_parser(TurnTemplate(tokenizer, [PROBE_TOOL]), tool_parser)
        self._tokenizer = tokenizer
        self._tool_parser = tool_parser
        self._longest_token = max(map(len, tokenizer.vocabulary()))
        self._found: dict[str, tuple[TurnTemplate, TurnParser]] = {}
        self.texts = TextThread()

    def max_characters(self, max_context_tokens: int) -> int:
        """The largest number of characters of a request: as many as if each token were the longest of the vocabulary.
        A request with more would take long to tokenize, and its tokens fit into the context only if the chat template
        or the tokenizer drops text."""
        return max(MIN_CHARACTERS, max_context_tokens * self._longest_token)

    def max_body_bytes(self, max_context_tokens: int) -> int:
        """The largest number of bytes of a request's JSON."""
        return min(MAX_ESCAPE_BYTES * self.max_characters(max_context_tokens) + JSON_ROOM, MAX_BODY_BYTES)

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
        """The limit that a request or a turn has reached, unless a turn that began later was completed."""
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
        self._limit_turns = 0
        """The number of turns that had begun when the limit was reached."""
        self._has_ended = False
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()

    async def read(self, body: bytes) -> ChatRequest:
        """Returns the request with this body. Raises ChatRequestError if it cannot be answered."""
        request = await self._templates.texts.run(lambda: chat_request(body), len(body))
        if request.num_characters > self._templates.max_characters(self._limits.max_context_tokens):
            raise self.context_full(f"the request has {request.num_characters} characters")
        return request

    def context_full(self, seen: str) -> ChatRequestError:
        """The error of a request that is too long. `seen`: its length."""
        self._reach(Outcome.CONTEXT_FULL)
        return context_full(self._limits.max_context_tokens, seen)

    async def turn(self, request: ChatRequest, *, is_retry: bool, listens: Callable[[], bool]) -> SessionTurn:
        """Returns the turn that answers a request, when it is finished. A repeated request gets the turn of the first
        one. The turn is sampled to its end even if this coroutine is cancelled.

        Args:
            is_retry: whether the client says that it repeats a request.
            listens: whether the client still waits for the answer.

        Raises ChatRequestError if the request cannot be answered, or after a limit."""
        turn = self.record.repeated(request, is_retry=is_retry)
        if turn is None:
            prompt = await self._prompt(request)
            # It may have taken long: the client may have asked again.
            turn = self.record.repeated(request, is_retry=is_retry)
        if turn is None:
            self._check_limits()
            turn = self.record.begin(request, prompt)
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
        """Aborts the turns that are being sampled. No others begin."""
        self._has_ended = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # If it has an error, the result of the agent's function came first.
        if not self.failure.cancel() and not self.failure.cancelled():
            self.failure.exception()

    async def _prompt(self, request: ChatRequest) -> TurnPrompt:
        self._check_limits()
        templates = self._templates
        try:
            template, parser = templates.of(request)
            return await self.record.prompt(request, template, parser, self._limits.max_context_tokens, templates.texts)
        except ChatRequestError as error:
            if error.code is not None:
                self._reach(Outcome.CONTEXT_FULL)
            raise
        except TrainerError as error:
            self._fail(error)
            raise ChatRequestError("the job cannot go on; see its log", status=500) from error

    def _check_limits(self) -> None:
        if self._has_ended:
            raise ended()
        if asyncio.get_running_loop().time() >= self._ends_at:
            raise self._limit_reached(Outcome.TIME_LIMIT)
        if len(self.record.turns) >= self._limits.max_turns:
            raise self._limit_reached(Outcome.MAX_TURNS)
        if self._num_sampled >= self._request.sampling.max_new_tokens:
            raise self._limit_reached(Outcome.MAX_TOKENS)

    def _reach(self, outcome: Outcome) -> None:
        self.limit, self._limit_turns = outcome, len(self.record.turns)

    def _fail(self, error: Exception) -> None:
        if not self.failure.done():
            self.failure.set_exception(error)

    def _limit_reached(self, outcome: Outcome) -> ChatRequestError:
        self._reach(outcome)
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
            turn.answer.set_exception(ended())
            raise
        except Exception as error:
            self._fail(error)
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
        if is_cut and cut_by is not None:
            self._reach(cut_by)
        elif turn.number >= self._limit_turns:
            # The agent has gone on after the limit. A turn that had begun before does not show that.
            self.limit = None
        reason = "length" if is_cut else "tool_calls" if parsed.tool_calls else "stop"
        num_new = len(sequence.token_ids)
        return ChatAnswer(turn.number, parsed.message, reason, num_prompt_tokens, num_new, int(time.time()))

    def _longest(self, turn: SessionTurn) -> tuple[int, Outcome | None]:
        """Returns the largest number of tokens of a turn, and the session's limit that it reaches then; None if the
        agent can go on."""
        room = self._limits.max_context_tokens - len(turn.conversation.token_ids)
        of_session = self._request.sampling.max_new_tokens
        options: list[tuple[int, Outcome | None]] = [(room, Outcome.CONTEXT_FULL), (of_session, Outcome.MAX_TOKENS)]
        options += [(each, None) for each in (self._limits.max_turn_tokens, turn.max_tokens) if each is not None]
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
        stop = tuple(dict.fromkeys((*self._request.sampling.stop, *turn.stop)))
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


def ended() -> ChatRequestError:
    """The error of a request after the end of its session."""
    return ChatRequestError("the session has ended", code="invalid_api_key", status=401)
