"""Checks what methods of environments return, and converts it to values that can be sent as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rljob_trainer.processes.child_program import printable
from rljob_trainer.rewards.base import as_score

if TYPE_CHECKING:
    from rljob_trainer.models.tokenizer import ChatMessage

MAX_CHARACTERS = 1 << 20
"""The maximum number of characters of what one call returns: more than any context holds, and less than a reply of a
process may have."""
MAX_NAMES = 256
"""The maximum number of named rewards."""
MAX_NAME_CHARACTERS = 256
REPLY_ROLES = ("user", "tool", "system")
"""Roles of messages that may follow a turn of the policy."""
MESSAGE_CHARACTERS = 32
"""What a message costs besides its text, so that the number of messages is limited, too."""


def as_opening(value: object) -> str | list[ChatMessage] | None:
    """What `reset` returned: a string, a list of messages, or None. Raises TypeError or ValueError for anything else.

    A list of text blocks, as in `[{"type": "text", "text": "Hello"}]`, becomes one string."""
    if value is None:
        return None
    if isinstance(value, str):
        return _text(value, MAX_CHARACTERS)
    if isinstance(value, list | tuple) and value:
        if all(isinstance(each, Mapping) and "type" in each for each in value):
            return _text("".join(map(_block_text, value)), MAX_CHARACTERS)
        messages = _messages(value)
        if messages[-1]["role"] == "assistant":
            raise ValueError(
                f"returned messages that end with a turn of the assistant ({messages[-1]['content']!r:.80}), but the "
                "policy writes the next turn; end with another role"
            )
        return messages
    raise TypeError(f"returned {_shown(value)}; return a string, a list of messages, or None")


def as_reply(value: object) -> list[ChatMessage] | None:
    """What `respond` returned, as messages: a string becomes a message of the user. None ends the rollout. Raises
    TypeError or ValueError for anything else."""
    if value is None:
        return None
    if isinstance(value, str):
        return [{"role": "user", "content": _text(value, MAX_CHARACTERS)}]
    values = [value] if isinstance(value, Mapping) else value
    if not isinstance(values, list | tuple) or not values:
        raise TypeError(
            f"returned {_shown(value)}; return a string, a message, a list of messages, or None for the end"
        )
    messages = _messages(values)
    for message in messages:
        if message["role"] not in REPLY_ROLES:
            raise ValueError(f"returned a message with the role {message['role']!r}; use {', '.join(REPLY_ROLES)}")
    return messages


def as_reward(value: object) -> float | dict[str, float]:
    """What `get_reward` returned: a finite number, or a mapping of names to such numbers. Raises TypeError or
    ValueError for anything else."""
    if not isinstance(value, Mapping):
        return as_score(value)
    if not 0 < len(value) <= MAX_NAMES or not all(isinstance(name, str) for name in value):
        raise TypeError(f"returned {_shown(value)}; return a number, or up to {MAX_NAMES} names with numbers")
    return {_text(name, MAX_NAME_CHARACTERS): _named_score(name, score) for name, score in value.items()}


def as_result(value: object) -> float | dict[str, float] | None:
    """What an agent's function returned: as `as_reward`, or None. Raises TypeError or ValueError for anything else."""
    return None if value is None else as_reward(value)


def as_tool_text(value: object, max_characters: int) -> str:
    """The text of a tool's result for the model. Raises ValueError if it is too long, and whatever the value's
    `__str__` raises."""
    return _text(str(value), max_characters)


def _named_score(name: str, value: object) -> float:
    try:
        return as_score(value)
    except (TypeError, ValueError) as error:
        raise type(error)(f"for {name!r}: {error}") from error


def _messages(values: Sequence[object]) -> list[ChatMessage]:
    messages: list[ChatMessage] = []
    characters_left = MAX_CHARACTERS
    for value in values:
        match value:
            case {"role": str() as role, "content": str() as content, **others} if not others:
                characters_left -= MESSAGE_CHARACTERS + len(role) + len(content)
                if characters_left < 0:
                    raise ValueError(f"returned messages of more than {MAX_CHARACTERS} characters; return less text")
                messages.append({"role": printable(role), "content": printable(content)})
            case _:
                raise TypeError(
                    f"returned the message {_shown(value)}; a message has only the strings `role` and `content`"
                )
    return messages


def _block_text(block: Mapping[str, object]) -> str:
    match block:
        case {"type": "text", "text": str() as text}:
            return text
    raise TypeError(f"returned the block {_shown(block)}; only blocks of text are supported, no images")


def _text(value: str, max_characters: int) -> str:
    """The text with unpaired surrogates escaped, because no tokenizer accepts them."""
    if len(value) > max_characters:
        raise ValueError(f"returned {len(value)} characters, at most {max_characters} are possible; return less text")
    return printable(value)


def _shown(value: object) -> str:
    try:
        return f"a {type(value).__name__} ({value!r:.200})"
    except Exception as error:
        return f"a {type(value).__name__} (its repr raises {type(error).__name__})"
