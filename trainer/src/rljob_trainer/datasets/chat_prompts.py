"""Prompts that are chats: checks a row's messages and tools, and renders them with the model's chat template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rljob_trainer.errors import ChatTemplateError, DatasetError

if TYPE_CHECKING:
    # Importing this module loads transformers.
    from rljob_trainer.models.tokenizer import ChatMessage, Tokenizer, ToolSchema

HARMLESS_KEYS = frozenset({"role", "content", "weight"})
"""Keys of a message that are accepted. `weight` is a loss weight in fine-tuning data, which does not affect a
prompt."""


class ChatTemplate:
    """The chat template of the policy's tokenizer, for the rows of one dataset."""

    def __init__(self, tokenizer: Tokenizer, prompt_field: str) -> None:
        self._tokenizer = tokenizer
        self._prompt_field = prompt_field
        self._checked: set[tuple[bool, tuple[str, ...]]] = set()
        """Chats whose rendering was already checked, as pairs: whether there are tools, and the sequence of roles. The
        template uses the tools and every message of such a chat."""

    def render(self, messages: Sequence[ChatMessage], location: str, tools: Sequence[ToolSchema] = ()) -> str:
        """Returns the text of a chat with these tools, up to the beginning of the assistant's answer.

        Raises DatasetError, starting with `location`, if the chat ends with an assistant's turn, if the template
        rejects it, or if the template ignores the tools, or a message, as some templates do with unknown roles."""
        roles = tuple(message["role"] for message in messages)
        if roles[-1] == "assistant":
            raise DatasetError(
                f"{location}: the chat in column {self._prompt_field!r} ends with an assistant's turn "
                f"({messages[-1]['content']!r:.80}), but the policy would start another such turn; end the chat "
                "with a user's turn (is the last message the answer?)"
            )
        try:
            text = self._tokenizer.render_chat(messages, tools)
        except ChatTemplateError as error:
            raise DatasetError(
                f"{location}: the model's chat template rejects column {self._prompt_field!r} (roles: "
                f"{', '.join(roles)}): {error}; change the row or the template, or choose another model"
            ) from error
        if (bool(tools), roles) not in self._checked:
            if tools and self._is_without_tools(messages, text):
                raise DatasetError(
                    f"{location}: the model's chat template ignores tools, so the prompt would not have those of the "
                    "row; remove toolsField and write the tools into the messages, or choose a model whose chat "
                    "template supports tools"
                )
            for index in self._tokenizer.ignored_messages(messages, tools)[:1]:
                raise DatasetError(
                    f"{location}: the model's chat template ignores message {index + 1} of column "
                    f"{self._prompt_field!r} (role {roles[index]!r}: {messages[index]['content']!r:.40}); use roles "
                    "that the template supports, or remove the message"
                )
            self._checked.add((bool(tools), roles))
        return text

    def _is_without_tools(self, messages: Sequence[ChatMessage], text: str) -> bool:
        """Whether the chat has the same text if it is rendered without tools."""
        try:
            return self._tokenizer.render_chat(messages) == text
        except ChatTemplateError:
            return False


def tools_of(value: object, column: str, location: str) -> tuple[ToolSchema, ...]:
    """Returns the tools of a row, for chat templates. No tools: null, or an empty list.

    Keys with null values are removed, because Parquet files have all keys of a column's rows in each row; those in JSON
    text remain. Raises DatasetError, starting with `location`, for anything but a list of tools."""
    tools = _without_nulls(value)
    if isinstance(value, str):
        try:
            tools = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise DatasetError(
                f"{location}: column {column!r} (toolsField) has text that is not JSON ({error}; seen: {value!r:.80}); "
                "write a list of tools, or JSON text of one"
            ) from error
    if tools is None:
        return ()
    if not isinstance(tools, list):
        raise DatasetError(
            f"{location}: column {column!r} (toolsField) must have a list of tools, or JSON text of one (seen: "
            f"{value!r:.80}); put a single tool into a list"
        )
    for number, tool in enumerate(tools, start=1):
        match tool:
            case {"type": "function", "function": {"name": str()}}:
                continue
        raise DatasetError(
            f"{location}: tool {number} of column {column!r} (toolsField) is not a function (seen: {tool!r:.120}); "
            'write {"type": "function", "function": {"name": ..., "description": ..., "parameters": <JSON schema>}}'
        )
    return tuple(tools)


def _without_nulls(value: object) -> object:
    match value:
        case dict():
            return {key: _without_nulls(item) for key, item in value.items() if item is not None}
        case list():
            return [_without_nulls(item) for item in value]
    return value


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
