"""What a chat template does to earlier turns is known before a run, and so is what it ignores."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from rljob_testing.models import chat_models
from rljob_trainer.environments.template_check import Rewrite, find_rewrites
from rljob_trainer.environments.tool_calls import turn_parser
from rljob_trainer.environments.turn_template import TurnTemplate
from rljob_trainer.errors import ConfigurationError
from rljob_trainer.models.tokenizer import Tokenizer, ToolSchema

TOOL: ToolSchema = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
HERMES = chat_models.HERMES.replace("THINKING", "").replace("BEGINNING", "")
HERMES_THINKING = chat_models.HERMES.replace("BEGINNING", "").replace(
    "THINKING", "{% if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>\n\n{% endif %}"
)
USER, THINKING_USER = (f"a turn {kind} thinking, before a message of the user" for kind in ("without", "with"))
TOOL_CALL, THINKING_CALL = (f"a tool call {kind} thinking, before a result of the tool" for kind in ("without", "with"))


def rewrites_of(
    folder: Path,
    template: str,
    tools: Sequence[ToolSchema] = (),
    *,
    responses: dict[str, object] | None = None,
    has_user_messages: bool = True,
) -> tuple[Rewrite, ...]:
    saved = chat_models.save(folder, template, eos_token="<|im_end|>", are_special=False, response_template=responses)
    turn_template = TurnTemplate(Tokenizer(saved), tools)
    return find_rewrites(turn_template, turn_parser(turn_template), has_user_messages=has_user_messages)


@pytest.mark.parametrize(
    ("template", "kinds"),
    [
        ("ChatML", []),
        ("ChatML, thinking", []),
        ("Llama 3", []),
        ("Llama 3, thinking", []),
        ("Gemma", []),
        ("no other assistant", []),
        ("Qwen3", [THINKING_USER]),
        ("Qwen3, thinking", [THINKING_USER]),
        # The model writes no thinking, but the template writes an empty one only in the last turn.
        ("Qwen3, not thinking", [USER]),
        ("R1", [THINKING_USER]),
        ("V3.1", []),
        # The space after the colon is not part of the prompt.
        ("colon", [USER, THINKING_USER]),
    ],
)
def test_rewritten_turns_are_found(tmp_path: Path, template: str, kinds: list[str]) -> None:
    assert [each.kind for each in rewrites_of(tmp_path, chat_models.TEMPLATES[template])] == kinds


@pytest.mark.parametrize(
    ("template", "kinds"),
    [
        (HERMES_THINKING, []),
        # The response template separates the thinking, and the chat template does not write it.
        (HERMES, [THINKING_USER, THINKING_CALL]),
        # Removes the thinking before the last user message, and writes an empty one after it.
        (chat_models.QWEN3_TOOLS.replace("BEGINNING", ""), [THINKING_USER, TOOL_CALL]),
        (chat_models.QWEN3_TOOLS.replace("BEGINNING", "<think>\n"), [THINKING_USER]),
    ],
)
def test_rewritten_tool_calls_are_found(tmp_path: Path, template: str, kinds: list[str]) -> None:
    found = rewrites_of(tmp_path, template, [TOOL], responses=chat_models.HERMES_RESPONSES)
    assert [each.kind for each in found] == kinds


def test_only_messages_of_the_environment_matter(tmp_path: Path) -> None:
    template = chat_models.QWEN3_TOOLS.replace("BEGINNING", "<think>\n")
    responses = chat_models.HERMES_RESPONSES
    assert rewrites_of(tmp_path, template, [TOOL], responses=responses, has_user_messages=False) == ()


def test_a_rewrite_shows_both_texts(tmp_path: Path) -> None:
    (rewrite,) = rewrites_of(tmp_path, chat_models.TEMPLATES["Qwen3, thinking"])
    assert "<|im_start|>assistant\n<think>\n" in rewrite.sampled
    assert "<|im_start|>assistant\nVq3answer3Qv<|im_end|>" in rewrite.rendered
    assert str(rewrite).startswith(f"{THINKING_USER}: '")


def test_a_turn_that_the_template_cannot_write_again_is_a_rewrite(tmp_path: Path) -> None:
    """Like gpt-oss, whose template rejects its own markup in a content."""
    jinja = (
        "{% for m in messages %}{% if '<final>' in m.content %}{{ raise_exception('use a field') }}{% endif %}"
        "<|im_start|>{{ m.role }}{% if m.role == 'assistant' %}<final>{% endif %}{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
    )
    without_thinking, _ = rewrites_of(tmp_path, jinja)
    assert without_thinking.sampled == "<final>Vq3answer3Qv"
    assert without_thinking.rendered.endswith("failed: use a field")


WITHOUT_CALLS = HERMES.replace("message.tool_calls or []", "[]")
WITHOUT_RESULTS = HERMES.replace("<tool_response>\n{{ message.content }}\n</tool_response>", "")
REJECTING = "{% if messages[-1].role == 'tool' %}{{ raise_exception('unknown role') }}{% endif %}" + HERMES
OTHER_RESPONSES = {
    **chat_models.HERMES_RESPONSES,
    "fields": {"tool_calls": {"open": "<call>", "close": "</call>", "content": "json", "repeats": True}, "content": {}},
}


@pytest.mark.parametrize(
    ("template", "responses", "message"),
    [
        (chat_models.TEMPLATES["ChatML"], chat_models.HERMES_RESPONSES, r"ignores them \(add\)"),
        (WITHOUT_CALLS, chat_models.HERMES_RESPONSES, "ignores the tool calls of the assistant's turns"),
        (WITHOUT_RESULTS, chat_models.HERMES_RESPONSES, "ignores messages with the role 'tool'"),
        (REJECTING, chat_models.HERMES_RESPONSES, "rejects a tool call .* unknown role"),
        (HERMES, OTHER_RESPONSES, "the parser does not find the tool call"),
        (HERMES, None, "Set toolParser to the name of vLLM's tool parser"),
    ],
)
def test_what_a_template_lacks_for_tools_is_named(
    tmp_path: Path, template: str, responses: dict[str, object] | None, message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        rewrites_of(tmp_path, template, [TOOL], responses=responses)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            "{% if messages | length > 1 %}{{ raise_exception('one message') }}{% endif %}x{{ messages[0].content }}",
            "one",
        ),
        ("{{ messages[0].content }}", "ignores the content of the assistant's turns"),
        ("{% for m in messages[:2] %}{{ m.content }}{% endfor %}", "ignores messages with the role 'user'"),
    ],
)
def test_what_a_template_lacks_for_several_turns_is_named(tmp_path: Path, template: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        rewrites_of(tmp_path, template)


def test_an_environment_needs_a_chat_template(tmp_path: Path) -> None:
    saved = chat_models.save(tmp_path, "x")
    (saved / "chat_template.jinja").unlink()
    with pytest.raises(ConfigurationError, match="has no chat template"):
        TurnTemplate(Tokenizer(saved))
