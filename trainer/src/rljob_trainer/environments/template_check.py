"""Tests a chat template with short conversations: does it write everything, and does it only append?

A template appends if a prompt, the turn that follows, and the text after the turn are together the next prompt. Many
templates rewrite turns instead: they remove the thinking of earlier turns, or add an empty one. Then either
the sampled turns stay, and an application that renders each request shows the model another text than the training did,
or the rollout goes on in a new row of tokens (`onRewrite`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rljob_trainer.environments.tool_calls import TurnParser
from rljob_trainer.environments.turn_template import (
    PROBE_MESSAGE,
    TEMPLATE_FIELD,
    TOOL_PROBE,
    TURN_PROBE,
    TurnTemplate,
    probe_call,
    probe_turn,
)
from rljob_trainer.errors import ChatTemplateError, ConfigurationError
from rljob_trainer.models.tokenizer import ChatMessage, ToolCall

NEXT_PROBE, THINKING_PROBE = "Wq7result7Qw", "Uq1thought1Qu"
OPEN_TAG = re.compile(r"<(think|thinking|thought|reasoning)>\s*\Z")
NUM_ROUNDS = 2
EXCERPT = 120
"""Length of the texts in a Rewrite after the first difference, in characters."""


@dataclass(frozen=True)
class Rewrite:
    """A kind of turn that the template rewrites when the next message comes."""

    kind: str
    """For example `a turn with thinking, before a message of the user`."""
    sampled: str
    """The text that the conversation has, from shortly before the first difference."""
    rendered: str
    """The text that the template writes instead."""

    def __str__(self) -> str:
        return f"{self.kind}: {self.sampled!r} becomes {self.rendered!r}"


@dataclass(frozen=True)
class _Case:
    """A kind of turn, and the role of the message after it."""

    role: str
    is_thinking: bool

    @property
    def kind(self) -> str:
        thinking = "with thinking" if self.is_thinking else "without thinking"
        what = "a tool call" if self.role == "tool" else "a turn"
        before = "a result of the tool" if self.role == "tool" else "a message of the user"
        return f"{what} {thinking}, before {before}"


def find_rewrites(template: TurnTemplate, parser: TurnParser, *, has_user_messages: bool = True) -> tuple[Rewrite, ...]:
    """Returns the kinds of turns that the template rewrites; none if it only appends.

    Args:
        template: The chat template with the tools of the environment.
        parser: The parser of the assistant's turns.
        has_user_messages: Whether the environment answers turns with messages of the user.

    Raises ConfigurationError if the template rejects a role, or ignores tools, tool calls or messages that the
    environment needs, or if the parser cannot read a tool call that the template has written.
    """
    roles = [*(["user"] if has_user_messages else []), *(["tool"] if template.tools else [])]
    if template.tools:
        _check_tools_are_written(template)
    cases = [_Case(role, is_thinking) for role in roles for is_thinking in (False, True)]
    return tuple(rewrite for case in cases if (rewrite := _rewrite_of(case, template, parser)) is not None)


def _check_tools_are_written(template: TurnTemplate) -> None:
    text = template.prompt([PROBE_MESSAGE]).text
    names = [function.get("name") for tool in template.tools if isinstance(function := tool.get("function"), dict)]
    missing = [str(name) for name in names if str(name) not in text]
    if missing:
        raise ConfigurationError(
            f"{TEMPLATE_FIELD}: the environment has tools, but the chat template of {template.tokenizer.folder} "
            f"ignores them ({', '.join(missing)}); use a model or a chat template with tools, or an environment "
            "without tools"
        )


def _rewrite_of(case: _Case, template: TurnTemplate, parser: TurnParser) -> Rewrite | None:
    """Plays NUM_ROUNDS turns of this kind. Returns the first difference; None if the template appends, or if turns of
    this kind do not exist."""
    messages: list[ChatMessage] = [PROBE_MESSAGE]
    answer: ChatMessage = {"role": case.role, "content": NEXT_PROBE}
    if case.role == "tool":
        answer |= {"name": TOOL_PROBE, "tool_call_id": probe_call()["id"]}
    try:
        prompt = template.prompt(messages)
        suffix = template.suffix([answer], after_tool_calls=case.role == "tool")
    except ChatTemplateError as error:
        raise ConfigurationError(
            f"{TEMPLATE_FIELD}: the chat template rejects {case.kind} ({error}); use a chat template that accepts "
            f"messages with the role {case.role!r} after a turn of the assistant"
        ) from error
    if NEXT_PROBE not in suffix:
        raise ConfigurationError(
            f"{TEMPLATE_FIELD}: the chat template of {template.tokenizer.folder} ignores messages with the role "
            f"{case.role!r} after a turn of the assistant; use a chat template that supports them"
        )
    turn = _turn(case, template, prompt.turn_beginning)
    end = template.end_token(template.tokenizer.encode(suffix, add_special_tokens=False)[:1])
    for _ in range(NUM_ROUNDS if turn else 0):
        parsed = parser.parse(prompt.text, prompt.turn_beginning, turn, end)
        if case.role == "tool":
            _check_call(template, turn, parsed.tool_calls)
        messages += [parsed.message, answer]
        whole = prompt.text + turn + suffix
        try:
            prompt = template.prompt(messages)
        except ChatTemplateError as error:
            # It does not matter in a rollout, because what was sampled is not rendered again.
            return Rewrite(case.kind, turn, f"an error: {error}")
        if prompt.text != whole:
            return _difference(case.kind, whole, prompt.text)
    return None


def _turn(case: _Case, template: TurnTemplate, beginning: str) -> str:
    """Returns the text of a turn as the model would write it after the beginning; empty if turns of this kind do not
    exist, because the beginning already opens or closes the thinking."""
    opened = OPEN_TAG.search(beginning)
    if beginning and case.is_thinking != (opened is not None):
        return ""
    turn = probe_turn([probe_call()] if case.role == "tool" else [])
    answer = template.written_turn(turn) or turn["content"]
    if not answer:
        raise ConfigurationError(
            f"{TEMPLATE_FIELD}: the chat template of {template.tokenizer.folder} ignores the tool calls of the "
            "assistant's turns; use a chat template with tools, or an environment without tools"
        )
    if not case.is_thinking:
        return answer
    tag = f"<{opened[1] if opened else 'think'}>"
    thinking = f"{tag}\n{THINKING_PROBE}\n</{tag[1:]}\n\n"
    as_field: ChatMessage = {**turn, "reasoning_content": THINKING_PROBE, "thinking": THINKING_PROBE}
    as_content: ChatMessage = {**turn, "content": (thinking + turn["content"]).rstrip()}
    for each in (as_field, as_content):
        written = template.written_turn(each)
        if THINKING_PROBE in written.partition(TURN_PROBE)[0] and not (opened and written.startswith(tag)):
            return written
    # The template does not write thinking, even in its last turn.
    if opened:
        thinking = thinking.removeprefix(tag)
    return (thinking.removeprefix("\n") if beginning.endswith("\n") else thinking) + answer


def _check_call(template: TurnTemplate, turn: str, calls: Sequence[ToolCall]) -> None:
    """Raises ConfigurationError if the first call does not have the argument of the probe. The argument's name is not
    compared: a model whose tools have one argument need not write it."""
    arguments = calls[0]["function"]["arguments"].values() if calls else ()
    if list(arguments) != list(probe_call()["function"]["arguments"].values()):
        raise ConfigurationError(
            f"spec.training.environment: the parser does not find the tool call that the chat template of "
            f"{template.tokenizer.folder} writes ({turn!r:.200}); set toolParser to the tool parser of this model, or "
            "correct the tokenizer's response template"
        )


def _difference(kind: str, sampled: str, rendered: str) -> Rewrite:
    same = next(
        (n for n, (a, b) in enumerate(zip(sampled, rendered, strict=False)) if a != b), min(len(sampled), len(rendered))
    )
    start = max(0, same - EXCERPT // 3)
    return Rewrite(kind, sampled[start : same + EXCERPT], rendered[start : same + EXCERPT])
