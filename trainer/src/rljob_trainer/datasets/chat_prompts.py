"""Prompts that are chats: checks a row's messages, and renders them with the model's chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rljob_trainer.errors import ChatTemplateError, DatasetError

if TYPE_CHECKING:
    # Importing this module loads transformers.
    from rljob_trainer.models.tokenizer import ChatMessage, Tokenizer

HARMLESS_KEYS = frozenset({"role", "content", "weight"})
"""Keys of a message that are accepted. `weight` is a loss weight in fine-tuning data, which does not affect a
prompt."""


class ChatTemplate:
    """The chat template of the policy's tokenizer, for the rows of one dataset."""

    def __init__(self, tokenizer: Tokenizer, prompt_field: str) -> None:
        self._tokenizer = tokenizer
        self._prompt_field = prompt_field
        self._checked: set[tuple[str, ...]] = set()
        """Sequences of roles that were already checked: the template uses every message."""

    def render(self, messages: Sequence[ChatMessage], location: str) -> str:
        """Returns the text of a chat, up to the beginning of the assistant's answer.

        Raises DatasetError, starting with `location`, if the chat ends with an assistant's turn, if the template
        rejects it, or if the template ignores a message, as some templates do with unknown roles."""
        roles = tuple(message["role"] for message in messages)
        if roles[-1] == "assistant":
            raise DatasetError(
                f"{location}: the chat in column {self._prompt_field!r} ends with an assistant's turn "
                f"({messages[-1]['content']!r:.80}), but the policy would start another such turn; end the chat "
                "with a user's turn (is the last message the answer?)"
            )
        try:
            text = self._tokenizer.render_chat(messages)
        except ChatTemplateError as error:
            raise DatasetError(
                f"{location}: the model's chat template rejects column {self._prompt_field!r} (roles: "
                f"{', '.join(roles)}): {error}; change the row or the template, or choose another model"
            ) from error
        if roles not in self._checked:
            for index in self._tokenizer.ignored_messages(messages)[:1]:
                raise DatasetError(
                    f"{location}: the model's chat template ignores message {index + 1} of column "
                    f"{self._prompt_field!r} (role {roles[index]!r}: {messages[index]['content']!r:.40}); use roles "
                    "that the template supports, or remove the message"
                )
            self._checked.add(roles)
        return text


def ignored_key(value: object) -> str | None:
    """Describes the first key of a chat's messages that would be ignored, because only role and content are used. None
    if there is none; keys with null or empty values do not count."""
    for number, item in enumerate(value if isinstance(value, list) else (), start=1):
        for key, each in item.items() if isinstance(item, dict) else ():
            if key not in HARMLESS_KEYS and each is not None and each not in ("", [], {}):
                return f"message {number} has the key {key!r} ({each!r:.80})"
    return None


def why_not_a_prompt(value: object) -> str:
    """Describes why a value is not a prompt, which must be a string or a list of messages whose role and content are
    strings."""
    seen = f"contains a {type(value).__name__} ({value!r:.80})"
    if not isinstance(value, list):
        return seen
    if not value:
        return "contains an empty list"
    for number, item in enumerate(value, start=1):
        match item:
            case {"role": str(), "content": str()}:
                continue
            case {"role": str() as role, "content": content}:
                return (
                    f"contains a list whose message {number} (role {role!r}) has content that is not a string "
                    f"({content!r:.80})"
                )
            case {"role": role, "content": _}:
                return f"contains a list whose message {number} has a role that is not a string ({role!r:.80})"
            case dict():
                return f"contains a list whose message {number} has the keys {', '.join(map(str, item)) or '(none)'}"
    return seen
