"""The tokens of one conversation between the policy and an environment.

Tokens are only appended: what the engine sampled stays as it is, and messages are written once, after the turn that
they answer. So the tokens are exactly those that the engine saw and sampled.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass

from rljob_trainer.engines.rollout.base import FinishedSequence, FinishReason
from rljob_trainer.engines.rollout.response_text import NUM_CONTEXT_TOKENS
from rljob_trainer.environments.tool_calls import ParsedTurn, TurnParser
from rljob_trainer.environments.transcript import SampledTurn, TokenRow, Transcript
from rljob_trainer.environments.turn_template import TemplateText, TurnTemplate
from rljob_trainer.errors import DataError, EnvironmentMessageError
from rljob_trainer.models.tokenizer import ChatMessage


@dataclass(frozen=True)
class RecordedTurn:
    """A turn of the assistant in a conversation."""

    sequence: FinishedSequence
    parsed: ParsedTurn
    beginning: str
    """What the template has written before the turn that already belongs to it."""
    start: int
    """The position of its first token in the row."""
    text_start: int
    """The position of its first character in the text of the row."""
    num_messages: int
    """The number of messages up to and including the turn."""

    @property
    def end(self) -> int:
        """The position after its last token."""
        return self.start + len(self.sequence.token_ids)


class Conversation:
    """A conversation that grows by turns of the assistant and messages of the environment."""

    def __init__(
        self,
        template: TurnTemplate,
        parser: TurnParser,
        messages: Sequence[ChatMessage],
        *,
        starts_new_rows: bool = False,
    ) -> None:
        """Begins with the messages of the prompt; see `first_messages`. Raises ChatTemplateError if the template
        rejects them or leaves one out.

        `starts_new_rows`: what happens when the template rewrites earlier turns. True: a new row begins, whose prompt
        is the whole conversation as the template writes it. False: the tokens stay as they were sampled."""
        self._template = template
        self._parser = parser
        self._starts_new_rows = starts_new_rows
        self._rows: list[TokenRow] = []
        """The rows before the current one."""
        self.turns: list[RecordedTurn] = []
        """The turns of all rows."""
        self.messages: list[ChatMessage] = [_encodable(message) for message in messages]
        """All messages so far, including the parsed turns of the assistant."""
        prompt = template.prompt(self.messages)
        template.check_written(self.messages)
        self.prompt_text = prompt.text.removesuffix(prompt.turn_beginning)
        """The text of the first row's prompt without the beginning of the assistant's turn."""
        self._begin_row(prompt)

    def _begin_row(self, prompt: TemplateText) -> None:
        self._row_prompt = prompt
        self._first_turn = len(self.turns)
        """The index of the row's first turn."""
        self.token_ids = list(prompt.token_ids)
        """The tokens of the row; the prompt of the next request."""
        self._text = prompt.text
        """The text of the row, with all special tokens, up to the last turn of the assistant, or the one that comes
        next."""
        self._before_turn: TemplateText | None = prompt
        """What the template has written before the turn that comes next; None after a turn."""

    @property
    def num_prompt_tokens(self) -> int:
        """The number of tokens of the row's prompt."""
        return len(self._row_prompt.token_ids)

    @property
    def num_turns(self) -> int:
        """The number of turns, in all rows."""
        return len(self.turns)

    @property
    def num_sampled_tokens(self) -> int:
        """The number of tokens that the policy sampled, in all turns."""
        return sum(len(turn.sequence.token_ids) for turn in self.turns)

    def add_turn(self, turn: FinishedSequence) -> ParsedTurn:
        """Appends a turn that the engine sampled with `token_ids` as its prompt. Returns it as a message. Raises
        DataError if the last message is already a turn, or if the turn's columns have different lengths."""
        if self._before_turn is None:
            raise DataError(f"the conversation already ends with turn {self.num_turns} of the assistant; add messages")
        if not len(turn.token_ids) == len(turn.logprobs) == len(turn.policy_versions):
            raise DataError(
                f"a turn has {len(turn.token_ids)} tokens, {len(turn.logprobs)} log-probabilities and "
                f"{len(turn.policy_versions)} policy versions"
            )
        before, self._before_turn = self._before_turn, None
        start = len(self.token_ids)
        self.token_ids += turn.token_ids
        end = self._template.end_token(turn.token_ids)
        parsed = self._parser.parse(before.text, before.turn_beginning, turn.text, end)
        self.messages.append(parsed.message)
        self.turns.append(RecordedTurn(turn, parsed, before.turn_beginning, start, len(self._text), len(self.messages)))
        return parsed

    def ends_with_turn(self, num_turns: int) -> bool:
        """Whether the conversation has this number of turns, and nothing after the last one."""
        return self._before_turn is None and num_turns == len(self.turns)

    def branch(self, num_turns: int) -> Conversation:
        """Returns a copy of the conversation up to the end of its `num_turns`-th turn (at least 1), which can go on in
        another way. Only for conversations that do not start new rows."""
        assert not self._starts_new_rows, "earlier rows have other tokens"
        other = copy(self)
        other.turns = self.turns[:num_turns]
        last = other.turns[-1]
        other.messages = self.messages[: last.num_messages]
        other.token_ids = self.token_ids[: last.end]
        other._text = self._text[: last.text_start]
        other._before_turn = None
        return other

    def add_messages(self, messages: Sequence[ChatMessage], max_tokens: int | None = None) -> bool:
        """Appends messages of the environment and the beginning of the next turn.

        Args:
            messages: At least one message. Unpaired surrogates are replaced.
            max_tokens: The largest number of tokens of the whole conversation.

        Returns False, and changes nothing, if the conversation would have more than `max_tokens` tokens. Raises
        ChatTemplateError if the template rejects the messages or leaves one out, and DataError if no turn precedes
        them.
        """
        if not self.turns or self._before_turn is not None or not messages:
            raise DataError(f"{len(messages)} messages cannot be added: they must follow a turn of the assistant")
        added, last = [_encodable(message) for message in messages], self.turns[-1]
        written = self._template.after_turn(
            last.sequence.token_ids,
            added,
            after_tool_calls=bool(last.parsed.tool_calls),
            is_stopped=last.sequence.finish_reason is FinishReason.STOP,
        )
        conversation, num_kept = [*self.messages, *added], len(self.token_ids)
        text = self._text + self._text_of(last) + written.text
        if self._starts_new_rows and self._template.rewrites(conversation, text):
            written, num_kept = self._template.prompt(conversation), 0
        if max_tokens is not None and num_kept + len(written.token_ids) > max_tokens:
            return False
        self.messages = conversation
        if num_kept:
            self.token_ids += written.token_ids
            self._text = text
            self._before_turn = written
        else:
            self._rows.append(self.row(self._turns_of_row))
            self._begin_row(written)
        return True

    @property
    def prompt_with_beginning(self) -> str:
        """The text of the row's prompt as the engine saw it."""
        return self._row_prompt.text

    @property
    def response_text(self) -> str:
        """The text after `prompt_text`: all turns and messages with special tokens, without the end of the last turn.
        It begins with the beginning of the first turn, if the template writes one. With several rows it is that of the
        last one."""
        last_turn = "" if self._before_turn is not None else self.turns[-1].sequence.text
        return (self._text + last_turn).removeprefix(self.prompt_text)

    @property
    def last_turn_plain_text(self) -> str:
        """The last turn without special tokens; empty before the first turn."""
        if not self.turns:
            return ""
        last = self.turns[-1]
        return self._template.plain_beginning(last.beginning) + last.sequence.plain_text

    @property
    def is_rewritten(self) -> bool:
        """Whether the template would have written another text than this conversation's, up to the beginning of its
        last turn. It is an estimate by text: a template that writes the JSON of a tool call with other spaces rewrites
        this call. With several rows it is true."""
        if self._rows:
            return True
        ends_with_turn = self._before_turn is None
        if self.num_turns == (1 if ends_with_turn else 0):
            return False
        return self._template.rewrites(self.messages[:-1] if ends_with_turn else self.messages, self._text)

    def transcript(self) -> Transcript:
        """Returns the conversation so far."""
        rows = list(self._rows)
        if self._turns_of_row or not rows:
            # Otherwise the last row has nothing to train on.
            rows.append(self.row(self._turns_of_row))
        return Transcript(
            tuple(rows),
            tuple(self.messages),
            self.prompt_text,
            self.response_text,
            self.last_turn_plain_text,
            self.num_turns,
            self.is_rewritten,
        )

    def row(self, turns: Iterable[RecordedTurn]) -> TokenRow:
        """Returns the current row so far, in which these of its turns are trained."""
        sampled = [SampledTurn(turn.start, turn.sequence.logprobs, turn.sequence.policy_versions) for turn in turns]
        return TokenRow(tuple(self.token_ids), self.num_prompt_tokens, tuple(sampled))

    @property
    def _turns_of_row(self) -> list[RecordedTurn]:
        return self.turns[self._first_turn :]

    def _text_of(self, turn: RecordedTurn) -> str:
        """The text of all tokens of a turn in the row, also of end tokens and stop texts."""
        before = self.token_ids[max(0, turn.start - NUM_CONTEXT_TOKENS) : turn.start]
        return self._template.decoder.added(before, turn.sequence.token_ids, keeps_incomplete=True)


def first_messages(
    row_messages: Sequence[ChatMessage] | None, opening: str | list[ChatMessage] | None, where: str
) -> list[ChatMessage]:
    """Returns the messages of a conversation's prompt.

    Args:
        row_messages: The chat of the dataset's row; None if there is no row, or the row has no chat.
        opening: What the environment's `reset` returned, as `returned_values.as_opening` has checked it. A string is
            appended to the last user message of the row, or is a new user message at the end if the row has none. A
            list of messages replaces the row's messages. None changes nothing.
        where: The environment and row, for messages.

    Raises EnvironmentMessageError if `reset` returned None although the row has no prompt.
    """
    messages: list[ChatMessage] = [message.copy() for message in row_messages or ()]
    if isinstance(opening, list):
        return opening
    if opening is None:
        if messages:
            return messages
        raise EnvironmentMessageError(
            f"{where}: `reset` returned None, but the row has no prompt; return a string or a list of messages, or "
            "use a dataset with prompts"
        )
    for message in reversed(messages):
        if message["role"] == "user":
            message["content"] += opening
            return messages
    return [*messages, {"role": "user", "content": opening}]


def _encodable(message: ChatMessage) -> ChatMessage:
    """Returns the message with U+FFFD instead of unpaired surrogates, which no tokenizer accepts."""
    content = message["content"]
    if content.isascii():
        return message
    return {**message, "content": content.encode("utf-16", "surrogatepass").decode("utf-16", "replace")}
