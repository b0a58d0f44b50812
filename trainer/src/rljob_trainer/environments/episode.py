"""One rollout with an environment: turns of the policy and messages of the environment, until one of them ends it or a
limit is reached.

    reset -> turn -> (tools or respond -> messages -> turn)* -> get_reward -> close

After a failure of the infrastructure (a process that died, a turn that the engine could not complete) the rollout
starts again, with a fresh environment and the same seeds.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from rljob_trainer.engines.rollout.base import (
    FinishedSequence,
    FinishReason,
    GenerationRequest,
    Outcome,
    SamplingSettings,
)
from rljob_trainer.environments.conversation import Conversation
from rljob_trainer.environments.engine_client import EngineClient
from rljob_trainer.environments.environment_pool import EnvironmentProcesses, RolloutPlace
from rljob_trainer.environments.failures import EnvironmentCodeError, EnvironmentLostError, EnvironmentTimeoutError
from rljob_trainer.environments.kinds import EnvironmentKinds
from rljob_trainer.environments.settings import EpisodeLimits
from rljob_trainer.environments.tool_calls import ParsedTurn
from rljob_trainer.environments.transcript import Transcript
from rljob_trainer.errors import ChatTemplateError, DatasetError, EnvironmentMessageError
from rljob_trainer.models.tokenizer import ChatMessage
from rljob_trainer.rewards.base import RewardStatus

log = logging.getLogger(__name__)

MAX_SEED = 2**31
"""Upper bound of seeds (exclusive)."""
Result = TypeVar("Result")


@dataclass(frozen=True)
class EpisodeRequest:
    """A request for one rollout."""

    number: int
    """Different from that of all other requests of the process."""
    messages: tuple[ChatMessage, ...] | None
    """The chat of the dataset's row; None if the row has no prompt."""
    row: Mapping[str, object]
    sampling: SamplingSettings
    """`max_new_tokens` is the largest number of sampled tokens of the whole rollout."""
    seed: int
    environment_seed: int


@dataclass(frozen=True)
class EnvironmentReward:
    """What `get_reward` gave."""

    status: RewardStatus = RewardStatus.OK
    value: float | Mapping[str, float] | None = None
    """None without `get_reward`, and if it gave nothing."""
    detail: str = ""
    """Why there is no value; empty for OK."""


@dataclass
class Counts:
    """What happened in a rollout."""

    num_tool_calls: int = 0
    num_tool_errors: int = 0
    environment_seconds: float = 0.0
    generation_seconds: float = 0.0


@dataclass(frozen=True)
class FinishedEpisode:
    """A rollout that has ended."""

    number: int
    outcome: Outcome
    transcript: Transcript | None
    """None for INFRASTRUCTURE."""
    reward: EnvironmentReward = EnvironmentReward()
    counts: Counts = field(default_factory=Counts)


class Episode:
    """Runs one rollout. All methods are for the thread of the asyncio loop."""

    def __init__(
        self,
        request: EpisodeRequest,
        limits: EpisodeLimits,
        kinds: EnvironmentKinds,
        processes: EnvironmentProcesses,
        engine: EngineClient,
    ) -> None:
        """Raises DatasetError if the row names no class of the job."""
        self.request = request
        self.limits = limits
        self.kind = kinds.of_row(request.row)
        self.processes = processes
        self.engine = engine
        self.counts = Counts()
        self._has_died = False
        """Whether the process died in a call of this rollout in the last attempt that got past `reset`."""

    async def run(self) -> FinishedEpisode:
        """Returns the rollout. It has the outcome INFRASTRUCTURE if all attempts failed.

        Raises ConfigurationError if the job cannot work, and the errors of EngineLoop."""
        return await with_retries(self.request.number, self.limits.retries, self._attempt)

    async def _attempt(self) -> FinishedEpisode:
        self.counts = Counts()
        async with self.processes.place() as place:
            return await self._talk(place)

    async def _talk(self, place: RolloutPlace) -> FinishedEpisode:
        """Raises EnvironmentLostError."""
        request = self.request
        try:
            name = self.kind.description.name
            observation = await self._timed(place.open(name, request.row, request.environment_seed))
        except EnvironmentTimeoutError as error:
            # The policy has not done anything yet.
            raise EnvironmentLostError(str(error)) from error
        except EnvironmentCodeError as error:
            return self._without_turns(str(error))
        try:
            conversation = self.kind.conversation(request.messages, observation, self.limits.max_context_tokens)
        except (EnvironmentMessageError, ChatTemplateError) as error:
            return self._without_turns(f"gave a prompt that cannot be used: {error}")
        except DatasetError as error:
            log.warning("rollout %d is excluded: %s", request.number, error)
            return FinishedEpisode(request.number, Outcome.INFRASTRUCTURE, None, counts=self.counts)
        try:
            outcome = await self._turns(place, conversation)
            reward = await self._reward(place)
        except EnvironmentTimeoutError as error:
            outcome, reward = Outcome.TIME_LIMIT, EnvironmentReward(RewardStatus.TIMEOUT, None, str(error))
        except EnvironmentCodeError as error:
            outcome, reward = Outcome.ERROR, EnvironmentReward(RewardStatus.ERROR, None, str(error))
        except EnvironmentLostError as error:
            # As with rewards: the second time it is assumed that what the policy wrote has ended the process. Without
            # `get_reward` no policy of a reward could exclude the rollout, so it is lost after all attempts.
            is_own = error.is_own_call and not error.was_killed and conversation.num_turns > 0
            if not (is_own and self._has_died and self.kind.description.has_reward):
                if not error.caused_by_other:
                    self._has_died = is_own
                raise
            outcome, reward = Outcome.ERROR, EnvironmentReward(RewardStatus.DIED, None, str(error))
        return FinishedEpisode(request.number, outcome, conversation.transcript(), reward, self.counts)

    def _without_turns(self, detail: str) -> FinishedEpisode:
        """The rollout if the environment failed before the first turn, so that there is nothing to train on."""
        reward = EnvironmentReward(RewardStatus.ERROR, None, detail)
        return FinishedEpisode(self.request.number, Outcome.INFRASTRUCTURE, None, reward, self.counts)

    async def _turns(self, place: RolloutPlace, conversation: Conversation) -> Outcome:
        """Raises EnvironmentCodeError, EnvironmentTimeoutError and EnvironmentLostError."""
        ends_at = asyncio.get_running_loop().time() + self.limits.max_seconds
        while True:
            max_tokens, outcome = self._room_for_turn(conversation)
            if max_tokens <= 0:
                return outcome
            try:
                sequence = await self._generated(conversation, max_tokens, ends_at)
            except TimeoutError as error:
                if not conversation.num_turns:
                    raise EnvironmentLostError("the first turn was not generated within maxSeconds") from error
                return Outcome.TIME_LIMIT
            turn = conversation.add_turn(sequence)
            if sequence.finish_reason is FinishReason.LENGTH:
                return outcome
            num_errors = self.counts.num_tool_errors
            messages = await self._answer(place, turn)
            if messages is None:
                return Outcome.COMPLETED
            if conversation.num_turns >= self.limits.max_turns:
                return Outcome.MAX_TURNS if turn.parse_error is None else Outcome.PARSE_ERROR
            if asyncio.get_running_loop().time() >= ends_at:
                return Outcome.TIME_LIMIT
            if (end := self._end_after(conversation, turn, messages, num_errors)) is not None:
                return end

    def _end_after(
        self, conversation: Conversation, turn: ParsedTurn, messages: Sequence[ChatMessage], num_errors: int
    ) -> Outcome | None:
        """Adds the messages after a turn; returns the outcome if the rollout ends instead. `num_errors`: the number of
        tool errors before the turn. Raises EnvironmentCodeError if the template rejects messages of `respond`."""
        max_tokens = self.limits.max_context_tokens - 1  # One token for the next turn.
        try:
            return None if conversation.add_messages(messages, max_tokens) else Outcome.CONTEXT_FULL
        except ChatTemplateError as error:
            if not turn.tool_calls:
                roles = ", ".join(message["role"] for message in messages)
                detail = f"gave messages with the roles {roles}, which cannot be used: {error}"
                raise EnvironmentCodeError(detail) from error
            # Some templates accept only one call in a turn.
            explanation = f"The tool calls cannot be used: {error}. Make one call at a time."
        # Errors of the tools are counted already.
        self.counts.num_tool_errors = num_errors + len(turn.tool_calls)
        try:
            fits = conversation.add_messages([{"role": "user", "content": explanation}], max_tokens)
        except ChatTemplateError:
            return Outcome.PARSE_ERROR
        return None if fits else Outcome.CONTEXT_FULL

    def _room_for_turn(self, conversation: Conversation) -> tuple[int, Outcome]:
        """Returns the largest number of tokens of the next turn, and the outcome if the turn reaches it."""
        limits = [
            (self.request.sampling.max_new_tokens - conversation.num_sampled_tokens, Outcome.MAX_TOKENS),
            (self.limits.max_context_tokens - len(conversation.token_ids), Outcome.CONTEXT_FULL),
        ]
        if self.limits.max_turn_tokens is not None:
            limits.append((self.limits.max_turn_tokens, Outcome.MAX_TOKENS))
        return min(limits, key=lambda limit: limit[0])

    async def _generated(self, conversation: Conversation, max_tokens: int, ends_at: float) -> FinishedSequence:
        """Returns the next turn. Raises TimeoutError at `ends_at`, and EnvironmentLostError if the engine could not
        complete it."""
        number = conversation.num_turns
        loop = asyncio.get_running_loop()
        begun = loop.time()
        request = GenerationRequest(
            f"{self.request.number}/{number}",
            tuple(conversation.token_ids),
            replace(self.request.sampling, max_new_tokens=max_tokens),
            turn_seed(self.request.seed, number),
        )
        try:
            async with asyncio.timeout_at(ends_at):
                sequence = await self.engine.generate(request)
        finally:
            self.counts.generation_seconds += loop.time() - begun
        if not sequence.finish_reason.is_complete:
            raise EnvironmentLostError("the rollout engine could not complete a turn")
        return sequence

    async def _answer(self, place: RolloutPlace, turn: ParsedTurn) -> Sequence[ChatMessage] | None:
        """Returns the messages after a turn; None if the rollout has ended. Raises EnvironmentCodeError,
        EnvironmentTimeoutError and EnvironmentLostError."""
        if turn.parse_error is not None:
            self.counts.num_tool_calls += 1
            self.counts.num_tool_errors += 1
            # Not a message of a tool: some templates accept these only after a call.
            return [{"role": "user", "content": turn.parse_error}]
        if turn.tool_calls:
            results = await self._timed(place.call_tools(turn.tool_calls))
            self.counts.num_tool_calls += len(results)
            self.counts.num_tool_errors += sum(result.is_error for result in results)
            return [
                {"role": "tool", "name": call["function"]["name"], "tool_call_id": call["id"], "content": result.text}
                for call, result in zip(turn.tool_calls, results, strict=True)
            ]
        if self.kind.description.has_respond:
            return await self._timed(place.respond(turn.message))
        return None

    async def _reward(self, place: RolloutPlace) -> EnvironmentReward:
        """Raises EnvironmentLostError."""
        if not self.kind.description.has_reward:
            return EnvironmentReward()
        try:
            return EnvironmentReward(value=await self._timed(place.reward()))
        except EnvironmentTimeoutError as error:
            return EnvironmentReward(RewardStatus.TIMEOUT, None, str(error))
        except EnvironmentCodeError as error:
            return EnvironmentReward(RewardStatus.ERROR, None, str(error))

    async def _timed(self, call: Awaitable[Result]) -> Result:
        loop = asyncio.get_running_loop()
        begun = loop.time()
        try:
            return await call
        finally:
            self.counts.environment_seconds += loop.time() - begun


async def with_retries(number: int, retries: int, attempt: Callable[[], Awaitable[FinishedEpisode]]) -> FinishedEpisode:
    """Makes attempts of the rollout `number` until one raises no EnvironmentLostError. Returns the rollout; it has the
    outcome INFRASTRUCTURE if `1 + retries` attempts failed that were not lost because of other rollouts."""
    failed = 0
    while failed <= retries:
        try:
            return await attempt()
        except EnvironmentLostError as error:
            if error.caused_by_other:
                # Not a message at the level INFO, because it may concern hundreds of rollouts.
                log.debug("rollout %d begins again: %s", number, error)
                continue
            failed += 1
            level = logging.INFO if failed <= retries else logging.WARNING
            log.log(level, "rollout %d: attempt %d of %d failed: %s", number, failed, 1 + retries, error)
    return FinishedEpisode(number, Outcome.INFRASTRUCTURE, None)


def turn_seed(seed: int, turn: int) -> int:
    """Returns the seed of a turn of a rollout with this seed. The first turn, 0, has the seed of the rollout."""
    return int(np.random.SeedSequence([seed, turn]).generate_state(1)[0]) % MAX_SEED if turn else seed
