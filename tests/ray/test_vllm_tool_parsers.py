"""vLLM's tool parsers find the calls in a model's text. The engine does not run."""

from __future__ import annotations

import json
import logging

import pytest

from rljob_testing.models import chat_models
from rljob_trainer.engines.rollout import vllm_tool_parsers
from rljob_trainer.environments.chat_requests import chat_request
from rljob_trainer.environments.session import SessionTemplates
from rljob_trainer.environments.template_check import find_rewrites
from rljob_trainer.environments.tool_calls import ParsedTurn, turn_parser
from rljob_trainer.environments.turn_template import TurnTemplate
from rljob_trainer.errors import ConfigurationError
from rljob_trainer.models.tokenizer import Tokenizer, ToolSchema

pytestmark = pytest.mark.vllm

ADD: ToolSchema = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> TurnTemplate:
    jinja = chat_models.HERMES.replace("THINKING", "").replace("BEGINNING", "")
    folder = chat_models.save(tmp_path_factory.mktemp("model"), jinja, eos_token="<|im_end|>", are_special=False)
    return TurnTemplate(Tokenizer(folder), [ADD])


def test_the_parser_of_the_job_reads_calls(template: TurnTemplate, caplog: pytest.LogCaptureFixture) -> None:
    parser = turn_parser(template, "hermes")
    assert find_rewrites(template, parser) == ()
    turn = parser.parse("", "", 'Wait. <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', "")
    assert turn.message["content"] == "Wait."
    assert [each["function"] for each in turn.tool_calls] == [{"name": "add", "arguments": {"a": 1}}]
    caplog.clear()
    with caplog.at_level(logging.INFO):
        broken = parser.parse("", "", "<tool_call>\n{bad\n</tool_call>", "")
    assert broken.parse_error is not None
    assert "contains <tool_call>, but no complete tool call" in broken.parse_error
    assert caplog.records == []
    assert parser.parse("", "", "3", "") == ParsedTurn({"role": "assistant", "content": "3"})


def test_the_tokenizer_and_its_vocabulary_are_loaded_once_and_before_the_first_request(
    template: TurnTemplate, monkeypatch: pytest.MonkeyPatch
) -> None:
    templates = SessionTemplates(template.tokenizer, "hermes")

    def refuse(*_: object) -> None:
        raise AssertionError("this takes time")

    monkeypatch.setattr(vllm_tool_parsers, "get_tokenizer", refuse)
    monkeypatch.setattr(template.tokenizer, "vocabulary", refuse)
    body = {"messages": [{"role": "user", "content": "1 + 2?"}], "tools": [ADD]}
    _, parser = templates.of(chat_request(json.dumps(body).encode()))
    assert parser.parse("", "", '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>', "").tool_calls


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hermess", r"toolParser: vLLM has no tool parser 'hermess'; use one of .*hermes"),
        ("llama3_json", r"toolParser: vLLM's tool parser 'llama3_json' does not work with the tokenizer .*python_tag"),
        ("pythonic", "the parser does not find the tool call that the chat template"),
    ],
)
def test_an_unsuitable_parser_is_named(template: TurnTemplate, name: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        find_rewrites(template, turn_parser(template, name))
