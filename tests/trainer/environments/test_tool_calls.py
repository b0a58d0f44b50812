"""Tool calls are read from anything that a policy can write. A broken call becomes an explanation for the model."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_testing.models import chat_models
from rljob_trainer.engines.rollout.tool_parser import FoundCall, FoundCalls
from rljob_trainer.environments.template_check import find_rewrites
from rljob_trainer.environments.tool_calls import (
    MAX_ERROR_LENGTH,
    ParsedTurn,
    ResponseTemplateParser,
    ToolParserTurns,
    TurnParser,
    turn_parser,
)
from rljob_trainer.environments.turn_template import TurnTemplate
from rljob_trainer.errors import ConfigurationError
from rljob_trainer.models.tokenizer import Tokenizer, ToolSchema

ADD: ToolSchema = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
PROMPT = "<|im_start|>user\nhi <|im_start|>assistant\n there<|im_end|>\n<|im_start|>assistant\n"
NUM_NESTED = 60


def call(body: str) -> str:
    """A tool call as the model writes it; `body` is JSON or not."""
    return f"<tool_call>\n{body}\n</tool_call>"


ADD_CALL = call('{"name": "add", "arguments": {"a": 1}}')
OTHER_CALL = call('{"name": "other", "arguments": {}}')


class HermesByHand:
    """Finds calls like vLLM's parser `hermes`: none if one of them is broken."""

    def find_calls(self, text: str) -> FoundCalls:
        content, *parts = text.split("<tool_call>")
        try:
            raw = [json.loads(part.partition("</tool_call>")[0]) for part in parts]
            calls = tuple(FoundCall(each["name"], json.dumps(each["arguments"])) for each in raw)
        except (ValueError, KeyError, TypeError, RecursionError):
            return FoundCalls(text, ())
        return FoundCalls(content.strip(), calls)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> TurnTemplate:
    jinja = chat_models.HERMES.replace("THINKING", "").replace("BEGINNING", "")
    folder = chat_models.save(
        tmp_path_factory.mktemp("model"),
        jinja,
        eos_token="<|im_end|>",
        are_special=False,
        response_template=chat_models.HERMES_RESPONSES,
    )
    return TurnTemplate(Tokenizer(folder), [ADD])


@pytest.fixture(params=["response template", "tool parser"])
def parser(request: pytest.FixtureRequest, template: TurnTemplate) -> TurnParser:
    if request.param == "tool parser":
        return ToolParserTurns(template, HermesByHand())
    return turn_parser(template)


def test_calls_are_read(parser: TurnParser) -> None:
    turn = parser.parse(PROMPT, "", f"I add.\n{ADD_CALL}\n{OTHER_CALL}", "")
    assert turn.parse_error is None
    assert turn.message["content"] == "I add."
    assert turn.tool_calls == [
        {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}},
        {"id": "call00001", "type": "function", "function": {"name": "other", "arguments": {}}},
    ]


def test_a_turn_without_calls_is_content(parser: TurnParser) -> None:
    turn = parser.parse(PROMPT, "", "It is 3.", "")
    assert turn == ParsedTurn({"role": "assistant", "content": "It is 3."})
    assert turn.tool_calls == []


def test_the_beginning_of_a_turn_belongs_to_it(parser: TurnParser) -> None:
    written = f"</think>\n\n{ADD_CALL}"
    turn = parser.parse(f"{PROMPT}<think>\nUse {call('x')}.\n", "<think>\n", written, "")
    assert turn.parse_error is None
    assert [each["function"]["name"] for each in turn.tool_calls] == ["add"]


def test_thinking_is_separated_by_the_response_template(template: TurnTemplate) -> None:
    turn = turn_parser(template).parse(f"{PROMPT}<think>\n", "<think>\n", "1 + 2\n</think>\n\n3", "")
    assert turn.message == {"role": "assistant", "content": "3", "reasoning_content": "1 + 2", "thinking": "1 + 2"}


def test_thinking_stays_where_a_tool_parser_found_it(template: TurnTemplate) -> None:
    parser = ToolParserTurns(template, HermesByHand())
    written = f"{call('{}')}</think>{ADD_CALL}"
    turn = parser.parse(PROMPT, "<think>", written, "")
    assert turn.message["content"] == f"<think>{call('{}')}</think>"
    assert [each["function"]["name"] for each in turn.tool_calls] == ["add"]


@pytest.mark.parametrize(
    "written",
    [
        call("{bad"),
        call('{"arguments": {}}'),
        call('{"name": 7, "arguments": {}}'),
        call('{"name": "", "arguments": {}}'),
        call('{"name": "add", "arguments": [1]}'),
        call('{"name": "add", "arguments": "{bad"}'),
        call('{"name": "add", "arguments": {"a": NaN}}'),
        call('{"name": "add", "arguments": {"a": 1e999}}'),
        call('{"name": "add", "arguments": {"a": "\\ud800"}}'),
        call('{"name": "add", "arguments": {"\\ud800": 1}}'),
        call('{"name": "\\ud800", "arguments": {}}'),
        call(f'{{"name": "add", "arguments": {{"a": {"9" * 5000}}}}}'),
        call(f'{{"name": "add", "arguments": {{"a": {"[" * NUM_NESTED}{"]" * NUM_NESTED}}}}}'),
        call(f'{{"name": "add", "arguments": {"[" * 100_000}'),
        call("[]"),
        call("null"),
        call('"add"'),
        ADD_CALL + call("{"),
        "<tool_call>",
        '<tool_call>{"name": "add", "argum',
    ],
)
def test_a_broken_call_is_explained_and_stays_in_the_content(parser: TurnParser, written: str) -> None:
    turn = parser.parse(PROMPT, "", f"See: {written}", "")
    assert turn.parse_error is not None
    assert turn.parse_error.startswith("The tool call cannot be read: ")
    assert len(turn.parse_error) < MAX_ERROR_LENGTH + 100
    turn.parse_error.encode()
    assert turn.message == {"role": "assistant", "content": f"See: {written}"}


@pytest.mark.parametrize(
    ("body", "explanation"),
    [
        ('{"name": "add", "arguments": [1]}', r"the arguments of add must be a JSON object \(seen: \[1\]\)"),
        ('{"name": "add", "arguments": {"a": NaN}}', "contains nan, which is not a JSON number"),
        ('{"name": "add", "arguments": {"a": "\\ud800"}}', "contains an unpaired surrogate"),
        (f'{{"name": "add", "arguments": {{"a": {"[" * 60}{"]" * 60}}}}}', "nested more than 50 levels deep"),
    ],
)
def test_the_model_learns_what_is_wrong(parser: TurnParser, body: str, explanation: str) -> None:
    with pytest.raises(ValueError, match=explanation):
        raise ValueError(parser.parse(PROMPT, "", call(body), "").parse_error)


def test_the_end_token_helps_a_response_template(tmp_path: Path) -> None:
    """Like Llama 3, whose calls have no closing tag."""
    jinja = (
        "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for m in messages %}<|User|>"
        "{{ m.content }}{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}<|eot_id|>"
        "{% endfor %}{% if add_generation_prompt %}<|User|>{% endif %}"
    )
    call_field = {
        "open_pattern": r'\{"name": "(?P<name>[^"]+)", "arguments": ',
        "close": "}<|eot_id|>",
        "content": "json",
        "repeats": True,
        "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
    }
    responses: dict[str, object] = {"start_anchor": "<|User|>", "fields": {"tool_calls": call_field, "content": {}}}
    folder = chat_models.save(tmp_path, jinja, eos_token="<|eot_id|>", response_template=responses)
    template = TurnTemplate(Tokenizer(folder), [ADD])
    parser = turn_parser(template)
    assert find_rewrites(template, parser) == ()
    turn = parser.parse("<|User|>", "", '{"name": "add", "arguments": {"a": 1}}', "<|eot_id|>")
    assert [each["function"] for each in turn.tool_calls] == [{"name": "add", "arguments": {"a": 1}}]
    # The end token is not part of the content.
    assert parser.parse("<|User|>", "", "3", "<|eot_id|>").message["content"] == "3"


def test_a_call_that_the_response_template_does_not_recognize_is_broken(tmp_path: Path) -> None:
    call_field = {
        "open_pattern": r'<tool_call>\s*\{"name": "(?P<name>\w+)", "arguments": ',
        "close_pattern": r"\}\s*</tool_call>",
        "content": "json",
        "repeats": True,
        "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
    }
    responses = {**chat_models.HERMES_RESPONSES, "fields": {"tool_calls": call_field, "content": {}}}
    jinja = chat_models.HERMES.replace("THINKING", "").replace("BEGINNING", "")
    folder = chat_models.save(tmp_path, jinja, are_special=False, response_template=responses)
    parser = turn_parser(TurnTemplate(Tokenizer(folder), [ADD]))
    assert [each["function"]["name"] for each in parser.parse(PROMPT, "", ADD_CALL, "").tool_calls] == ["add"]
    broken = parser.parse(PROMPT, "", call('{"arguments": {}}'), "")
    assert broken.parse_error is not None
    assert broken.parse_error.endswith("contains <tool_call>, but no complete tool call follows it")


ANYTHING = st.lists(
    st.one_of(
        st.sampled_from(
            [
                *("<tool_call>", "</tool_call>", "<think>", "</think>", "<|im_end|>", "<|im_start|>assistant\n"),
                *('{"name": "add", "arguments": {"a": 1}}', '{"name": ', '"add"', "{}", "[", "}", "\\ud800", "\ud800"),
            ]
        ),
        st.text(max_size=5),
        st.recursive(
            st.one_of(st.none(), st.floats(), st.text(max_size=3)),
            lambda inner: st.one_of(
                st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)
            ),
            max_leaves=5,
        ).map(lambda value: call(json.dumps({"name": "add", "arguments": value}))),
    ),
    max_size=8,
).map("".join)


def check_anything(parser: TurnParser, text: str) -> None:
    turn = parser.parse(PROMPT, "", text, "")
    assert turn.message["role"] == "assistant"
    assert isinstance(turn.message["content"], str)
    assert turn.parse_error is None or (turn.tool_calls == [] and turn.message["content"] == text)
    if turn.parse_error is not None:
        turn.parse_error.encode()
    for each in turn.tool_calls:
        # The environment gets the call as JSON.
        sent = json.dumps(each["function"], allow_nan=False, ensure_ascii=False)
        assert json.loads(sent.encode()) == each["function"]


@settings(max_examples=300, deadline=None)
@given(text=ANYTHING)
def test_anything_is_read_by_a_response_template(template: TurnTemplate, text: str) -> None:
    check_anything(ResponseTemplateParser(template), text)


@settings(max_examples=300, deadline=None)
@given(text=ANYTHING)
def test_anything_is_read_by_a_tool_parser(template: TurnTemplate, text: str) -> None:
    check_anything(ToolParserTurns(template, HermesByHand()), text)


def raising(error: type[Exception]) -> Callable[[str], FoundCalls]:
    def find_calls(text: str) -> FoundCalls:
        raise error(text)

    return find_calls


def test_an_error_of_a_tool_parser_is_an_explanation(template: TurnTemplate, monkeypatch: pytest.MonkeyPatch) -> None:
    tool_parser = HermesByHand()
    monkeypatch.setattr(tool_parser, "find_calls", raising(IndexError))
    turn = ToolParserTurns(template, tool_parser).parse(PROMPT, "", "x", "")
    assert turn.parse_error == "The tool call cannot be read: IndexError: x"


def test_without_tools_calls_are_content(template: TurnTemplate) -> None:
    without_tools = turn_parser(TurnTemplate(template.tokenizer))
    written = f"Call: {ADD_CALL}"
    for text in (written, call("{bad"), "<tool_call>"):
        assert without_tools.parse(PROMPT, "", text, "") == ParsedTurn({"role": "assistant", "content": text})


def test_without_a_response_template_the_turn_is_content(tmp_path: Path) -> None:
    parser = turn_parser(TurnTemplate(Tokenizer(chat_models.save(tmp_path, chat_models.R1))))
    turn = parser.parse("<|Assistant|><think>\n", "<think>\n", "add</think>4 ", "")
    assert turn == ParsedTurn({"role": "assistant", "content": "<think>\nadd</think>4 "})


def test_tools_need_a_parser(tmp_path: Path) -> None:
    template = TurnTemplate(Tokenizer(chat_models.save(tmp_path, chat_models.HERMES)), [ADD])
    with pytest.raises(ConfigurationError, match=r"has tools, but .* has no response template .* Set toolParser"):
        turn_parser(template)


def test_a_tool_parser_needs_vllm(template: TurnTemplate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rljob_trainer.engines.rollout.vllm_tool_parsers", None)
    with pytest.raises(ConfigurationError, match=r"toolParser: it needs vLLM, which cannot be imported .*'hermes'"):
        turn_parser(template, "hermes")
