"""The tokens of one conversation between the policy and an environment.

Tokens are only appended: what the engine sampled stays as it is, and messages are written once, after the turn that
they answer. So the tokens are exactly those that the engine saw and sampled.

Legend: P tokens of the prompt, R tokens after the prompt (turns, their ends, messages, beginnings of turns).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from rljob_trainer.engines.rollout.base import FinishedSequence, FinishReason
from rljob_trainer.environments.tool_calls import ParsedTurn, TurnParser
from rljob_trainer.environments.transcript import TokenRow, Transcript
from rljob_trainer.environments.turn_template import TemplateText, TurnTemplate
from rljob_trainer.errors import DataError, EnvironmentMessageError
from rljob_trainer.models.tokenizer import ChatMessage

NOT_SAMPLED_VERSION = -1
"""Policy version of tokens that were not sampled."""
ENVIRONMENT_ROLES = ("user", "tool", "system")
"""Roles of messages that may follow a turn of the assistant."""


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
        rejects them.

        `starts_new_rows`: what happens when the template rewrites earlier turns. True: a new row begins, whose prompt
        is the whole conversation as the template writes it. False: the tokens stay as they were sampled."""
        self._template = template
        self._parser = parser
        self._starts_new_rows = starts_new_rows
        self._rows: list[TokenRow] = []
        """The rows before the current one, to which everything below belongs unless it says otherwise."""
        self._num_sampled_before = 0
        """Sampled tokens of these rows."""
        self.messages: list[ChatMessage] = [_encodable(message) for message in messages]
        """All messages so far, including the parsed turns of the assistant."""
        prompt = template.prompt(self.messages)
        self.prompt_text = prompt.text.removesuffix(prompt.turn_beginning)
        """The text of the first row's prompt without the beginning of the assistant's turn."""
        self.token_ids: list[int] = list(prompt.token_ids)
        """P + R: the tokens of the row; the prompt of the next request."""
        self.num_prompt_tokens = len(prompt.token_ids)
        """P."""
        self._num_sampled = 0
        self.mask: list[bool] = []
        """R: whether the token was sampled."""
        self.logprobs: list[float] = []
        """R: log-probabilities of the sampled tokens; 0 for other tokens."""
        self.policy_versions: list[int] = []
        """R: the engine's policy version for the sampled tokens; NOT_SAMPLED_VERSION for other tokens."""
        self.num_turns = 0
        self._before_turn: TemplateText | None = prompt
        """What the template has written before the turn that comes next; None after a turn."""
        self._row_prompt = prompt.text
        self._beginning = ""
        self._turn: FinishedSequence | None = None
        self._parsed: ParsedTurn | None = None
        self._turn_start = self.num_prompt_tokens
        """The position in `token_ids` of the last turn."""

    @property
    def response_token_ids(self) -> list[int]:
        """R: the tokens after the prompt."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_sampled_tokens(self) -> int:
        """The number of tokens that the policy sampled, in all turns."""
        return self._num_sampled_before + self._num_sampled

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
        self._turn, self._turn_start, self._beginning = turn, len(self.token_ids), before.turn_beginning
        self._append(turn.token_ids, turn.logprobs, turn.policy_versions, sampled=True)
        self.num_turns += 1
        end = self._template.end_token(turn.token_ids)
        self._parsed = self._parser.parse(before.text, before.turn_beginning, turn.text, end)
        self.messages.append(self._parsed.message)
        return self._parsed

    def add_messages(self, messages: Sequence[ChatMessage], max_tokens: int | None = None) -> bool:
        """Appends messages of the environment and the beginning of the next turn.

        Args:
            messages: At least one message, as `checked_messages` returns them. Unpaired surrogates are replaced.
            max_tokens: The largest number of tokens of the whole conversation.

        Returns False, and changes nothing, if the conversation would have more than `max_tokens` tokens. Raises
        ChatTemplateError if the template rejects the messages, and DataError if no turn precedes them.
        """
        if self._turn is None or self._parsed is None or self._before_turn is not None or not messages:
            raise DataError(f"{len(messages)} messages cannot be added: they must follow a turn of the assistant")
        added = [_encodable(message) for message in messages]
        written = self._template.after_turn(
            self._turn.token_ids,
            added,
            after_tool_calls=bool(self._parsed.tool_calls),
            is_stopped=self._turn.finish_reason is FinishReason.STOP,
        )
        if self._starts_new_rows:
            conversation = [*self.messages, *added]
            if self._template.rewrites(conversation, self._row_text(len(self.token_ids)) + written.text):
                return self._start_row(conversation, max_tokens)
        num_added = len(written.token_ids)
        if max_tokens is not None and len(self.token_ids) + num_added > max_tokens:
            return False
        self._append(written.token_ids, [0.0] * num_added, [NOT_SAMPLED_VERSION] * num_added, sampled=False)
        self.messages += added
        self._before_turn = written
        return True

    def _start_row(self, conversation: list[ChatMessage], max_tokens: int | None) -> bool:
        """Ends the current row, and begins one whose prompt is the whole conversation. Returns False, and changes
        nothing, if it has more than `max_tokens` tokens."""
        prompt = self._template.prompt(conversation)
        if max_tokens is not None and len(prompt.token_ids) > max_tokens:
            return False
        self._rows.append(self._row())
        self._num_sampled_before, self._num_sampled = self.num_sampled_tokens, 0
        self.token_ids, self.num_prompt_tokens = list(prompt.token_ids), len(prompt.token_ids)
        self.mask, self.logprobs, self.policy_versions = [], [], []
        self.messages, self._before_turn, self._row_prompt = conversation, prompt, prompt.text
        self._turn_start = self.num_prompt_tokens
        return True

    @property
    def prompt_with_beginning(self) -> str:
        """The text of the row's prompt as the engine saw it."""
        return self._row_prompt

    @property
    def response_text(self) -> str:
        """The text after `prompt_text`: all turns and messages with special tokens, without the end of the last turn.
        It begins with the beginning of the first turn, if the template writes one. With several rows it is that of the
        last one."""
        if self._turn is None or self._before_turn is not None:
            whole = self._row_text(len(self.token_ids))
        else:
            whole = self._row_text(self._turn_start) + self._turn.text
        return whole.removeprefix(self.prompt_text)

    @property
    def last_turn_text(self) -> str:
        """The last turn with special tokens and its beginning, without its end; empty before the first turn."""
        return self._beginning + self._turn.text if self._turn else ""

    @property
    def last_turn_plain_text(self) -> str:
        """The last turn without special tokens; empty before the first turn."""
        return self._template.plain_beginning(self._beginning) + self._turn.plain_text if self._turn else ""

    @property
    def is_rewritten(self) -> bool:
        """Whether the template would have written another text than this conversation's, up to the beginning of its
        last turn. It is an estimate by text: a template that writes the JSON of a tool call with other spaces rewrites
        this call. With several rows it is true."""
        if self._rows:
            return True
        ends_with_turn = self._before_turn is None
        messages = self.messages[:-1] if ends_with_turn else self.messages
        end = self._turn_start if ends_with_turn else len(self.token_ids)
        if end == self.num_prompt_tokens:
            return False
        return self._template.rewrites(messages, self._row_text(end))

    def transcript(self, *, may_be_rewritten: bool) -> Transcript:
        """Returns the conversation so far. `may_be_rewritten`: whether to find out `is_rewritten`, which takes time."""
        # A row without a turn has nothing to train on.
        rows = [*self._rows, self._row()] if self._num_sampled or not self._rows else self._rows
        return Transcript(
            tuple(rows),
            tuple(self.messages),
            self.prompt_text,
            self.response_text,
            self.last_turn_plain_text,
            self.num_turns,
            may_be_rewritten and self.is_rewritten,
        )

    def _append(
        self, token_ids: Iterable[int], logprobs: Iterable[float], versions: Iterable[int], *, sampled: bool
    ) -> None:
        self.token_ids += token_ids
        self.logprobs += logprobs
        self.policy_versions += versions
        num_added = len(self.token_ids) - self.num_prompt_tokens - len(self.mask)
        self.mask += [sampled] * num_added
        self._num_sampled += num_added * sampled

    def _row(self) -> TokenRow:
        return TokenRow(
            tuple(self.token_ids),
            self.num_prompt_tokens,
            tuple(self.mask),
            tuple(self.logprobs),
            tuple(self.policy_versions),
        )

    def _row_text(self, end: int) -> str:
        """The text of the row up to position `end`, with all special tokens."""
        decoder = replace(self._template.decoder, removed=frozenset(), removed_at_end=frozenset())
        return (
            self._row_prompt
            + decoder.response_text(
                self.token_ids[: self.num_prompt_tokens], self.token_ids[self.num_prompt_tokens : end]
            ).text
        )


def first_messages(row_messages: Sequence[ChatMessage] | None, reset_result: object, where: str) -> list[ChatMessage]:
    """Returns the messages of a conversation's prompt.

    Args:
        row_messages: The chat of the dataset's row; None if there is no row, or the row has no chat.
        reset_result: What the environment's `reset` returned. A string is appended to the last user message of the row,
            or is a new user message at the end if the row has none. A list of messages replaces the row's messages.
            None changes nothing.
        where: The environment and row, for messages.

    Raises EnvironmentMessageError if `reset` returned something else, or None although the row has no prompt.
    """
    messages: list[ChatMessage] = [message.copy() for message in row_messages or ()]
    match reset_result:
        case None if messages:
            return messages
        case None:
            raise EnvironmentMessageError(
                f"{where}: `reset` returned None, but the row has no prompt; return a string or a list of messages, or "
                "use a dataset with prompts"
            )
        case str():
            for message in reversed(messages):
                if message["role"] == "user":
                    message["content"] += reset_result
                    return messages
            return [*messages, {"role": "user", "content": reset_result}]
        case list():
            replaced = checked_messages(reset_result, f"{where}: the result of `reset`", any_role=True)
            if replaced[-1]["role"] == "assistant":
                raise EnvironmentMessageError(
                    f"{where}: the messages of `reset` end with a turn of the assistant "
                    f"({replaced[-1]['content']!r:.80}), but the policy writes the next turn; end with another role"
                )
            return replaced
    raise EnvironmentMessageError(
        f"{where}: `reset` must return a string, a list of messages or None (seen: {reset_result!r:.80})"
    )


def checked_messages(value: object, where: str, *, any_role: bool = False) -> list[ChatMessage]:
    """Returns messages that an environment has written: a string is a user message; a list has messages with the
    strings `role` and `content`, and optionally `name` and `tool_call_id`.

    Args:
        where: What returned the value, for messages.
        any_role: Also accept roles other than those of ENVIRONMENT_ROLES, such as `assistant`, for a prompt.

    Raises EnvironmentMessageError if the value is something else, an empty list, or has other keys.
    """
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise EnvironmentMessageError(
            f"{where}: must be a string or a list of at least one message with role and content (seen: {value!r:.80})"
        )
    messages: list[ChatMessage] = []
    for number, item in enumerate(value, start=1):
        match item:
            case {"role": str() as role, "content": str() as content, **others}:
                message: ChatMessage = {"role": role, "content": content}
            case _:
                raise EnvironmentMessageError(
                    f"{where}: message {number} must be a mapping with the strings role and content "
                    f"(seen: {item!r:.80})"
                )
        if not any_role and role not in ENVIRONMENT_ROLES:
            raise EnvironmentMessageError(
                f"{where}: message {number} has the role {role!r}; use one of {', '.join(ENVIRONMENT_ROLES)}"
            )
        _copy_names(message, others, f"{where}: message {number}")
        messages.append(message)
    return messages


def _copy_names(message: ChatMessage, others: Mapping[object, object], where: str) -> None:
    for key, each in others.items():
        if key == "name" and isinstance(each, str):
            message["name"] = each
        elif key == "tool_call_id" and isinstance(each, str):
            message["tool_call_id"] = each
        elif each is not None:
            raise EnvironmentMessageError(
                f"{where} has the key {key!r} ({each!r:.80}), which would be ignored; only role, content, name and "
                "tool_call_id (strings) are used"
            )


def _encodable(message: ChatMessage) -> ChatMessage:
    """Returns the message with U+FFFD instead of unpaired surrogates, which no tokenizer accepts."""
    content = message["content"]
    if content.isascii():
        return message
    return {**message, "content": content.encode("utf-16", "surrogatepass").decode("utf-16", "replace")}
