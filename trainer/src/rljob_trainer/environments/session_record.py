"""The record of one session: the turns that an agent asked for, and the rows of tokens that they make.

The messages of each request are compared with those of earlier turns. If they begin with all messages up to one of
these turns, the conversation goes on from there with the tokens that the engine saw and sampled. Otherwise a new
conversation begins, which the chat template writes as a whole. Sampled tokens are never tokenized again.

    turn 1 -> turn 2 -> turn 3        one row
                   \\-> turn 4         a branch: another row; turns 1 and 2 are trained in the first row only
    turn 5                            a new conversation: another row
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from rljob_trainer.environments.chat_requests import (
    ChatAnswer,
    ChatRequest,
    ChatRequestError,
    digest_of,
    identity,
    num_characters,
)
from rljob_trainer.environments.conversation import Conversation
from rljob_trainer.environments.tool_calls import TurnParser
from rljob_trainer.environments.transcript import TokenRow, Transcript
from rljob_trainer.environments.turn_template import TurnTemplate
from rljob_trainer.errors import ChatTemplateError
from rljob_trainer.models.tokenizer import ChatMessage

Result = TypeVar("Result")


@dataclass(eq=False)
class SessionTurn:
    """A turn that an agent asked for, from the request on."""

    number: int
    request_digest: str
    messages_digest: str
    """Of all messages of the request."""
    max_tokens: int | None
    """The largest number of tokens by the request."""
    stop: tuple[str, ...]
    """The stop texts of the request."""
    conversation: Conversation
    """Until the turn is finished, it ends with the prompt of the turn. Later it may go on."""
    parent: SessionTurn | None
    """The turn before it in the conversation."""
    num_before: int
    """See TurnPrompt."""
    is_listening: list[Callable[[], bool]] = field(default_factory=list)
    """For each request for the turn, whether its client waits for the answer."""
    answer: asyncio.Future[ChatAnswer] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    num_turns: int = 0
    """The number of turns in the conversation with this one, once it is finished."""
    is_delivered: bool = False
    """Whether a client has got the answer. Only such turns are trained, because no other turn had an effect."""
    has_children: bool = False

    @property
    def is_abandoned(self) -> bool:
        """Whether no client has got the answer or waits for it. False for a request that was answered with an error."""
        if self.answer.done() and self.answer.exception() is not None:
            return False
        return not self.is_delivered and not any(listens() for listens in self.is_listening)


@dataclass(frozen=True)
class TurnPrompt:
    """What a turn is sampled after."""

    conversation: Conversation
    parent: SessionTurn | None = None
    """The turn before it in the conversation."""
    num_before: int = 0
    """If the conversation goes on with one that the chat template rewrites: the number of turns up to there."""


class TextThread:
    """Works with long texts in another thread, one after the other, so that the asyncio loop goes on with the other
    rollouts. Short texts are not worth a thread.

    The work must use objects that nobody else changes; it shares only the tokenizer and the chat template. A tokenizer
    does not change when it encodes, and transformers' fast ones release Python's lock meanwhile. Templates keep tables
    of results, whose entries are the same from every thread."""

    MAX_SHORT = 8192
    """The largest number of characters of a short text. A tokenizer needs some milliseconds for it."""

    def __init__(self) -> None:
        self._is_free = asyncio.Lock()

    @classmethod
    def is_long(cls, num_characters: int) -> bool:
        """Whether texts of this length are for the thread."""
        return num_characters > cls.MAX_SHORT

    async def run(self, work: Callable[[], Result], num_characters: int) -> Result:
        """Returns what `work` returns, which handles this number of characters. If it is short, nothing else runs
        before the end of this call."""
        if not self.is_long(num_characters):
            return work()
        async with self._is_free:
            return await asyncio.to_thread(work)


class SessionRecord:
    """The turns of one session."""

    def __init__(self, *, starts_new_rows: bool = False) -> None:
        """`starts_new_rows`: begins a new conversation if the chat template rewrites the earlier turns of one."""
        self._starts_new_rows = starts_new_rows
        self.turns: list[SessionTurn] = []
        """In the order of their requests."""
        self._ends: dict[str, list[SessionTurn]] = {}
        """The delivered turns by the digest of all messages up to and including them."""

    def repeated(self, request: ChatRequest, *, is_retry: bool) -> SessionTurn | None:
        """Returns the turn that a request asks for again; None if it asks for a new turn. That is an abandoned turn
        with equal content, or for a retry (as its headers say) the last turn with equal content."""
        equal = [turn for turn in self.turns if turn.request_digest == request.digest]
        equal = [turn for turn in equal if not (turn.answer.done() and turn.answer.exception() is not None)]
        abandoned = next((turn for turn in equal if turn.is_abandoned), None)
        return abandoned or (equal[-1] if equal and is_retry else None)

    @property
    def has_delivered(self) -> bool:
        """Whether a client has got a turn."""
        return any(turn.is_delivered for turn in self.turns)

    async def prompt(
        self,
        request: ChatRequest,
        template: TurnTemplate,
        parser: TurnParser,
        max_context_tokens: int,
        texts: TextThread,
    ) -> TurnPrompt:
        """Returns the prompt of a turn: the conversation that the request's messages go on with, or a new one. Raises
        ChatRequestError if the template rejects the messages, or if there is no room for a turn after them."""
        if (prompt := await self._continued(request, template, parser, texts)) is None:
            prompt = TurnPrompt(await self._new(request, template, parser, texts))
        num_tokens = len(prompt.conversation.token_ids)
        if num_tokens >= max_context_tokens:
            raise context_full(max_context_tokens, f"the messages have {num_tokens} tokens")
        return prompt

    @staticmethod
    async def _new(request: ChatRequest, template: TurnTemplate, parser: TurnParser, texts: TextThread) -> Conversation:
        """Returns a conversation with the request's messages. Raises ChatRequestError if the template rejects them."""
        try:
            conversation = await texts.run(
                lambda: Conversation(template, parser, request.messages), request.num_characters
            )
        except ChatTemplateError as error:
            raise ChatRequestError(
                f"messages: {error}; send messages that the model's chat template accepts", param="messages"
            ) from error
        if not conversation.token_ids:
            raise ChatRequestError(
                "messages: the model's chat template and tokenizer give no tokens for them; send text with characters "
                "that the tokenizer has",
                param="messages",
            )
        return conversation

    def begin(self, request: ChatRequest, prompt: TurnPrompt) -> SessionTurn:
        """Adds a turn after its prompt."""
        conversation, parent = prompt.conversation, prompt.parent
        if parent is not None:
            parent.has_children = True
            if conversation is not parent.conversation and parent.conversation.ends_with_turn(parent.num_turns):
                # The prompt was made from a copy. One that goes on is enough.
                before = parent.conversation
                for turn in self.turns:
                    turn.conversation = conversation if turn.conversation is before else turn.conversation
        # The request itself is not kept, because each one repeats the whole conversation.
        turn = SessionTurn(
            number=len(self.turns),
            request_digest=request.digest,
            messages_digest=request.message_digests[-1],
            max_tokens=request.max_tokens,
            stop=request.stop,
            conversation=conversation,
            parent=parent,
            num_before=prompt.num_before,
        )
        self.turns.append(turn)
        return turn

    def deliver(self, turn: SessionTurn) -> None:
        """Notes that a client gets the turn's answer. To be called before the answer is sent, because the next request
        may arrive at once."""
        if not turn.is_delivered:
            turn.is_delivered = True
            self._ends.setdefault(_end_of(turn), []).append(turn)

    def take_back(self, turn: SessionTurn) -> None:
        """Notes that the answer could not be sent."""
        turn.is_delivered = False
        self._ends[_end_of(turn)].remove(turn)

    def transcript(self) -> Transcript | None:
        """Returns the rollout with a row for each delivered turn that no delivered turn follows. The last row, which
        also gives messages and texts, is the one with the most turns, including those before a rewrite; of equal ones
        the latest. It is rewritten if one of its conversations is. None without a delivered turn."""
        delivered = [turn for turn in self.turns if turn.is_delivered]
        if not delivered:
            return None
        followed = {id(turn.parent) for turn in delivered}
        last = [turn for turn in delivered if id(turn) not in followed]
        last.sort(key=lambda turn: (turn.num_before + turn.num_turns, turn.number))
        branches = [_up_to(turn) for turn in last]
        main = branches[-1].transcript()
        is_rewritten = main.is_rewritten or any(turn.num_before for turn in last)
        is_rewritten = is_rewritten or any(branch.is_rewritten for branch in branches[:-1])
        trained = set[str]()
        # The row with the most turns trains all of them, so it is made first.
        rows = [_row(branch, trained) for branch in reversed(branches)]
        return replace(main, rows=tuple(reversed(rows)), num_turns=len(delivered), is_rewritten=is_rewritten)

    async def _continued(
        self, request: ChatRequest, template: TurnTemplate, parser: TurnParser, texts: TextThread
    ) -> TurnPrompt | None:
        """Returns the conversation with the request's new messages, and the turn that they follow; a new conversation
        if a new row begins because the template rewrites the earlier turns; None if the messages do not begin with
        those of an earlier turn, or if the template rejects the new ones there. Raises as `_new` does."""
        digests = request.message_digests
        for number in range(len(digests) - 1, 0, -1):
            found = self._ends.get(digests[number - 1])
            new: Sequence[ChatMessage] = request.messages[number:]
            if not found or any(message["role"] == "assistant" for message in new):
                continue
            # Equal turns may have been sampled twice; each can go on by itself.
            parent = next((turn for turn in found if not turn.has_children), found[0])
            # For a new row, the template writes the whole conversation, not only the new messages.
            size = request.num_characters if self._starts_new_rows else num_characters(new)
            # While a thread adds the messages, other requests may go on with the conversation, so it gets a copy.
            conversation = parent.conversation.branch(parent.num_turns) if texts.is_long(size) else _up_to(parent)
            try:
                if await texts.run(partial(self._added, conversation, new), size):
                    return TurnPrompt(conversation, parent, parent.num_before)
            except ChatTemplateError:
                return None
            rewritten = await self._new(request, template, parser, texts)
            return TurnPrompt(rewritten, num_before=parent.num_before + parent.num_turns)
        return None

    def _added(self, conversation: Conversation, messages: Sequence[ChatMessage]) -> bool:
        """Adds messages to a conversation. Returns whether it can go on: not if a new row must begin because the chat
        template rewrites it."""
        conversation.add_messages(messages)
        return not (self._starts_new_rows and conversation.is_rewritten)


def context_full(max_context_tokens: int, seen: str) -> ChatRequestError:
    """The error of a request without room for a turn."""
    return ChatRequestError(
        f"spec.training.environment.maxContextTokens ({max_context_tokens}): there is no room for a turn ({seen}); "
        "send less text, or increase it",
        param="messages",
        code="context_length_exceeded",
    )


def _end_of(turn: SessionTurn) -> str:
    """The digest of all messages up to and including a turn."""
    return digest_of(turn.messages_digest, identity(turn.answer.result().message))


def _up_to(turn: SessionTurn) -> Conversation:
    """The conversation up to the end of a turn; a copy if it goes on."""
    if turn.conversation.ends_with_turn(turn.num_turns):
        return turn.conversation
    return turn.conversation.branch(turn.num_turns)


def _row(branch: Conversation, trained: set[str]) -> TokenRow:
    """The row of a branch. Turns in `trained`, which other rows train, are masked; the others are added to it."""
    turns = [turn for turn in branch.turns if turn.sequence.request_id not in trained]
    trained.update(turn.sequence.request_id for turn in turns)
    return branch.row(turns)
