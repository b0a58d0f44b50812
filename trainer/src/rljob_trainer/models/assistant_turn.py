"""Finds out how a chat template writes the assistant's turn: its beginning, and the token that ends it.

A turn consists of the role's header (`<|im_start|>assistant\\n`), the content, and an end (`<|im_end|>\\n`). If the
generation prompt contains text after the header, such as `<think>\\n`, this text is the beginning of the content. The
template has written it instead of the model. The header is found by rendering a turn with known content.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # Importing it loads transformers.
    from rljob_trainer.models.tokenizer import ChatMessage, Tokenizer, ToolSchema

PROBE = "Zq7probe7Qz"
"""Content of a test message, which no template contains itself."""
THINKING = re.compile(r"(?:(?:<(\w+)>\s*</\1>|</?(?:think|thinking|thought|reasoning)>)\s*)+\Z")
"""Thinking tags, such as an empty `<think></think>`, which templates write before the content of a turn without
thinking. They are not part of the header."""


class AssistantTurn:
    """The assistant's turn as the chat template of a tokenizer writes it. The tokenizer must have a template."""

    def __init__(self, tokenizer: Tokenizer, tools: Sequence[ToolSchema] = ()) -> None:
        """`tools`: those that the prompts were rendered with."""
        self._tokenizer = tokenizer
        self._tools = tools
        self._plain: dict[str, str] = {}
        """Cache of beginnings without special tokens; there are few different ones."""

    def beginning(self, messages: Sequence[ChatMessage], prompt: str, tools: Sequence[ToolSchema] = ()) -> str:
        """Returns the text of `prompt` after the role's header. `prompt` is the rendered chat with the generation
        prompt. Empty if this text is only white space, or if the header cannot be found. `tools`: those that this
        prompt was rendered with, if they are others than those of the other prompts."""
        after_message, beginning = self._of_one_message
        # The result for a one-message chat is reused, so that not every prompt must be rendered twice.
        if after_message and prompt.endswith(after_message):
            return beginning
        return self._beginning(messages, prompt, tools or self._tools)

    def plain(self, beginning: str) -> str:
        """Returns `beginning` without the tokenizer's special tokens; empty if only white space remains."""
        if beginning not in self._plain:
            token_ids = self._tokenizer.encode(beginning, add_special_tokens=False)
            has_special = not self._tokenizer.special_token_ids.isdisjoint(token_ids)
            plain = self._tokenizer.decode(token_ids) if has_special else beginning
            self._plain[beginning] = plain if plain.strip() else ""
        return self._plain[beginning]

    @cached_property
    def turn_end_token_id(self) -> int | None:
        """The special token that the template writes directly after the content of a turn; None if it writes none
        there, or cannot render a turn."""
        rendered = self._render_turn([{"role": "user", "content": "x"}], self._tools)
        after = rendered.partition(PROBE)[2]
        token_ids = self._tokenizer.encode(after, add_special_tokens=False) if after else []
        return token_ids[0] if token_ids and token_ids[0] in self._tokenizer.special_token_ids else None

    @cached_property
    def _of_one_message(self) -> tuple[str, str]:
        """Renders a chat of one message. Returns the text after that message, and the part of that text that is the
        beginning of the assistant's turn."""
        messages: list[ChatMessage] = [{"role": "user", "content": PROBE.swapcase()}]
        try:
            prompt = self._tokenizer.render_chat(messages, self._tools)
        except Exception:  # a template can raise any error
            return "", ""
        return prompt.rpartition(PROBE.swapcase())[2], self._beginning(messages, prompt, self._tools)

    def _beginning(self, messages: Sequence[ChatMessage], prompt: str, tools: Sequence[ToolSchema]) -> str:
        rendered = self._render_turn(messages, tools)
        content = messages[-1]["content"].strip()
        if content not in rendered:
            return ""
        start = rendered.index(content) + len(content)
        end = rendered.find(PROBE, start)
        if end < 0:
            return ""
        header_end = THINKING.sub("", rendered[start:end])
        for header in (rendered[:start] + header_end, rendered[:start] + header_end.rstrip()):
            if prompt.startswith(header):
                beginning = prompt[len(header) :]
                return beginning if beginning.strip() else ""
        return ""

    def _render_turn(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSchema]) -> str:
        """Renders the chat with one more turn of the assistant. If the template rejects this, renders it with a turn of
        the user at the end. Returns an empty string if both fail."""
        turn: ChatMessage = {"role": "assistant", "content": PROBE}
        ends: tuple[list[ChatMessage], ...] = ([], [{"role": "user", "content": "x"}])
        for end in ends:
            with contextlib.suppress(Exception):  # a template can raise any error
                return self._tokenizer.render_conversation([*messages, turn, *end], tools)
        return ""
