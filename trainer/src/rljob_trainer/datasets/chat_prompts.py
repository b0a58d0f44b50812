"""Prompts that are chats: what a row may hold, and what the model's chat template makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rljob_trainer.errors import ChatTemplateError, DatasetError

if TYPE_CHECKING:
    # Importing it loads transformers.
    from rljob_trainer.models.tokenizer import ChatMessage, Tokenizer

CHANGE = " 1"
"""Is put behind a message to see whether the template's text changes."""


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
            other: ChatMessage = {"role": message["role"], "content": message["content"] + CHANGE}
            try:
                changed = self._tokenizer.render_chat([*messages[:number], other, *messages[number + 1 :]])
            except ChatTemplateError:
                continue  # It reads the message.
            if changed == text:
                raise DatasetError(
                    f"{place}: the model's chat template leaves out message {number + 1} of column "
                    f"{self._prompt_field!r} (role {message['role']!r}: {message['content']!r:.40}); use roles that "
                    "it knows, or leave the message out"
                )


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
