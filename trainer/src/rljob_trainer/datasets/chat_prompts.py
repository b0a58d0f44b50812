"""Prompts that are chats: what a row may hold, and what the model's chat template makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rljob_trainer.errors import ChatTemplateError, DatasetError

if TYPE_CHECKING:
    # Importing it loads transformers.
    from rljob_trainer.models.tokenizer import ChatMessage, Tokenizer

CHANGES = ("{} 1", "1 {}")
"""Of a message, to see whether the template's text changes: some templates read only one end of a message."""
HARMLESS_KEYS = frozenset({"role", "content", "weight"})
"""Of a message. Fine-tuning data has weights of the loss, which do not change a prompt."""


class ChatTemplate:
    """The chat template of the policy's tokenizer, for the rows of one dataset."""

    def __init__(self, tokenizer: Tokenizer, prompt_field: str) -> None:
        self._tokenizer = tokenizer
        self._prompt_field = prompt_field
        self._checked: set[tuple[str, ...]] = set()
        """Sequences of roles of which the template is known to write every message."""

    def render(self, messages: Sequence[ChatMessage], place: str) -> str:
        """The text of a chat, up to where the assistant begins to answer.

        Raises DatasetError, starting with `place`, for a chat that ends with an assistant's turn or that the template
        refuses, and where the template leaves out a message, as some do with roles that they do not know."""
        roles = tuple(message["role"] for message in messages)
        if roles[-1] == "assistant":
            raise DatasetError(
                f"{place}: the chat in column {self._prompt_field!r} ends with an assistant's turn "
                f"({messages[-1]['content']!r:.80}), and the policy would begin another one after it; end the chat "
                "with a user's turn (is the last one the answer?)"
            )
        try:
            text = self._tokenizer.render_chat(messages)
        except ChatTemplateError as error:
            raise DatasetError(
                f"{place}: column {self._prompt_field!r} cannot be put into the model's chat template (roles: "
                f"{', '.join(roles)}): {error}; change the row or the template, or choose another model"
            ) from error
        if roles not in self._checked:
            self._check_every_message(messages, text, place)
            self._checked.add(roles)
        return text

    def _check_every_message(self, messages: Sequence[ChatMessage], text: str, place: str) -> None:
        for number, message in enumerate(messages):
            if not self._reads(messages, number, text):
                raise DatasetError(
                    f"{place}: the model's chat template leaves out message {number + 1} of column "
                    f"{self._prompt_field!r} (role {message['role']!r}: {message['content']!r:.40}); use roles that "
                    "it knows, or leave the message out"
                )

    def _reads(self, messages: Sequence[ChatMessage], number: int, text: str) -> bool:
        """Whether the template's text changes with the content of one message."""
        message = messages[number]
        for change in CHANGES:
            other: ChatMessage = {"role": message["role"], "content": change.format(message["content"])}
            try:
                changed = self._tokenizer.render_chat([*messages[:number], other, *messages[number + 1 :]])
            except ChatTemplateError:
                return True
            if changed != text:
                return True
        return False


def unread_key(value: object) -> str | None:
    """The first key of a chat's messages that would be dropped, with its message and value: messages have a role and a
    content here. None where there is none; null and empty values say nothing."""
    for number, item in enumerate(value if isinstance(value, list) else (), start=1):
        for key, each in item.items() if isinstance(item, dict) else ():
            if key not in HARMLESS_KEYS and each is not None and each not in ("", [], {}):
                return f"message {number} has the key {key!r} ({each!r:.80})"
    return None


def misfit(value: object) -> str:
    """Why a value is no prompt: neither a string nor a list of messages whose role and content are strings."""
    seen = f"holds a {type(value).__name__} ({value!r:.80})"
    if not isinstance(value, list):
        return seen
    if not value:
        return "holds an empty list"
    for number, item in enumerate(value, start=1):
        match item:
            case {"role": str(), "content": str()}:
                continue
            case {"role": str() as role, "content": content}:
                return (
                    f"holds a list whose message {number} (role {role!r}) has content that is no string "
                    f"({content!r:.80})"
                )
            case {"role": role, "content": _}:
                return f"holds a list whose message {number} has a role that is no string ({role!r:.80})"
            case dict():
                return f"holds a list whose message {number} has the keys {', '.join(map(str, item)) or '(none)'}"
    return seen
