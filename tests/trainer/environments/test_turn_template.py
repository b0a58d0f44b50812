"""What different chat templates write after a turn of the assistant."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rljob_testing.models import chat_models
from rljob_trainer.environments.turn_template import TurnTemplate
from rljob_trainer.errors import ChatTemplateError, ConfigurationError
from rljob_trainer.models.tokenizer import ChatMessage, Tokenizer, ToolSchema

ADD: ToolSchema = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
HERMES = chat_models.HERMES.replace("THINKING", "").replace("BEGINNING", "")
WHY: ChatMessage = {"role": "user", "content": "why?"}


def result(content: str, call_id: str = "call00000") -> ChatMessage:
    return {"role": "tool", "name": "add", "content": content, "tool_call_id": call_id}


def template_of(
    folder: Path, jinja: str, *, eos: Sequence[str] = ("<|im_end|>",), tools: Sequence[ToolSchema] = ()
) -> TurnTemplate:
    saved = chat_models.save(folder, jinja, eos_token=eos[0], are_special=False)
    vocabulary = Tokenizer(saved).vocabulary()
    (saved / "generation_config.json").write_text(json.dumps({"eos_token_id": [vocabulary[token] for token in eos]}))
    return TurnTemplate(Tokenizer(saved), tools)


# Like GLM: a turn has no end. The token that opens the next message stops the model.
OPENING = (
    "{% for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}{% elif m.role == 'tool' %}"
    "<|endoftext|>{{ m.content }}{% else %}<|Assistant|>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<call>{{ call.function.arguments | tojson }}</call>{% endfor %}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|Assistant|>{% endif %}"
)
OPENING_TOKENS = ("<|User|>", "<|endoftext|>")


@pytest.mark.parametrize(
    ("written", "messages", "after_tool_calls", "added"),
    [
        ("4<|User|>", [WHY], False, "why?<|Assistant|>"),
        ("4", [WHY], False, "<|User|>why?<|Assistant|>"),
        ("<call>{}</call><|endoftext|>", [result("3")], True, "3<|Assistant|>"),
        ("<call>{}</call>", [result("3"), result("4")], True, "<|endoftext|>3<|endoftext|>4<|Assistant|>"),
        # The model expects the user, but the tool answers.
        ("<call>{}</call><|User|>", [result("3")], True, "<|endoftext|>3<|Assistant|>"),
    ],
)
def test_a_token_that_opens_the_next_message_is_not_repeated(
    tmp_path: Path, written: str, messages: list[ChatMessage], after_tool_calls: bool, added: str
) -> None:
    template = template_of(tmp_path, OPENING, eos=OPENING_TOKENS, tools=[ADD])
    turn = template.tokenizer.encode(written, add_special_tokens=False)
    found = template.after_turn(turn, messages, after_tool_calls=after_tool_calls, is_stopped=True)
    assert found.text == added
    assert list(found.token_ids) == template.tokenizer.encode(added, add_special_tokens=False)


# Like Llama 3.1: a turn with tool calls has another end.
TWO_ENDS = (
    "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>"
    "{% if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}<|endoftext|>{% else %}{{ m.content }}<|eot_id|>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>{% endif %}"
)


def test_a_turn_with_tool_calls_may_end_differently(tmp_path: Path) -> None:
    template = template_of(tmp_path, TWO_ENDS, eos=("<|eot_id|>", "<|endoftext|>"), tools=[ADD])
    header = "<|start_header_id|>{}<|end_header_id|>"
    tool = f"<|endoftext|>{header.format('tool')}3<|eot_id|>{header.format('assistant')}"
    assert template.suffix([result("3")], after_tool_calls=True) == tool
    user = f"<|eot_id|>{header.format('user')}why?<|eot_id|>{header.format('assistant')}"
    assert template.suffix([WHY], after_tool_calls=False) == user


def test_a_turn_with_tool_calls_needs_no_end_token(tmp_path: Path) -> None:
    jinja = (
        "{% for m in messages %}{{ m.role | upper }}: {{ m.content }}{% for call in m.tool_calls or [] %}"
        "[CALL]{{ call.function.arguments | tojson }}[/CALL]{% endfor %}{{ '\n' }}{% endfor %}ASSISTANT: "
    )
    template = template_of(tmp_path, jinja, tools=[ADD])
    assert template.suffix([result("3")], after_tool_calls=True) == "\nTOOL: 3\nASSISTANT: "
    assert template.call_marker == "[CALL]"


# Like Mistral: there must be one result for each call, with its id. Like gpt-oss: a result names the call.
STRICT = (
    "{% set seen = namespace(calls=0, results=0, name='') %}{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if m.tool_call_id | length != 9 %}{{ raise_exception('bad id') }}{% endif %}"
    "{% set seen.results = seen.results + 1 %}<result of {{ seen.name }}>{{ m.content }}</result>"
    "{% elif m.tool_calls %}{% for call in m.tool_calls %}{% set seen.calls = seen.calls + 1 %}"
    "{% set seen.name = call.function.name %}{% if call.id | length != 9 %}{{ raise_exception('bad id') }}{% endif %}"
    "<call>{{ call.function.arguments | tojson }}</call>{% endfor %}<|im_end|>{% else %}"
    "{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    "{% if seen.calls != seen.results %}{{ raise_exception('results are missing') }}{% endif %}"
)


def test_each_result_has_its_call(tmp_path: Path) -> None:
    template = template_of(tmp_path, STRICT, tools=[ADD])
    suffix = template.suffix([result("3"), result("7", "call00001")], after_tool_calls=True)
    assert suffix == "<|im_end|><result of add>3</result><result of add>7</result>"


def test_calls_without_a_recognizable_end_are_rejected(tmp_path: Path) -> None:
    changing = OPENING.replace("</call>", "</call>{{ messages | length }}").replace("<|endoftext|>", "<|User|>")
    template = template_of(tmp_path, changing, eos=["</s>"], tools=[ADD])
    with pytest.raises(ConfigurationError, match="writes no recognizable end after tool calls"):
        template.suffix([result("3")], after_tool_calls=True)


def test_the_beginning_of_the_next_turn_is_known(tmp_path: Path) -> None:
    jinja = chat_models.QWEN3_TOOLS.replace("BEGINNING", "<think>\n")
    template = template_of(tmp_path, jinja, tools=[ADD])
    assert template.prompt([WHY]).turn_beginning == "<think>\n"
    for message in (WHY, result("3")):
        for after_tool_calls in (False, True):
            found = template.after_turn([], [message], after_tool_calls=after_tool_calls, is_stopped=False)
            assert found.text.startswith("<|im_end|>\n<|im_start|>user\n")
            assert found.text.endswith("<|im_start|>assistant\n<think>\n")
            assert found.turn_beginning == "<think>\n"


def test_the_beginning_is_found_after_other_roles(tmp_path: Path) -> None:
    jinja = (
        "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for m in messages %}"
        "{% if m.role == 'tool' %}<answer>{{ m.content }}</answer>{% else %}<|im_start|>{{ m.role }}:{{ m.content }}"
        "{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}<|im_end|>{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant:<think>{% endif %}"
    )
    template = template_of(tmp_path, jinja, tools=[ADD])
    found = template.after_turn([], [result("3")], after_tool_calls=True, is_stopped=False)
    assert found.text == "<|im_end|><answer>3</answer><|im_start|>assistant:<think>"
    assert found.turn_beginning == "<think>"


@pytest.mark.parametrize("content", ["", " ", "x", "Vq3answer3Qv", "<|im_end|>", "assistant", "\n\n"])
def test_any_content_is_written_after_the_turn(tmp_path: Path, content: str) -> None:
    template = template_of(tmp_path, HERMES, tools=[ADD])
    end = template.tokenizer.encode("<|im_end|>", add_special_tokens=False)
    added = template.after_turn(end, [{"role": "user", "content": content}], after_tool_calls=False, is_stopped=True)
    assert added.text == f"\n<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"
    added = template.after_turn(end, [result(content)], after_tool_calls=True, is_stopped=True)
    written = f"<tool_response>\n{content}\n</tool_response>"
    assert added.text == f"\n<|im_start|>user\n{written}<|im_end|>\n<|im_start|>assistant\n"


def test_messages_get_no_space_in_front(tmp_path: Path) -> None:
    """A SentencePiece tokenizer writes a space before a text, but not in the middle of one."""
    words = ["<unk>", "</s>", *"▁:bckny?", "▁b", "why", "?", "Vq3answer3Qv", "▁Vq3answer3Qv"]
    vocabulary = {word: number for number, word in enumerate(dict.fromkeys(words))}
    backend = Backend(models.WordPiece(vocabulary, unk_token="<unk>", continuing_subword_prefix=""))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(split=False), decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{{ ':' if m.role == 'assistant' }}{% endfor %}"
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    template = TurnTemplate(Tokenizer(tmp_path))
    assert template.tokenizer.encode(":why?", add_special_tokens=False)[0] == vocabulary["▁"]
    found = template.after_turn([vocabulary["b"]], [WHY], after_tool_calls=False, is_stopped=False)
    assert found.token_ids == tuple(vocabulary[word] for word in (":", "why", "?"))


# Each leaves nothing out, but does not write every content as it is.
CHANGING = {
    "strips": "{% for m in messages %}<|im_start|>{{ m.content | trim }}<|im_end|>{% endfor %}",
    "as JSON": "{% for m in messages %}<|im_start|>{{ {'output': m.content} | tojson }}<|im_end|>{% endfor %}",
    "the beginning": "{% for m in messages %}{{ m.content[:3] }}<|im_end|>{% endfor %}",
    "the end": "{% for m in messages %}{{ m.content[-3:] | upper }}<|im_end|>{% endfor %}",
    "calls without a content": (
        "{% for m in messages %}{% if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}{% else %}{{ m.content }}"
        "{% endif %}<|im_end|>{% endfor %}"
    ),
    "strict": (
        "{% for m in messages %}{% if m.content and m.tool_calls %}{{ raise_exception('both') }}{% endif %}"
        "{% if m.role == 'system' and m.content != 'a' %}{{ raise_exception('unknown') }}{% endif %}"
        "{{ m.content }}{{ m.tool_calls }}<|im_end|>{% endfor %}"
    ),
}
CALL: ChatMessage = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "call00000", "type": "function", "function": {"name": "add", "arguments": {}}}],
}


@pytest.mark.parametrize("name", CHANGING)
def test_a_template_may_change_contents(tmp_path: Path, name: str) -> None:
    template = template_of(tmp_path, CHANGING[name], tools=[ADD])
    calls = [CALL] if "tool_calls" in CHANGING[name] else []
    template.check_written([{"role": "system", "content": "a"}, WHY, *calls, result("")])
    for content in ("", " ", "3", '{"a": 1}'):
        template.check_written([result(content)], [WHY, CALL])


@pytest.mark.parametrize(
    ("messages", "left_out"),
    [
        # The text contains the letter in other places.
        ([WHY, result("e")], "message 2 (role 'tool': 'e')"),
        # A turn that is left out is a rewrite.
        ([WHY, CALL, result("h"), WHY], "message 3 "),
        ([WHY, {"role": "assistant", "content": "x"}, result(""), {"role": "system", "content": "h"}], "message 4"),
    ],
)
def test_a_message_that_is_left_out_is_found(tmp_path: Path, messages: list[ChatMessage], left_out: str) -> None:
    writes = "{% if m.role in ('user', 'assistant') %}{{ m.content }}<|im_end|>{% endif %}"
    template = template_of(tmp_path, f"{{% for m in messages %}}{writes}{{% endfor %}}")
    for _ in range(2):
        template.check_written([WHY])
        template.check_written([{**message, "content": ""} for message in messages if "tool_calls" not in message])
        with pytest.raises(ChatTemplateError, match=re.escape(f"ignores {left_out}")):
            template.check_written(messages)


def test_messages_are_checked_once_for_their_roles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    template = template_of(tmp_path, HERMES)
    template.after_turn([], [WHY], after_tool_calls=False, is_stopped=False)
    rendered = list[str]()
    render = template.tokenizer.render_chat
    monkeypatch.setattr(template.tokenizer, "render_chat", lambda *each: rendered.append(render(*each)) or rendered[-1])
    template.after_turn([], [{**WHY, "content": "how?"}], after_tool_calls=False, is_stopped=False)
    assert len(rendered) == 1
