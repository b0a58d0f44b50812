"""Reads an assistant's turn: its content, its thinking and its tool calls.

The policy may write anything, so a broken tool call is not an exception. It is an explanation for the model, and the
turn then has no calls. Whether a tool exists, and whether its arguments have the right types, is not checked here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from rljob_trainer.engines.rollout.tool_parser import FoundCalls, ToolParser
from rljob_trainer.environments.turn_template import TurnTemplate
from rljob_trainer.errors import ConfigurationError, described
from rljob_trainer.models.tokenizer import ChatMessage, ToolCall

MAX_DEPTH = 50
"""Deepest nesting of a call's arguments. Python's JSON encoder and Jinja fail at a few hundred."""
MAX_ERROR_LENGTH = 300
"""Maximum length of an explanation for the model, in characters."""
END_OF_THINKING = "</think>"
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
"""Names of the thinking in response templates."""


@dataclass(frozen=True)
class ParsedTurn:
    """An assistant's turn as a message."""

    message: ChatMessage
    """`tool_calls` is present only if there are usable calls. If a call is broken, the content is the whole turn."""
    parse_error: str | None = None
    """Explains to the model why its tool calls cannot be read; None if they can."""

    @property
    def tool_calls(self) -> list[ToolCall]:
        """The calls of the turn, in order; often empty."""
        return self.message.get("tool_calls", [])


class TurnParser(Protocol):
    """Reads the assistant's turns."""

    def parse(self, prompt: str, beginning: str, text: str, end: str) -> ParsedTurn:
        """Converts a turn into a message. Never raises because of the text.

        Args:
            prompt: The text before the turn, at least from the header of the turn.
            beginning: The end of `prompt` that already belongs to the turn.
            text: The turn with its special tokens, without its end.
            end: The end token that was sampled after `text`, such as `<|im_end|>`; empty if there is none.
        """
        ...


class BrokenCallError(ValueError):
    """A tool call cannot be used; the message is for the model."""


class ContentParser:
    """Takes the whole turn as the content of the message."""

    def parse(self, prompt: str, beginning: str, text: str, end: str) -> ParsedTurn:
        """See TurnParser.parse."""
        del prompt, end
        return _content_only(beginning + text)


class ResponseTemplateParser:
    """Reads turns by the response template of the tokenizer. It gets the end token, because some templates find the
    end of a tool call by it."""

    def __init__(self, template: TurnTemplate) -> None:
        """Raises ConfigurationError if the chat template cannot write tool calls."""
        self._template = template
        self._marker = template.call_marker

    def parse(self, prompt: str, beginning: str, text: str, end: str) -> ParsedTurn:
        """See TurnParser.parse. Without tools, calls stay part of the content."""
        tools, whole = self._template.tools, beginning + text
        try:
            fields = self._template.tokenizer.parse_response(text + end, prompt=prompt, tools=tools)
            if not tools and fields.get("tool_calls"):
                return _content_only(whole)
            calls = _checked_calls(_raw_calls(fields.get("tool_calls")))
            if not calls and tools:
                _check_no_marker(self._marker, whole)
        except MemoryError:
            raise
        except Exception as error:  # the template is part of the model, and the text can be anything
            return _content_only(whole, error if tools else None)
        content = fields.get("content")
        content = content.removesuffix(end) if isinstance(content, str) else ""
        message: ChatMessage = {"role": "assistant", "content": content}
        for key in REASONING_KEYS:
            if isinstance(reasoning := fields.get(key), str) and reasoning:
                message["reasoning_content"] = message["thinking"] = reasoning
        if calls:
            message["tool_calls"] = calls
        return ParsedTurn(message)


class ToolParserTurns:
    """Reads turns by a tool parser. Thinking stays part of the content; calls in it do not count."""

    def __init__(self, template: TurnTemplate, parser: ToolParser) -> None:
        """Raises ConfigurationError if the chat template cannot write tool calls."""
        self._marker = template.call_marker
        self._parser = parser

    def parse(self, prompt: str, beginning: str, text: str, end: str) -> ParsedTurn:
        """See TurnParser.parse."""
        del prompt, end
        whole = beginning + text
        thinking, tag, answer = whole.rpartition(END_OF_THINKING)
        try:
            found = self._parser.find_calls(answer)
            calls = _checked_calls(_calls_of_parser(found))
            if not calls:
                _check_no_marker(self._marker, whole)
                return _content_only(whole)
        except MemoryError:
            raise
        except Exception as error:  # each parser fails in its own way
            return _content_only(whole, error)
        content = (thinking + tag + found.content).rstrip()
        return ParsedTurn({"role": "assistant", "content": content, "tool_calls": calls})


def turn_parser(template: TurnTemplate, tool_parser: str | None = None) -> TurnParser:
    """Returns the parser for the turns of a conversation.

    Args:
        template: The chat template, with the tools of the environment.
        tool_parser: The name of one of vLLM's tool parsers. It is used if there are tools, instead of the tokenizer's
            response template.

    Raises ConfigurationError if there are tools and no parser, or if vLLM cannot be used for it.
    """
    tokenizer = template.tokenizer
    if template.tools and tool_parser is not None:
        return ToolParserTurns(template, _vllm_tool_parser(tool_parser, template))
    if tokenizer.has_response_template:
        return ResponseTemplateParser(template)
    if template.tools:
        raise ConfigurationError(
            f"spec.training.environment: it has tools, but the tokenizer in {tokenizer.folder} has no response "
            "template that finds tool calls in the model's text. Set toolParser to the name of vLLM's tool parser for "
            "this model (for example hermes for Qwen2.5 and Qwen3), or add `response_template` to the model's "
            "tokenizer_config.json, or use an environment without tools"
        )
    return ContentParser()


def _vllm_tool_parser(name: str, template: TurnTemplate) -> ToolParser:
    try:
        from rljob_trainer.engines.rollout.vllm_tool_parsers import VllmToolParser
    except ImportError as error:
        raise ConfigurationError(
            f"spec.training.environment.toolParser: it needs vLLM, which cannot be imported ({described(error)}; seen: "
            f"{name!r}); install the trainer's `cpu` or `gpu` extra, or use a model whose tokenizer has a response "
            "template"
        ) from error
    return VllmToolParser(name, template.tokenizer.folder, template.tools)


def _content_only(content: str, error: Exception | None = None) -> ParsedTurn:
    message: ChatMessage = {"role": "assistant", "content": content}
    if error is None:
        return ParsedTurn(message)
    reason = str(error) if isinstance(error, BrokenCallError) else described(error)
    # An explanation is encoded like any other text, and the error of a library may quote what the model wrote.
    reason = reason.encode(errors="replace").decode()
    if len(reason) > MAX_ERROR_LENGTH:
        reason = reason[:MAX_ERROR_LENGTH] + "..."
    return ParsedTurn(message, f"The tool call cannot be read: {reason}")


def _check_no_marker(marker: str, text: str) -> None:
    """Raises BrokenCallError if a turn without usable calls contains the beginning of one."""
    if marker and marker in text.rpartition(END_OF_THINKING)[2]:
        raise BrokenCallError(f"the text contains {marker}, but no complete tool call follows it")


def _raw_calls(value: object) -> list[tuple[object, object]]:
    """Returns names and arguments of the calls that a response template has found."""
    if value is None:
        return []
    raw: list[tuple[object, object]] = []
    for call in value if isinstance(value, list) else [value]:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            raise BrokenCallError(f"a call must be an object with name and arguments (seen: {call!r:.80})")
        raw.append((function.get("name"), function.get("arguments", function.get("parameters"))))
    return raw


def _calls_of_parser(found: FoundCalls) -> list[tuple[object, object]]:
    return [(call.name, call.arguments) for call in found.calls]


def _checked_calls(raw: Iterable[tuple[object, object]]) -> list[ToolCall]:
    """Returns the calls as messages contain them. Raises BrokenCallError."""
    calls: list[ToolCall] = []
    for number, (name, arguments) in enumerate(raw):
        if not isinstance(name, str) or not name:
            raise BrokenCallError(f"call {number + 1} has no name (seen: {name!r:.80})")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except ValueError as error:
                raise BrokenCallError(f"the arguments of {name:.80} are not valid JSON: {error}") from error
        if arguments is None:
            arguments = {}
        if not isinstance(arguments, dict) or not all(isinstance(key, str) for key in arguments):
            raise BrokenCallError(f"the arguments of {name:.80} must be a JSON object (seen: {arguments!r:.80})")
        for value, where in ((name, f"name of call {number + 1}"), (arguments, f"arguments of {name:.80}")):
            if problem := _why_unusable(value):
                raise BrokenCallError(f"the {where} {problem}")
        # Mistral's templates accept only ids of nine letters and digits.
        calls.append(
            {"id": f"call{number:05d}", "type": "function", "function": {"name": name, "arguments": arguments}}
        )
    return calls


def _why_unusable(value: object) -> str | None:
    """Why a value cannot be sent to the environment as JSON; None if it can. Values are checked without recursion."""
    level: list[object] = [value]
    for _ in range(MAX_DEPTH):
        deeper: list[object] = []
        for each in level:
            match each:
                case str() if not each.isascii() and each != each.encode(errors="replace").decode():
                    return "contains an unpaired surrogate"
                case float() if not math.isfinite(each):
                    return f"contains {each}, which is not a JSON number"
                case dict():
                    deeper.extend((*each.keys(), *each.values()))
                case list():
                    deeper.extend(each)
        if not deeper:
            return None
        level = deeper
    return f"is nested more than {MAX_DEPTH} levels deep"
