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

from rljob_trainer.environments.chat_requests import ChatAnswer, ChatRequest, ChatRequestError, digest_of, identity
from rljob_trainer.environments.conversation import Conversation
from rljob_trainer.environments.tool_calls import TurnParser
from rljob_trainer.environments.transcript import TokenRow, Transcript
from rljob_trainer.environments.turn_template import TurnTemplate
from rljob_trainer.errors import ChatTemplateError
from rljob_trainer.models.tokenizer import ChatMessage


@dataclass(eq=False)
class SessionTurn:
    """A turn that an agent asked for, from the request on."""

    number: int
    request: ChatRequest
    conversation: Conversation
    """Until the turn is finished, it ends with the prompt of the turn. Later it may go on."""
    parent: SessionTurn | None
    """The turn before it in the conversation."""
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


class SessionRecord:
    """The turns of one session."""

    def __init__(self, *, starts_new_rows: bool = False) -> None:
        """`starts_new_rows`: begins a new conversation if the chat template rewrites the earlier turns of one."""
        self._starts_new_rows = starts_new_rows
        self.turns: list[SessionTurn] = []
        """In the order of their requests."""
        self._prompt: Transcript | None = None
        """The prompt of the first turn."""
        self._ends: dict[str, list[SessionTurn]] = {}
        """The delivered turns by the digest of all messages up to and including them."""

    def repeated(self, request: ChatRequest, *, is_retry: bool) -> SessionTurn | None:
        """Returns the turn that a request asks for again; None if it asks for a new turn. That is an abandoned turn
        with equal content, or for a retry (as its headers say) the last turn with equal content."""
        equal = [turn for turn in self.turns if turn.request.digest == request.digest]
        equal = [turn for turn in equal if not (turn.answer.done() and turn.answer.exception() is not None)]
        abandoned = next((turn for turn in equal if turn.is_abandoned), None)
        return abandoned or (equal[-1] if equal and is_retry else None)

    def begin(
        self, request: ChatRequest, template: TurnTemplate, parser: TurnParser, max_context_tokens: int
    ) -> SessionTurn:
        """Adds a turn to the conversation that the request's messages go on with, or to a new one. Raises
        ChatRequestError if the template rejects the messages, or if there is no room for a turn after them."""
        conversation, parent = self._continued(request, max_context_tokens)
        if conversation is None:
            try:
                conversation = Conversation(template, parser, request.messages)
            except ChatTemplateError as error:
                raise ChatRequestError(
                    f"messages: {error}; send messages that the model's chat template accepts", param="messages"
                ) from error
            if len(conversation.token_ids) >= max_context_tokens:
                raise context_full(max_context_tokens, f"the messages have {len(conversation.token_ids)} tokens")
        turn = SessionTurn(len(self.turns), request, conversation, parent)
        if not self.turns:
            self._prompt = conversation.transcript(may_be_rewritten=False)
        self.turns.append(turn)
        if parent is not None:
            parent.has_children = True
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

    def transcript(self, *, may_be_rewritten: bool) -> Transcript | None:
        """Returns the rollout with a row for each delivered turn that no delivered turn follows. The last row, which
        also gives messages and texts, is the one with the most turns; of equal ones the latest. Without a delivered
        turn it is the prompt of the first turn; None without any turn."""
        delivered = [turn for turn in self.turns if turn.is_delivered]
        if not delivered:
            return self._prompt
        followed = {id(turn.parent) for turn in delivered}
        last = [turn for turn in delivered if id(turn) not in followed]
        last.sort(key=lambda turn: (turn.num_turns, turn.number))
        branches = [_up_to(turn) for turn in last]
        main = branches[-1].transcript(may_be_rewritten=may_be_rewritten)
        trained = set[str]()
        # The row with the most turns trains all of them, so it is made first.
        rows = [_row(branch, trained) for branch in reversed(branches)]
        return replace(main, rows=tuple(reversed(rows)), num_turns=len(delivered))

    def _continued(
        self, request: ChatRequest, max_context_tokens: int
    ) -> tuple[Conversation | None, SessionTurn | None]:
        """Returns the conversation with the request's new messages, and the turn that they follow; None if the messages
        do not begin with those of an earlier turn, or if the template rejects the new ones there."""
        digests = _digests(request)
        for number in range(len(digests) - 1, 0, -1):
            found = self._ends.get(digests[number - 1])
            new: Sequence[ChatMessage] = request.messages[number:]
            if not found or any(message["role"] == "assistant" for message in new):
                continue
            # Equal turns may have been sampled twice; each can go on by itself.
            parent = next((turn for turn in found if not turn.has_children), found[0])
            conversation = _up_to(parent)
            try:
                has_room = conversation.add_messages(new, max_context_tokens - 1)
            except ChatTemplateError:
                return None, None
            if not has_room:
                raise context_full(max_context_tokens, f"{len(conversation.token_ids)} tokens and the new messages")
            if self._starts_new_rows and conversation.is_rewritten:
                return None, None
            return conversation, parent
        return None, None


def context_full(max_context_tokens: int, seen: str) -> ChatRequestError:
    """The error of a request without room for a turn."""
    return ChatRequestError(
        f"spec.training.environment.maxContextTokens ({max_context_tokens}): there is no room for a turn ({seen}); "
        "send less text, or increase it",
        param="messages",
        code="context_length_exceeded",
    )


def _digests(request: ChatRequest, more: Sequence[ChatMessage] = ()) -> list[str]:
    """The digest of the tools and all messages up to each one."""
    found, digest = [], digest_of("", list(request.tools))
    for message in (*request.messages, *more):
        digest = digest_of(digest, identity(message))
        found.append(digest)
    return found


def _end_of(turn: SessionTurn) -> str:
    """The digest of all messages up to and including a turn."""
    return _digests(turn.request, [turn.answer.result().message])[-1]


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
