"""Sessions of tests: an endpoint whose policy is a function of the test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from rljob_testing.models import chat_models
from rljob_trainer.engines.rollout.base import FinishedSequence, FinishReason, GenerationRequest, SamplingSettings
from rljob_trainer.engines.rollout.response_text import response_decoder
from rljob_trainer.environments.episode import EpisodeRequest
from rljob_trainer.environments.session import LiveSession, SessionTemplates
from rljob_trainer.environments.session_server import SessionServer
from rljob_trainer.environments.settings import EpisodeLimits
from rljob_trainer.models.tokenizer import Tokenizer

HERMES = chat_models.HERMES.replace("THINKING", "").replace("BEGINNING", "")
LIMITS = EpisodeLimits(max_turns=100, max_context_tokens=4000, max_turn_tokens=None, max_seconds=60.0, retries=0)


class Policy:
    """An engine whose turns the test chooses. A turn has the log-probabilities -1, -2, ... and the version 7."""

    def __init__(self, tokenizer: Tokenizer, write: Callable[[str], Awaitable[str]]) -> None:
        """`write`: gives the text of a turn for the text of its prompt."""
        self.tokenizer = tokenizer
        self.requests: list[GenerationRequest] = []
        self.turns: list[FinishedSequence] = []
        self.num_cancelled = 0
        self._write = write
        self._decoder = response_decoder(tokenizer)

    async def generate(self, request: GenerationRequest) -> FinishedSequence:
        """See EngineClient.generate."""
        self.requests.append(request)
        try:
            written = await self._write(self.tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False))
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        token_ids = self.tokenizer.encode(f"{written}<|im_end|>", add_special_tokens=False)
        is_cut = len(token_ids) > request.sampling.max_new_tokens
        token_ids = token_ids[: request.sampling.max_new_tokens]
        found = self._decoder.response_text(request.prompt_token_ids, token_ids, request.sampling.stop)
        number = len(token_ids)
        turn = FinishedSequence(
            request.request_id,
            tuple(token_ids),
            tuple(-1.0 - place for place in range(number)),
            (7,) * number,
            found.text,
            found.plain,
            FinishReason.LENGTH if is_cut else FinishReason.STOP,
        )
        self.turns.append(turn)
        return turn


class Endpoint:
    """A server with sessions of one policy."""

    def __init__(self, folder: Path, write: Callable[[str], Awaitable[str]], template: str = HERMES) -> None:
        saved = chat_models.save(
            folder, template, eos_token="<|im_end|>", are_special=False, response_template=chat_models.HERMES_RESPONSES
        )
        tokenizer = Tokenizer(saved)
        self.policy = Policy(tokenizer, write)
        self.templates = SessionTemplates(tokenizer, None)
        self.server = SessionServer(self.templates.max_body_bytes(LIMITS.max_context_tokens))
        self._sessions: list[LiveSession] = []

    def session(
        self, limits: EpisodeLimits = LIMITS, max_new_tokens: int = 3000, *, starts_new_rows: bool = False
    ) -> LiveSession:
        """Opens a session."""
        sampling = SamplingSettings(1.0, 1.0, 0, max_new_tokens, ())
        request = EpisodeRequest(len(self._sessions), None, {}, sampling, 11, 12)
        session = LiveSession(request, limits, self.templates, self.policy, starts_new_rows=starts_new_rows)
        self.server.open(session)
        self._sessions.append(session)
        return session

    async def end(self, session: LiveSession) -> None:
        """Ends a session."""
        self.server.close(session)
        await session.end()

    async def stop(self) -> None:
        """Ends all sessions and the server."""
        for session in self._sessions:
            await self.end(session)
        await self.server.stop()


@asynccontextmanager
async def endpoint(
    folder: Path, write: Callable[[str], Awaitable[str]], template: str = HERMES
) -> AsyncIterator[Endpoint]:
    """A running endpoint."""
    made = Endpoint(folder, write, template)
    await made.server.start()
    try:
        yield made
    finally:
        await made.stop()
