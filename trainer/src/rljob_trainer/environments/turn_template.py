"""How the chat template writes what comes between the turns of a conversation.

The tokens of a turn that was sampled are never tokenized again. After the turn come the end of the turn, the new
messages, and the beginning of the next turn. Their text does not depend on the turn, so it is found by rendering a
short conversation with known contents:

    user: ...    assistant: PROBE    new messages    generation prompt
                                 ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^ the suffix
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from rljob_trainer.engines.rollout.response_text import ResponseDecoder, response_decoder
from rljob_trainer.errors import ChatTemplateError, ConfigurationError
from rljob_trainer.models.assistant_turn import AssistantTurn
from rljob_trainer.models.tokenizer import ChatMessage, Tokenizer, ToolCall, ToolSchema

USER_PROBE, TURN_PROBE, CONTENT_PROBE = "Xq5request5Qx", "Vq3answer3Qv", "Yq9content9Qy"
"""Contents of test messages, which no template contains itself."""
PROBE_MESSAGE: ChatMessage = {"role": "user", "content": USER_PROBE}
TOOL_PROBE = "probe_tool"
EMPTY_THINKING = re.compile(r"\A\s*<(\w+)>\s*</\1>\s*")
"""Some templates write this before the content of a turn without thinking."""
CALL_MARKER = re.compile(r"<[^<>\s]{2,40}>|\[[A-Z_]{3,40}\]")
MAX_KEPT_LENGTH, MAX_KEPT_TEXTS = 200, 10_000
MAX_RENDERED_CALLS, MAX_CHECKED = 256, 1024
TEMPLATE_FIELD = "spec.training.model.source"


@dataclass(frozen=True)
class TemplateText:
    """Text that the chat template has written, up to where the model writes the assistant's turn."""

    text: str
    token_ids: tuple[int, ...]
    turn_beginning: str
    """The end of `text` that already belongs to the assistant's turn, such as `<think>\\n`. Often empty."""


class TurnTemplate:
    """The chat template of a tokenizer, for the conversations with one environment."""

    def __init__(self, tokenizer: Tokenizer, tools: Sequence[ToolSchema] = ()) -> None:
        """`tools`: those of the environment. Raises ConfigurationError if the tokenizer has no chat template."""
        if not tokenizer.has_chat_template:
            raise ConfigurationError(
                f"{TEMPLATE_FIELD}: the tokenizer in {tokenizer.folder} has no chat template, which an environment "
                "needs; use an instruction-tuned model, or add a chat_template.jinja to the model's folder"
            )
        self.tokenizer = tokenizer
        self.tools = tuple(tools)
        self.decoder: ResponseDecoder = response_decoder(tokenizer)
        self._turn = AssistantTurn(tokenizer, self.tools)
        self._end_tokens = frozenset(tokenizer.eos_token_ids) | self.decoder.removed_at_end
        self._token_ids: dict[str, tuple[int, ...]] = {}
        """The tokens of short texts after turns."""
        self._heads: dict[tuple[str, bool], str] = {}
        """The beginning of a suffix by the role of its first message, and whether the turn had tool calls."""
        self._rendered_calls: dict[tuple[tuple[str, str], ...], str] = {}
        """Turns with probes, as `_render_turn` writes them, by the names and ids of their calls."""

        self._checked: set[tuple[tuple[str, bool], ...]] = set()
        """Conversations of which the template writes every message: the roles, and which messages have tool calls."""

    def prompt(self, messages: Sequence[ChatMessage]) -> TemplateText:
        """Renders the beginning of a conversation, up to the first turn of the assistant. Raises ChatTemplateError if
        the template rejects it."""
        text = self.tokenizer.render_chat(messages, self.tools)
        token_ids = self.tokenizer.encode(text, add_special_tokens=False)
        return TemplateText(text, tuple(token_ids), self._turn.beginning(messages, text))

    def plain_beginning(self, beginning: str) -> str:
        """Returns the beginning of a turn without special tokens."""
        return self._turn.plain(beginning)

    def suffix(self, messages: Sequence[ChatMessage], *, after_tool_calls: bool) -> str:
        """Returns the text that the template writes after an assistant's turn: the end of the turn, the messages, and
        the beginning of the next turn.

        Args:
            messages: The messages after the turn; at least one.
            after_tool_calls: Whether the turn contains tool calls. Some templates then end a turn differently, and
                accept messages of tools only then.

        Raises ChatTemplateError if the template rejects the messages, and ConfigurationError if it does not write an
        assistant's turn.
        """
        return self._suffix(messages, after_tool_calls)[0]

    def after_turn(
        self, turn: Sequence[int], messages: Sequence[ChatMessage], *, after_tool_calls: bool, is_stopped: bool
    ) -> TemplateText:
        """Returns what must be appended after the tokens of a turn: the suffix without what the turn already contains.

        If the turn ends with a token that is part of the end of a turn, such as `<|im_end|>`, the result starts after
        this token. If it ends with a stop text, the result starts after the common part. If it ends in another way, the
        result contains the whole end of the turn. Raises as `suffix` does, and ChatTemplateError if the template leaves
        a message out.

        Args:
            turn: The token ids that were sampled.
            is_stopped: Whether the turn ended by an end token or a stop text; not by its length.
        """
        text, beginning = self._suffix(messages, after_tool_calls)
        self.check_written(messages, [PROBE_MESSAGE, probe_turn(_calls_of(messages) if after_tool_calls else [])])
        head = self._head(messages[0]["role"], after_tool_calls, text)
        if end := self.end_token(turn):
            start = head.find(end)
            if start >= 0:
                token_ids = self._encoded(text[start:])
                text = text[start + len(end) :]
                if token_ids[:1] == (turn[-1],):
                    return TemplateText(text, token_ids[1:], beginning)
        elif turn and is_stopped:
            written = self.tokenizer.decode(turn, skip_special_tokens=False)
            common = next((n for n in range(len(head), 0, -1) if written.endswith(head[:n])), 0)
            text = text[common:]
        return TemplateText(text, tuple(self._encode_after_turn(text)), beginning)

    def check_written(self, messages: Sequence[ChatMessage], before: Sequence[ChatMessage] = ()) -> None:
        """Raises ChatTemplateError if the template leaves one of these messages out, as some templates do with roles
        that they do not know. Turns of the assistant may be left out, which is a rewrite, and messages without text.
        `before`: messages that precede them."""
        conversation = [*before, *messages]
        kinds = tuple((message["role"], "tool_calls" in message) for message in conversation)
        if kinds in self._checked:
            return
        ignored = [index for index in self.tokenizer.ignored_messages(conversation, self.tools) if index >= len(before)]
        for index in ignored:
            role, content = conversation[index]["role"], conversation[index]["content"]
            if role != "assistant" and content.strip():
                raise ChatTemplateError(
                    f"the chat template of {self.tokenizer.folder} ignores message {index - len(before) + 1} (role "
                    f"{role!r}: {content!r:.40}); use a role that it writes there"
                )
        if not ignored:
            if len(self._checked) >= MAX_CHECKED:
                self._checked.clear()
            self._checked.add(kinds)

    def end_token(self, turn: Sequence[int]) -> str:
        """Returns the text of the end token at the end of a turn; empty if the turn has none."""
        is_ended = bool(turn) and turn[-1] in self._end_tokens
        return self.tokenizer.decode(turn[-1:], skip_special_tokens=False) if is_ended else ""

    def rewrites(self, messages: Sequence[ChatMessage], text: str) -> bool:
        """Whether the template would write another text than `text` for these messages and the beginning of the next
        turn."""
        try:
            return self.tokenizer.render_chat(messages, self.tools) != text
        except ChatTemplateError:
            return True

    def written_turn(self, turn: ChatMessage) -> str:
        """Returns a turn as the template writes it at the end of a conversation, without its beginning, an empty
        thinking and its end; empty if it cannot be found. `turn`: ends with the probe, like those of `probe_turn`."""
        prompt = self.prompt([PROBE_MESSAGE])
        header = prompt.text.removesuffix(prompt.turn_beginning)
        before, found, after = self._render_turn(turn).partition(TURN_PROBE)
        if not found or not before.startswith(header):
            return ""
        written = EMPTY_THINKING.sub("", before[len(header) :]).removeprefix(prompt.turn_beginning) + TURN_PROBE
        return written + self._end_of_call(turn, after) if turn.get("tool_calls") else written

    @cached_property
    def call_marker(self) -> str:
        """The first tag or special token that the template writes for a tool call, such as `<tool_call>`; empty if it
        writes none, or if there are no tools."""
        if not self.tools:
            return ""
        found = CALL_MARKER.search(self.written_turn(probe_turn([probe_call()])))
        return found[0] if found else ""

    def _suffix(self, messages: Sequence[ChatMessage], after_tool_calls: bool) -> tuple[str, str]:
        """Returns the suffix, and the part at its end that belongs to the next turn."""
        turn = probe_turn(_calls_of(messages) if after_tool_calls else [])
        conversation = [PROBE_MESSAGE, turn, *messages]
        rendered = self.tokenizer.render_chat(conversation, self.tools)
        _, found, after = rendered.partition(TURN_PROBE)
        if not found:
            ignored = "the tool calls" if after_tool_calls else "the content"
            raise ConfigurationError(
                f"{TEMPLATE_FIELD}: the chat template of {self.tokenizer.folder} ignores {ignored} of the assistant's "
                "turns; use a chat template that supports them"
            )
        if after_tool_calls:
            after = after[len(self._end_of_call(turn, after)) :]
        return after, self._turn.beginning(conversation, rendered)

    def _end_of_call(self, turn: ChatMessage, after: str) -> str:
        """Returns the part of `after`, the text after the probe in the last tool call of `turn`, that belongs to the
        call. The end of the turn follows."""
        calls = tuple((call["function"]["name"], call["id"]) for call in turn["tool_calls"])
        # Two threads may use the table; see TextThread.
        if (rendered := self._rendered_calls.get(calls)) is None:
            rendered = self._render_turn(turn)
            if len(self._rendered_calls) >= MAX_RENDERED_CALLS:
                # The policy may write any name.
                self._rendered_calls.clear()
            self._rendered_calls[calls] = rendered
        _, found, written = rendered.partition(TURN_PROBE)
        end_of_call = written.removesuffix(self._end_of_turn)
        if found and written.endswith(self._end_of_turn) and after.startswith(end_of_call):
            return end_of_call
        # Turns with tool calls have another end than turns without.
        ends = (self.tokenizer.decode([token], skip_special_tokens=False) for token in self._end_tokens)
        starts = [after.index(end) for end in ends if end and end in after]
        if not starts:
            raise ConfigurationError(
                f"{TEMPLATE_FIELD}: the chat template of {self.tokenizer.folder} writes no recognizable end after tool "
                f"calls ({after!r:.80}); use a chat template that ends a turn with an end token of the model"
            )
        return after[: min(starts)]

    @cached_property
    def _end_of_turn(self) -> str:
        """The text after the content of a turn at the end of a conversation."""
        return self._render_turn(probe_turn([])).partition(TURN_PROBE)[2]

    def _render_turn(self, turn: ChatMessage) -> str:
        """Renders a conversation that ends with the turn; empty if the template rejects it."""
        try:
            return self.tokenizer.render_conversation([PROBE_MESSAGE, turn], self.tools)
        except ChatTemplateError:
            return ""

    def _head(self, role: str, after_tool_calls: bool, suffix: str) -> str:
        """Returns the part of the suffix before the content of the first message, which has this role."""
        if (role, after_tool_calls) not in self._heads:
            probe: ChatMessage = {"role": role, "content": CONTENT_PROBE}
            if role == "tool":
                probe["name"] = TOOL_PROBE
            found = self._suffix([probe], after_tool_calls)[0]
            self._heads[role, after_tool_calls] = found.partition(CONTENT_PROBE)[0]
        head = self._heads[role, after_tool_calls]
        same = next((n for n, (a, b) in enumerate(zip(head, suffix, strict=False)) if a != b), len(head))
        return head[:same]

    def _encoded(self, text: str) -> tuple[int, ...]:
        """Encodes a text. The ids of short texts are kept, because many answers of games are equal."""
        if (known := self._token_ids.get(text)) is not None:
            return known
        token_ids = tuple(self.tokenizer.encode(text, add_special_tokens=False))
        if len(text) <= MAX_KEPT_LENGTH and len(self._token_ids) < MAX_KEPT_TEXTS:
            self._token_ids[text] = token_ids
        return token_ids

    def _encode_after_turn(self, text: str) -> list[int]:
        """Encodes a text as after a letter. Encoded alone, it could get a space in front (SentencePiece)."""
        before, both = self.tokenizer.encode_all([TURN_PROBE, TURN_PROBE + text], add_special_tokens=False)
        if both[: len(before)] == before:
            return both[len(before) :]
        return self.tokenizer.encode(text, add_special_tokens=False)


def probe_call(number: int = 0, name: str = TOOL_PROBE, call_id: str = "") -> ToolCall:
    """Returns a tool call whose argument contains a probe. `number`: its number in the turn."""
    return {
        "id": call_id or f"call{number:05d}",
        "type": "function",
        "function": {"name": name, "arguments": {"value": TURN_PROBE}},
    }


def probe_turn(calls: Sequence[ToolCall]) -> ChatMessage:
    """Returns an assistant's turn whose last known text is TURN_PROBE: with tool calls, or with a content."""
    if not calls:
        return {"role": "assistant", "content": TURN_PROBE}
    return {"role": "assistant", "content": "", "tool_calls": list(calls)}


def _calls_of(messages: Sequence[ChatMessage]) -> list[ToolCall]:
    """Returns the calls that these messages of tools answer. Their number, names and ids matter to some templates. Only
    the last one contains the probe."""
    answers = [message for message in messages if message["role"] == "tool"]
    calls = [
        probe_call(number, answer.get("name", TOOL_PROBE), answer.get("tool_call_id", ""))
        for number, answer in enumerate(answers)
    ] or [probe_call()]
    for call in calls[:-1]:
        call["function"]["arguments"] = {"value": "0"}
    return calls
